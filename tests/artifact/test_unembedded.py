"""A text with a token for which the model has no embedding is left out, and refused where it is to be scored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common import pair, write_base_model, write_pairs
from rewardlab.artifact.base import open_base
from rewardlab.artifact.load import load
from rewardlab.core.errors import RenderError
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.config import RenderingConfig
from rewardlab.model.config import BackboneConfig
from rewardlab.training.run import train
from runs import config_for

SAID = r"the token 'zebra' \(384\), and the model has embeddings for 384 tokens alone\. Leave it out"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose tokenizer has one token more than it has embeddings."""
    folder = write_base_model(tmp_path / "base")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["x" * size for size in range(30, 30 + 384 - len(tokenizer))])
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(str(folder))
    return folder


def test_such_a_conversation_has_no_rendering(base):
    renderer = open_base(BackboneConfig(model=str(base)), RenderingConfig(max_seq_len=128)).renderer
    for one in (renderer, renderer.by(max_length=64)):
        assert len(one.group(pair("Hi", "a horse", "a cow")).suffixes) == 2
        with pytest.raises(RenderError, match=SAID):
            one.group(pair("Hi", "a zebra", "a cow"))
        one.num_embeddings = 385
        assert len(one.group(pair("Hi", "a zebra", "a cow")).suffixes) == 2


def test_beside_other_replies_it_is_left_out_alone_and_these_keep_their_numbers(base):
    renderer = open_base(BackboneConfig(model=str(base)), RenderingConfig(max_seq_len=128)).renderer
    said = ("a horse", "a zebra", "a cow", "a dog")
    pairs = tuple(Comparison(first=i, second=j) for i in range(4) for j in range(i + 1, 4))
    row = Preference(
        id="k:1",
        source="k",
        prompt=(Message("user", "Hi"),),
        replies=tuple((Message("assistant", text),) for text in said),
        comparisons=pairs,
        ranking=(0, 1, 2, 3),
    )
    for group in (renderer.group(row), *render_all([row], renderer)):
        assert (group.numbers, group.ranking) == ((0, 2, 3), (0, 1, 2))
        assert [(one.first, one.second) for one in group.comparisons] == [(0, 1), (0, 2), (1, 2)]
        for number, text in enumerate(("a horse", "a cow", "a dog")):
            alone = renderer.token_ids((Message("user", "Hi"), Message("assistant", text)))
            assert group.conversation(number).tolist() == alone.tolist()
    (left,) = render_all([replace(row, comparisons=(pairs[0], pairs[3]))], renderer)
    assert left.cause == "template_refuses", "without it nothing is left to compare"
    assert left.place.startswith("k:1: a text has the token 'zebra'")


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_in_training_its_row_is_dropped_and_the_saved_model_refuses_it(base, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 40)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[3]["rejected"] += " zebra"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = train(config_for(base, data, tmp_path / "run", steps=1)).last
    reports = json.loads((tmp_path / "run" / "manifest.json").read_text())["tokens"].values()
    told = [said for report in reports for said in report["dropped_ids"].get("template_refuses", [])]
    assert len(told) == 1
    assert told[0].startswith("pairs.jsonl:4: a text has the token 'zebra' (384)")
    with pytest.raises(RenderError, match=SAID):
        load(folder, device="cpu").score_replies("Hi", ["a horse", "a zebra"])
