"""Replies that are too long for a model keep their place: those after them are not taken for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.analysis.mistakes import sides_of
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import DataError
from rewardlab.core.files import read_jsonl
from rewardlab.core.types import Comparison, Conversation, Message, Preference, ScoreRow, TokenGroup, join_comparisons
from rewardlab.curation.mislabels.pairs import pairs_of
from rewardlab.curation.mislabels.witnesses import replies_of
from rewardlab.data.config import RenderingConfig
from rewardlab.data.groups import Part
from rewardlab.data.layout import Rendered, build_group
from rewardlab.data.originals import Original
from rewardlab.data.store import TokenStore, encode
from rewardlab.data.templates import build_renderer
from rewardlab.diagnosing.states import _common
from rewardlab.evaluation.gold_scores import read_gold
from rewardlab.evaluation.records import write_mistakes
from rewardlab.evaluation.saved import digest_of_groups
from rewardlab.evaluation.texts import find_texts
from rewardlab.score import score_rows

NUM_ROWS = 60  # mislabels are searched for among 50 pairs or more


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, with room for all replies and for the short ones."""
    folder = tmp_path_factory.mktemp("models")
    for name, limit in (("roomy", 128), ("tight", 60)):
        renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=limit))
        save_reward_model(folder / name, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return {name: folder / name for name in ("roomy", "tight")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three responses a row, of which the second is long, and the best by its score the last."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {
            "prompt": f"{n}?",
            "responses": [f"no {n}", "long " * 14 + str(n), f"yes {n * 7}"],
            "scores": [0.5, 0, n + 1.0],
        }
        for n in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def judged(models, data, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("judged")
    for name, model in models.items():
        given = ["--dataset", str(data), "--gold", str(data), "--no-precision-card", "--output-dir", str(folder / name)]
        main(["eval", str(model), *given])
    return {name: folder / name for name in models}


def rows_of(folder: Path) -> list[ScoreRow]:
    return [ScoreRow.from_dict(row) for _, row in read_jsonl(folder / "eval.scores.jsonl")]


def test_a_reply_has_one_number_in_the_scores_of_all_models(judged):
    roomy, tight = rows_of(judged["roomy"]), rows_of(judged["tight"])
    assert len(roomy) == 3 * NUM_ROWS
    assert {row.reply for row in tight} == {0, 2}
    by_roomy = {(row.preference_id, row.reply): row for row in roomy}
    for row in tight:
        other = by_roomy[row.preference_id, row.reply]
        assert row.num_tokens == other.num_tokens
        assert row.score == pytest.approx(other.score, abs=1e-4)
    joined = list(join_comparisons(tight))
    assert len(joined) == NUM_ROWS
    assert {(one.first.reply, one.second.reply) for one in joined} <= {(0, 2), (2, 0)}
    assert all(sides_of(one)[0].reply == 2 for one in joined), "its score is the best"


def test_replies_that_are_lost_are_told(models, data, tmp_path, caplog):
    for name, told in (("roomy", False), ("tight", True)):
        out = str(tmp_path / name)
        main(["eval", str(models[name]), "--dataset", str(data), "--no-precision-card", "--output-dir", out])
        lost = f"{NUM_ROWS} replies too long for the limit or without a rendering"
        line = f"left out: {lost}, and {2 * NUM_ROWS} comparisons with these"
        assert (line in caplog.text) == told


def test_gold_scores_and_mistakes_are_of_the_same_reply(judged, data):
    given = {f"data.jsonl:{n}": row for n, row in read_jsonl(data)}
    for name, numbers in (("roomy", {0, 1, 2}), ("tight", {0, 2})):
        gold = [row for _, row in read_jsonl(judged[name] / "eval.gold.jsonl")]
        assert {row["reply"] for row in gold} == numbers
        for row in gold:
            assert row["gold"] == given[row["preference_id"]]["scores"][row["reply"]]
    mistakes = [row for _, row in read_jsonl(judged["tight"] / "eval.mistakes.jsonl")]
    for mistake in mistakes:
        for side in ("preferred", "other"):
            (turn,) = mistake[side]["messages"]
            assert turn["content"] == given[mistake["preference_id"]]["responses"][mistake[side]["reply"]]
    page = (judged["tight"] / "report.md").read_text()
    assert mistakes, "of an untrained model"
    assert "unknown which were" not in page


def test_models_that_lost_other_replies_are_compared_on_those_that_both_have(judged, tmp_path, capsys):
    folders = [str(judged[name]) for name in ("roomy", "tight")]
    with pytest.raises(SystemExit):
        main(["compare", *folders, "--output-dir", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert f"tight lacks {2 * NUM_ROWS} of {3 * NUM_ROWS} comparisons" in told
    assert "it lacks single replies, as of those too long for a model. " in told
    main(["compare", *folders, "--common", "--output-dir", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out/compare.json").read_text())
    assert found["missing"] == {"tight": 2 * NUM_ROWS}
    assert found["comparisons"] == NUM_ROWS


def test_a_witness_of_whole_rows_says_nothing_of_replies_drawn_from_them(judged, models, data, tmp_path, capsys):
    witnesses = ["--witness", str(judged["roomy"]), str(models["roomy"]), "--no-near-duplicates"]
    given = ["data", "mislabels", str(data), *witnesses, "--output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main([*given, "--max-replies", "2"])
    assert "with the same --max-replies" in capsys.readouterr().err


# --- the parts ---------------------------------------------------------------------------------------------------


def said(text: str) -> Conversation:
    return (Message("assistant", text),)


def preference(num_replies: int = 4) -> Preference:
    return Preference(
        id="data.jsonl:1", source="data", prompt=(Message("user", "How?"),),
        replies=tuple(said(f"reply {n}") for n in range(num_replies)),
        comparisons=tuple(
            Comparison(first=a, second=b) for a in range(num_replies) for b in range(a + 1, num_replies)
        ),
        ranking=tuple(range(num_replies)),
    )  # fmt: skip


def rendered(*numbers: int) -> dict[int, Rendered]:
    return {
        n: Rendered(token_ids=np.array([1, 2, 3 + n], np.int32), prompt_tokens=2, truncated_tokens=0) for n in numbers
    }


def group_of(given: Preference, left: dict[int, Rendered]) -> TokenGroup:
    group = build_group(given, left)
    assert not isinstance(group, str)
    return group


def test_comparisons_of_a_group_count_its_own_replies_and_rows_those_of_the_data():
    group = group_of(preference(), rendered(0, 2, 3))
    assert group.numbers == (0, 2, 3)
    assert {(c.first, c.second) for c in group.comparisons} == {(0, 1), (0, 2), (1, 2)}
    assert group.ranking == (0, 1, 2)
    rows = score_rows([group], [torch.tensor([1.0, 2.0, 3.0]).numpy()])
    assert [(row.reply, row.score) for row in rows] == [(0, 1.0), (2, 2.0), (3, 3.0)]
    assert [[(c.first, c.second) for c in row.comparisons] for row in rows] == [[(0, 2), (0, 3)], [(2, 3)], []]


def test_controls_that_lost_other_replies_are_not_set_beside_each_other():
    given = [preference(3), replace(preference(3), id="data.jsonl:2")]
    whole = group_of(given[0], rendered(0, 1, 2))
    former, latter = (group_of(given[1], rendered(*kept)) for kept in ((0, 1), (0, 2)))
    plain, same, other = (
        Part([TokenStore(columns=encode(given, groups), source="data", facts={})], np.arange(2)).groups()
        for groups in ([whole, former], [whole, former], [whole, latter])
    )
    assert [len(groups) for groups in _common(plain, {"response_only": same}).values()] == [2, 2]
    found = _common(plain, {"response_only": other})
    assert [group.numbers for groups in found.values() for group in groups] == [(0, 1, 2)] * 2


def test_a_witness_knows_the_replies_that_are_left():
    given = [replace(preference(4), id=f"data.jsonl:{n}") for n in range(10)]
    pairs = pairs_of(given, np.arange(10), seed=0)
    rows_N2 = replies_of([group_of(one, rendered(0, 2, 3)) for one in given], pairs)
    place = {0: 0, 2: 1, 3: 2}
    for found, owner, *ends in zip(rows_N2.tolist(), pairs.owners_N, pairs.first_N, pairs.second_N, strict=True):
        assert found == ([-1, -1] if 1 in ends else [3 * owner + place[int(end)] for end in ends])
    assert (rows_N2 >= 0).all(1).sum() == 30


def test_kept_scores_of_other_replies_are_not_used():
    same = {0: rendered(0)[0], 2: rendered(1)[1]}
    groups = [group_of(preference(3), own) for own in (rendered(0, 1), rendered(0, 2), same)]
    assert len({digest_of_groups([group]) for group in groups}) == 3


def test_gold_scores_of_a_row_are_taken_for_the_replies_that_are_left(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "How?", "responses": ["a", "b", "c", "d"], "scores": [1, 2, 3, 4]}) + "\n")
    group = group_of(preference(), rendered(0, 2, 3))
    assert list(read_gold(path, [group]).values()) == [1, 3, 4]


def test_gold_scores_of_a_whole_row_are_not_taken_for_replies_drawn_from_it(tmp_path):
    path = tmp_path / "data.jsonl"
    group = group_of(preference(), rendered(0, 2, 3))
    path.write_text(json.dumps({"prompt": "How?", "responses": [*"abcdef"], "scores": [1, 2, 3, 4, 5, 6]}) + "\n")
    with pytest.raises(DataError, match="no preference that is judged has gold scores"):
        read_gold(path, [group], max_replies=4)
    path.write_text(json.dumps({"prompt": "How?", "responses": [*"abcd"], "scores": [1, 2, 3, 4]}) + "\n")
    assert list(read_gold(path, [group], max_replies=4).values()) == [1, 3, 4], "none were drawn of four"


def test_mistakes_and_reports_show_the_texts_of_the_replies_that_are_left(tmp_path):
    group = group_of(preference(), rendered(0, 2, 3))
    rows = score_rows([group], [torch.tensor([1.0, 2.0, 3.0]).numpy()])
    joined = next(iter(join_comparisons(rows)))
    write_mistakes(tmp_path, "eval", [joined], [Original(preference=preference(), columns={})])
    ((_, line),) = read_jsonl(tmp_path / "eval.mistakes.jsonl")
    assert [line[side]["messages"][0]["content"] for side in ("preferred", "other")] == ["reply 0", "reply 2"]


@pytest.mark.parametrize(("numbers", "found"), [((0, 1, 2, 3), True), ((0, 2, 3), True), ((0, 1, 2), False)])
def test_texts_are_found_unless_rows_may_be_numbered_as_they_once_were(tmp_path, numbers, found):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "How?", "responses": ["a", "b", "c", "d"], "scores": [4, 3, 2, 1]}) + "\n")
    group = group_of(preference(), rendered(0, 1, 2, 3))
    rows = [row for row in score_rows([group], [torch.arange(4.0).numpy()]) if row.reply in numbers]
    key = ("data", "data.jsonl:1")
    texts = find_texts({"dataset": [str(path)]}, "eval", [key], rows)
    assert (key in texts.preferences) == found
    assert bool(texts.problems) != found
