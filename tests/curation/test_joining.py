"""Laws of `data convert --join`: every judgement stays, rows become fewer, and a step learns the same from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import runs
from loading import pair, write
from rewardlab import EvalConfig, evaluate_folder, train
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import to_json
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.run import audit_rows
from rewardlab.curation.files.config import ConvertConfig
from rewardlab.curation.files.converting import Converted, convert
from rewardlab.curation.files.forms import as_own_row
from rewardlab.curation.files.joining import Joiner
from rewardlab.data.rows import MAX_CHARACTERS
from written import configured, preferences_in, rows_in, told_by

ROWS: list[dict[str, Any]] = [
    {"prompt": "Why?", "chosen": "a", "rejected": "b"},
    {"prompt": "How?", "chosen": "a", "rejected": "b", "strength": 2.0},
    {"prompt": "Why?", "chosen": "b", "rejected": "a"},
    {"prompt": "Why?", "chosen": "c", "rejected": "b", "label": 0.7},
    {"prompt": "Why?", "chosen": "a", "rejected": "b"},
    {"prompt": "why?", "chosen": "a", "rejected": "b"},
]


AGAIN = {"judged_again": 1, "agreeing": 0, "merged": 0, "rankings": 0, "full": 0}
"""Of ROWS, the counts that do not depend on what is joined."""


def joined(tmp_path: Path, rows: Sequence[dict[str, Any]], by: str, **settings: Any) -> Converted:
    """The rows, joined into a file beside them."""
    path = write(tmp_path / "in.jsonl", rows)
    return convert(configured(ConvertConfig, path, output=tmp_path / "out.jsonl", join=by, **settings))


def judged(preferences: Sequence[Preference]) -> Counter[object]:
    """Every judgement by its texts, whichever reply comes first."""
    found: Counter[object] = Counter()
    for one in preferences:
        for own in one.comparisons:
            first, second, label = one.replies[own.first], one.replies[own.second], own.label
            better, worse, label = (first, second, label) if label >= 0.5 else (second, first, 1 - label)
            found[one.prompt, better, worse, round(label, 9), own.strength, own.weight] += 1
    return found


@pytest.mark.parametrize(("by", "sizes"), [("pairs", [3, 1, 1, 1]), ("prompts", [4, 1, 1])])
def test_rows_become_fewer_and_every_judgement_stays(tmp_path, by, sizes):
    done = joined(tmp_path, ROWS, by)
    before, after = preferences_in(tmp_path / "in.jsonl"), preferences_in(done.output)
    assert judged(after) == judged(before)
    assert [len(one.comparisons) for one in after] == sizes, "at the place of the first row"
    assert (done.joined.rows, done.joined.joined_rows, done.rows, done.preferences) == (6, len(sizes), len(sizes), 6)
    assert done.joined.largest == max(len(one.replies) for one in after)
    told = told_by(done.output)
    assert told["joined"] == {"rows": 6, "joined_rows": len(sizes), "largest": done.joined.largest} | AGAIN
    assert told["used"] == 6
    assert [row["id"] for row in rows_in(done.output)][:2] == ["in.jsonl:1", "in.jsonl:2"]


def test_judgements_of_the_same_replies_are_numbered_and_others_keep_their_annotator():
    def judged_by(first: str, second: str, annotator: str | None) -> Preference:
        replies = tuple((Message("assistant", text),) for text in (first, second))
        judgement = Comparison(first=0, second=1, annotator=annotator)
        prompt = (Message("user", "Why?"),)
        return Preference(id="f:1", source="f", prompt=prompt, replies=replies, comparisons=(judgement,))

    joiner = Joiner("prompts")
    for texts, annotator in (("ab", None), ("cb", None), ("ba", "2"), ("ab", None), ("ab", None)):
        joiner.add((judged_by(*texts, annotator), "f:1", "f"))
    ((one, row_id, source),) = joiner.joined()
    assert (row_id, source) == ("f:1", "f")
    told = [(own.first, own.second, own.annotator) for own in one.comparisons]
    assert told == [(0, 1, "1"), (2, 1, None), (1, 0, "2"), (0, 1, "3"), (0, 1, "4")]


def test_a_joined_row_has_no_more_replies_than_reading_keeps(tmp_path):
    rows = [{"prompt": "Why?", "chosen": f"good {k}", "rejected": f"bad {k}"} for k in range(200)]
    done = joined(tmp_path, [*rows, *(pair(k) for k in range(100))], "prompts")
    before, after = preferences_in(tmp_path / "in.jsonl"), preferences_in(done.output)
    assert judged(after) == judged(before)
    assert [len(one.replies) for one in after[:2]] == [256, 144]
    assert done.joined.full == told_by(done.output)["joined"]["full"] == 1


@pytest.mark.parametrize(("by", "names", "sizes"), [("prompts", 5, [2, 2, 1]), ("pairs", 1, [2, 2, 1])])
def test_a_joined_row_has_no_more_characters_than_reading_keeps(by, names, sizes):
    long = "a" * 1_800_000
    joiner = Joiner(by)
    for k in range(5):
        texts = (f"good {k % names}{long if names > 1 else ''}", f"bad {k % names}{long if names > 1 else ''}")
        replies = tuple((Message("assistant", text),) for text in texts)
        judgement = Comparison(first=0, second=1, annotator=f"{k}{'' if names > 1 else 2 * long}")
        prompt = (Message("user", "Why?"),)
        one = Preference(id=f"f:{k}", source="f", prompt=prompt, replies=replies, comparisons=(judgement,))
        joiner.add((one, one.id, "f"))
    rows = list(joiner.joined())
    assert [len(one.comparisons) for one, _, _ in rows] == sizes
    assert all(len(to_json(as_own_row(*row), indent=None)) <= MAX_CHARACTERS for row in rows)
    assert joiner.counts.full == len(sizes) - 1


def test_joined_rows_of_annotators_contradict_nothing(tmp_path):
    done = joined(tmp_path, ROWS, "pairs")
    flagged = []
    for path in (tmp_path / "in.jsonl", done.output):
        findings = audit_rows(configured(AuditConfig, path)).audit.findings
        flagged += [one.flagged for one in findings if one.check.name == "contradictions"]
    assert flagged == [4, 0], "case and white space aside, the last row is of the first prompt"


def test_equal_replies_of_a_row_become_one_and_are_judged_once(tmp_path):
    rows = [
        {"prompt": "Why?", "responses": ["a", "b", "b"], "scores": [3, 1, 1]},
        {"prompt": "Why?", "responses": ["a", "c"], "scores": [2, 1]},
    ]
    done = joined(tmp_path, rows, "prompts")
    assert done.joined.merged == 1
    (one,) = preferences_in(done.output)
    assert [reply[-1].content for reply in one.replies] == ["a", "b", "c"]
    assert [(own.first, own.second) for own in one.comparisons] == [(0, 1), (0, 2)]


def test_equal_judgements_of_several_people_in_a_row_stay(tmp_path):
    voted = {"prompt": "Why?", "chosen": "a", "rejected": "b", "labels": [1, 1, 0], "annotators": ["1", "1", "bob"]}
    done = joined(tmp_path, [voted, {**voted, "labels": [1], "annotators": ["eve"]}], "pairs")
    (one,) = preferences_in(done.output)
    assert [(own.first, own.annotator) for own in one.comparisons] == [(0, "1"), (0, "1"), (1, "bob"), (0, "eve")]
    assert done.joined.merged == 0


def test_the_annotator_of_a_pair_is_kept(tmp_path, capsys):
    from rewardlab.cli import main

    rows = [{"prompt": "Why?", "chosen": "a", "rejected": "b", "annotator": who} for who in ("ann", 7, None)]
    out = tmp_path / "out.jsonl"
    main(["data", "convert", str(write(tmp_path / "in.jsonl", rows)), "--output", str(out), "--join", "pairs"])
    (one,) = preferences_in(out)
    assert [own.annotator for own in one.comparisons] == ["ann", "7", "1"]
    said = capsys.readouterr().out
    assert "1 pair of replies has several judgements, which agree in 1: of several people, or copies?" in said
    assert "each row is one preference of --batch-size now" in said


def test_rankings_stay_as_they_are(tmp_path, capsys):
    from rewardlab.cli import main

    rows = [{"prompt": "Why?", "responses": [*"abc"], "ranking": [0, 1, 2]}] * 2
    done = joined(tmp_path, [*rows, {"prompt": "Why?", "responses": [*"ab"], "ranking": [0, 1]}], "prompts")
    assert done.joined.rankings == 2
    before, after = preferences_in(tmp_path / "in.jsonl"), preferences_in(done.output)
    assert [one.ranking for one in after] == [one.ranking for one in before] == [(0, 1, 2), (0, 1, 2), (0, 1)]
    out = tmp_path / "again.jsonl"
    main(["data", "convert", str(tmp_path / "in.jsonl"), "--output", str(out), "--join", "prompts"])
    said = capsys.readouterr().out
    assert "3 rows became 3 by --join prompts; the largest has 3 replies" in said
    assert "with a ranking of their own, and so left as they are: 2" in said


def test_sources_and_datasets_stay_apart(tmp_path):
    first, second = (write(tmp_path / f"{name}.jsonl", ROWS[:1]) for name in "ab")
    done = convert(configured(ConvertConfig, first, second, output=tmp_path / "out.jsonl", join="prompts"))
    assert [row["source"] for row in rows_in(done.output)] == ["a", "b"]
    again = convert(configured(ConvertConfig, done.output, output=tmp_path / "again.jsonl", join="prompts"))
    assert again.rows == 2


def test_workers_and_a_limit_change_nothing_else(tmp_path):
    rows = [{**pair(k % 7), "chosen": f"good {k}"} for k in range(300)]
    written = {}
    for workers in (1, 2):
        done = joined(tmp_path, rows, "prompts", num_workers=workers, overwrite=True)
        written[workers] = done.output.read_bytes()
    assert written[1] == written[2]
    assert done.rows == 7
    few = joined(tmp_path, rows, "prompts", limit=40, overwrite=True)
    assert few.joined.rows == few.preferences == 40
    assert judged(preferences_in(few.output)) == judged(preferences_in(tmp_path / "in.jsonl", limit=40))


def test_pairs_of_trl_hold_one_judgement(tmp_path):
    with pytest.raises(ConfigError, match="--join pairs needs --to rewardlab"):
        joined(tmp_path, ROWS, "pairs", to="trl")


def test_joined_rows_are_judged_as_they_were_apart(base_model, tmp_path):
    rows = [{**pair(k % 12), "chosen": f"good {k % 5}", "rejected": f"bad {k % 7}"} for k in range(60)]
    done = joined(tmp_path, rows, "prompts")
    model = train(
        runs.config_for(base_model, tmp_path / "in.jsonl", tmp_path / "run", steps=1, eval_fraction=0.0)
    ).model
    apart, together = (
        evaluate_folder(EvalConfig.of(model=str(model), dataset=str(path), output_dir=f"{path}.judged"))[0].overall
        for path in (tmp_path / "in.jsonl", done.output)
    )
    assert apart.sums.comparisons == together.sums.comparisons == 60
    for name, estimate in apart.estimates.items():
        for part in ("value", "low", "high"):
            assert getattr(together.estimates[name], part) == pytest.approx(getattr(estimate, part), abs=1e-5), name


SAME = "the same long beginning of two replies, which a row of its own computes once for both of them, "


@pytest.mark.parametrize("by", ["pairs", "prompts"])
def test_a_step_learns_the_same_from_joined_rows(base_model, tmp_path, by):
    rows = [
        {"prompt": f"How do I keep number {k % 4}?", "chosen": f"Certainly, {k % 3} it.", "rejected": f"no! {k % 2}"}
        for k in range(24)
    ]
    done = joined(tmp_path, rows, by)
    config_for = partial(runs.config_for, steps=2, log_every=1, batch_size=64, kwise_weight="comparison")
    records = []
    for number, path in enumerate((tmp_path / "in.jsonl", done.output)):
        folder = tmp_path / f"run-{number}"
        train(config_for(base_model, path, folder, eval_fraction=0.0, micro_token_budget=4096))
        records.append([{name: float(row[name] or 0) for name in row} for row in runs.rows_of(folder)][-2:])
    for apart, together in zip(*records, strict=True):
        for name in ("train_loss", "train_nll", "train_accuracy", "train_pairs", "grad_norm"):
            assert together[name] == pytest.approx(apart[name], rel=1e-4), name
        # Rows of a prompt that one step has are computed together in any case.
        assert together["tokens"] == apart["tokens"]
