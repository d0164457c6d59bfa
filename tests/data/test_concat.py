"""Bare texts: prompt, reply, EOS and nothing else, as TRL has them; and rows that are left out for their length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from common import CHATML, make_tokenizer, pair
from harness.in_memory import load_preferences
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.spec import LEAVE_OUT
from rewardlab.core.types import Message, Preference
from rewardlab.data.chat import Renderer
from rewardlab.data.config import DataConfig, RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.data.token_report import tokenize

EOS = "<|im_end|>"
TEXT_ROWS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    {"prompt": "Say  yes\n\n", "chosen": "yes \n", "rejected": f"no{EOS}"},
    {"prompt": "Human: Is water wet? ", "chosen": "Assistant: certainly", "rejected": "no 123"},
]
HH_ROWS = [
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello! \n\nHuman: Why?\n\nAssistant: So.",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Hello! \n\nHuman: Why?\n\nAssistant: Soil",
    }
]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is water wet?"}]
CHAT_ROWS = [
    {
        "prompt": TURNS,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no \n"}],
    }
]


def tokenizer_with(specials: str | None, template: str | None = None) -> Any:
    """A tokenizer that puts tokens of its own around a text, such as BOS."""
    tokenizer = make_tokenizer(template, pad="<|unused|>")
    if specials is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=specials, special_tokens=[("<|im_start|>", 1), (EOS, 2)]
        )
    return tokenizer


def preferences_of(rows: list[dict[str, Any]], tmp_path: Path, **settings: Any) -> tuple[Preference, ...]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = from_mapping(DataConfig, {"max_drop_fraction": 0.0, **settings}, where="the test")
    bare = config.rendering.joins_texts
    return load_preferences(
        [str(path)], split="train", reading=config.reading, bare=bare, seed=0, limit=None
    ).preferences


def token_pairs(renderer: Renderer, preferences: tuple[Preference, ...]) -> list[tuple[list[int], list[int]]]:
    groups, _ = tokenize(preferences, renderer, max_drop_fraction=0.0, name="t")
    return [(group.conversation(0).tolist(), group.conversation(1).tolist()) for group in groups]


@pytest.mark.parametrize("specials", [None, "<|im_start|> $A"], ids=["no BOS", "BOS"])
def test_texts_are_joined_as_they_are_and_end_in_one_eos(tmp_path, specials):
    tokenizer = tokenizer_with(specials)
    renderer = build_renderer(tokenizer, RenderingConfig(chat_template="concat"))
    assert renderer.spec.template_source == "concat"
    assert renderer.spec.final_token_id == tokenizer.eos_token_id
    assert renderer.spec.num_bos == (specials is not None)
    first = "<|im_start|>" if specials else ""
    expected = [
        [f"{first}The sky is blue.{EOS}", f"{first}The sky is green.{EOS}"],
        [f"{first}Say  yes\n\nyes \n{EOS}", f"{first}Say  yes\n\nno{EOS}"],
        [f"{first}Human: Is water wet? Assistant: certainly{EOS}", f"{first}Human: Is water wet? no 123{EOS}"],
    ]
    found = token_pairs(renderer, preferences_of(TEXT_ROWS, tmp_path, chat_template="concat"))
    assert [[tokenizer.decode(ids) for ids in sides] for sides in found] == expected
    assert found == [
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in sides) for sides in expected
    ]


def test_whole_transcripts_keep_every_character(tmp_path):
    (preference,) = preferences_of(HH_ROWS, tmp_path, chat_template="concat")
    assert preference.prompt == (Message("user", "\n\nHuman: Hi\n\nAssistant: Hello! \n\nHuman: Why?\n\nAssistant:"),)
    assert preference.replies == ((Message("assistant", " So."),), (Message("assistant", " Soil"),))
    (parsed,) = preferences_of(HH_ROWS, tmp_path)
    assert len(parsed.prompt) == 3, "elsewhere a transcript becomes turns"
    longer = HH_ROWS[0]["chosen"] + "\n\nHuman: x\n\nAssistant: y"
    for sides in ({"rejected": longer}, {"chosen": longer, "rejected": HH_ROWS[0]["chosen"]}):
        (one_in_the_other,) = preferences_of([HH_ROWS[0] | sides], tmp_path, chat_template="concat")
        assert [reply[0].content[:4] for reply in one_in_the_other.replies] == [" So.", " So."]
    with pytest.raises(DataError, match="no_prompt: 1 .*share no Assistant turn"):
        preferences_of([{"chosen": "good", "rejected": "bad"}], tmp_path, chat_template="concat")


def test_tokens_that_a_template_cannot_repeat_are_refused():
    with pytest.raises(RenderError, match="adds tokens of its own around a text"):
        build_renderer(tokenizer_with(f"$A {EOS}"), RenderingConfig(chat_template="concat"))
    without_eos = make_tokenizer(None)
    without_eos.eos_token = None
    with pytest.raises(RenderError, match="has no EOS token"):
        build_renderer(without_eos, RenderingConfig(chat_template="concat"))


def test_a_generation_prompt_has_no_eos():
    renderer = build_renderer(make_tokenizer(None), RenderingConfig(chat_template="concat"))
    assert renderer.text((Message("user", "The sky is"),), add_generation_prompt=True) == "The sky is"


def trl_tokens(rows: list[dict[str, Any]], tokenizer: Any, max_length: int | None = None) -> list[Any]:
    """What TRL's own trainer makes of the rows."""
    trl = pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    datasets = pytest.importorskip("datasets")
    config = trl.RewardConfig(max_length=max_length, use_cpu=True, bf16=False)
    prepared = trl.RewardTrainer._prepare_dataset(None, datasets.Dataset.from_list(rows), tokenizer, config, "train")
    return [(row["chosen_ids"], row["rejected_ids"]) for row in prepared]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("specials", [None, "<|im_start|> $A"], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("rows", [TEXT_ROWS, HH_ROWS, CHAT_ROWS], ids=["texts", "transcripts", "messages"])
def test_the_tokens_are_those_of_trl(tmp_path, specials, rows):
    wanted = trl_tokens(rows, tokenizer_with(specials, CHATML))
    choice = "template" if rows is CHAT_ROWS else "concat"
    renderer = build_renderer(tokenizer_with(specials, CHATML), RenderingConfig(chat_template=choice))
    assert token_pairs(renderer, preferences_of(rows, tmp_path, chat_template=choice)) == wanted


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_rows_left_out_for_their_length_are_those_of_trl(tmp_path):
    rows = [{"prompt": "no " * n, "chosen": "yes", "rejected": "no " * (n % 5) + "maybe"} for n in range(1, 40)]
    renderer = build_renderer(
        make_tokenizer(None), RenderingConfig(chat_template="concat", max_seq_len=24, truncation="drop")
    )
    preferences = preferences_of(rows, tmp_path, chat_template="concat")
    groups, report = tokenize(preferences, renderer, max_drop_fraction=0.0, name="t")
    wanted = trl_tokens(rows, make_tokenizer(None), max_length=24)
    assert [(g.conversation(0).tolist(), g.conversation(1).tolist()) for g in groups] == wanted
    assert report.dropped == {"overlong": 39 - len(wanted)}
    assert 0 < len(wanted) < 39


def test_long_rows_are_cut_or_left_out_and_counted():
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=40))
    rows = [
        pair("q", "yes", "no", id="short"),
        pair("no " * 60, "yes", "no", id="long prompt"),
        pair("q", "yes " * 60, "no", id="long reply"),
    ]
    groups, report = tokenize(rows, renderer, max_drop_fraction=0.5, name="t")
    assert [group.preference_id for group in groups] == ["short", "long prompt"]
    assert (report.truncated_replies, dict(report.dropped)) == (2, {"reply_too_long": 1})
    dropping = renderer.by(truncation=LEAVE_OUT)
    groups, report = tokenize(rows, dropping, max_drop_fraction=0.0, name="t")
    assert [group.preference_id for group in groups] == ["short"]
    assert (report.truncated_replies, dict(report.dropped)) == (0, {"overlong": 2})
    assert report.dropped_ids["overlong"] == ("long prompt", "long reply")
    with pytest.raises(DataError, match="2 of 2 preferences cannot be used .*overlong: 2"):
        tokenize(rows[1:], dropping, max_drop_fraction=0.0, name="t")


def test_a_kwise_row_with_one_long_reply_is_left_out_whole():
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=40))
    two = pair("q", "yes", "no")
    three = Preference(
        id="k",
        source="t",
        prompt=two.prompt,
        replies=(*two.replies, (Message("assistant", "no " * 60),)),
        comparisons=two.comparisons,
    )
    groups, _ = tokenize([two, three], renderer, max_drop_fraction=0.0, name="t")
    assert [group.num_replies for group in groups] == [2, 2]
    groups, report = tokenize([two, three], renderer.by(truncation=LEAVE_OUT), max_drop_fraction=0.0, name="t")
    assert len(groups) == 1
    assert report.dropped == {"overlong": 1}
