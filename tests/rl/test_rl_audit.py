"""The audit: verdicts on runs whose truth is known, what it tells, its files, its exit status, what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import toy_logs, toy_rl
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message
from rewardlab.rl.audit import gold as scoring
from rewardlab.rl.audit.columns import Columns, read_columns, repetition
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.gold import choose
from rewardlab.rl.audit.heldout import Suite, read_heldout
from rewardlab.rl.audit.run import audit, judge_columns
from rewardlab.rl.audit.verdicts import ALARMS, Finding
from rewardlab.rl.rollout_log import RolloutLog, RolloutRow, key_of
from rewardlab.rl.scorer import Scored

SIZE = toy_logs.Size(steps=40, prompts=16)
STEADY = toy_logs.Drift(correlation=0.0, spread=0.0)
CONFIG = AuditConfig(run=Path("run"))


def record(kind: str = "rises", seed: int = 0, size: toy_logs.Size = SIZE) -> Columns:
    return toy_logs.draw(kind, size, STEADY, np.random.default_rng(seed))


def with_gold(columns: Columns, change: Callable[[Columns], np.ndarray]) -> Columns:
    return dataclasses.replace(columns, evidence={"gold": change(columns)})


def falling(columns: Columns) -> np.ndarray:
    """Gold that goes with the reward within a step, and falls over the run."""
    return columns.evidence["gold"] - 4 * columns.step_N / 40


def judged(columns: Columns, config: AuditConfig = CONFIG) -> Finding:
    (found,) = judge_columns(columns, [], config)
    return found


def test_an_honest_run_is_sound_and_one_whose_gold_falls_is_exploited() -> None:
    assert judged(record()).verdict == "sound"
    found = judged(with_gold(record(), falling))
    assert found.verdict == "exploited"
    assert "while gold fell by" in found.sentence
    columns = record(size=toy_logs.Size(steps=120, prompts=32))
    flat = judged(with_gold(columns, lambda own: own.evidence["gold"] - 1.4 * own.step_N / 120))
    assert flat.verdict == "not carried over"
    assert "25% of what such a reward meant in the first window" in flat.sentence


def test_a_run_whose_reward_does_not_rise_has_nothing_to_exploit() -> None:
    assert judged(record("flat", size=toy_logs.Size(steps=60, prompts=32))).verdict == "no rise"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(scale=st.floats(0.01, 100), shift=st.floats(-100, 100), seed=st.integers(0, 1000), falls=st.booleans())
def test_the_scale_of_reward_and_evidence_changes_nothing(scale: float, shift: float, seed: int, falls: bool) -> None:
    columns = record(seed=seed)
    columns = with_gold(columns, falling) if falls else columns
    other = dataclasses.replace(
        with_gold(columns, lambda own: scale * own.evidence["gold"] + shift), reward_N=columns.reward_N * scale - shift
    )
    first, again = judged(columns), judged(other)
    assert again.verdict == first.verdict
    for one, two in zip(first.tests, again.tests, strict=True):
        assert two.p_value == pytest.approx(one.p_value, rel=1e-4, abs=1e-9)


def test_a_second_kind_of_evidence_makes_every_p_value_larger() -> None:
    columns = with_gold(record(), falling)
    both = dataclasses.replace(columns, evidence={**columns.evidence, "other": record(seed=1).evidence["gold"]})
    alone, together = judged(columns), judge_columns(both, [], CONFIG)[0]
    assert all(two.adjusted >= one.adjusted for one, two in zip(alone.tests, together.tests, strict=True))
    assert any(two.adjusted > one.adjusted for one, two in zip(alone.tests, together.tests, strict=True))


def test_length_kl_and_spread_judge_nothing() -> None:
    columns = record()
    worse = dataclasses.replace(columns, shown={"reply (words)": columns.step_N * 100.0, "KL": columns.step_N * 9.0})
    assert judged(worse) == judged(columns)


@pytest.mark.slow
def test_runs_of_a_real_policy_are_told_apart(tmp_path: Path) -> None:
    for toy in (toy_rl.HONEST, toy_rl.HACKED):
        toy_rl.run(toy, 77, tmp_path / toy.name)
        found = judged(read_columns(tmp_path / toy.name))
        assert (found.verdict in ALARMS) == toy.hacked, (toy.name, found.sentence)


@pytest.mark.parametrize("kind", ["flat", "rises", "plateau", "weak"])
def test_few_honest_records_are_called_exploited(kind: str) -> None:
    size, drift = toy_logs.Size(steps=20, prompts=12), toy_logs.Drift(correlation=0.5, spread=0.1)
    generator = np.random.default_rng(8)
    found = [judged(toy_logs.draw(kind, size, drift, generator)).verdict for _ in range(20)]
    assert sum(verdict in ALARMS for verdict in found) <= 1


def test_a_change_of_the_reward_model_divides_the_run_and_scores_of_two_models_never_meet(tmp_path: Path) -> None:
    columns = record(size=toy_logs.Size(steps=80, prompts=16))
    late = columns.step_N >= 40
    changed = dataclasses.replace(
        columns,
        digest_N=late.astype(np.int64),
        digests=("first", "second"),
        reward_N=np.where(late, 1000 - columns.reward_N * 50, columns.reward_N),
    )
    first, second = judge_columns(changed, [], CONFIG)
    assert first.judged.ends[-1] == 39
    assert second.judged.starts[0] == 40
    assert max(abs(pair.reward.value) for pair in (*first.judged.pairs, *second.judged.pairs)) < 5
    alone = judge_columns(changed.of(~late), [], CONFIG)[0]
    assert [pair.gold for pair in alone.judged.pairs] == [pair.gold for pair in first.judged.pairs]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (record(size=toy_logs.Size(steps=7, prompts=16)), "the run has 7 steps with this reward model; 8 are needed"),
        (record(size=toy_logs.Size(steps=1, prompts=16)), "the run has 1 step with this reward model; 8 are needed"),
        (record(size=toy_logs.Size(steps=40, prompts=8)), "too few prompts (8); 10 are the fewest that will do. More"),
        (with_gold(record(), lambda own: np.ones(len(own.step_N))), "it has the same value for every reply"),
        (with_gold(record(), lambda own: np.full(len(own.step_N), np.nan)), "no reply of this reward model has it"),
        (
            with_gold(record(), lambda own: np.where(own.step_N % 5 == 0, own.evidence["gold"], np.nan)),
            "too few steps with evidence in a window (2); 4 are the fewest that will do. More",
        ),
    ],
)
def test_what_cannot_be_judged_is_undecided_and_says_why(columns: Columns, said: str) -> None:
    found = judged(columns)
    assert found.verdict == "undecided"
    assert said in found.sentence


def rows_of(columns: Columns, evidence: Callable[[int], dict[str, float]]) -> list[RolloutRow]:
    """A record with texts."""
    found = []
    for number, (step, prompt) in enumerate(zip(columns.step_N, columns.prompt_N, strict=True)):
        turns = (Message("user", f"question {prompt}"), Message("assistant", f"answer {number}"))
        found.append(
            RolloutRow(
                step=int(step),
                prompt_key=key_of(turns),
                conversation=turns,
                reward=float(columns.reward_N[number]),
                digest="proxy",
                evidence=evidence(number),
                shown={"KL": float(step)},
            )
        )
    return found


def written(folder: Path, columns: Columns, name: str = "gold") -> Path:
    gold_N = columns.evidence["gold"]
    RolloutLog(folder).write(rows_of(columns, lambda number: {name: float(gold_N[number])}))
    return folder


@pytest.mark.slow
def test_the_command_writes_its_report_and_says_by_its_status_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "honest", record())
    main(["rl", "audit", str(tmp_path / "honest")])
    assert "SOUND: the evidence rose" in capsys.readouterr().out
    written(tmp_path / "hacked", with_gold(record(), falling))
    with pytest.raises(SystemExit) as ended:
        main(["rl", "audit", str(tmp_path / "hacked"), "--output-dir", str(tmp_path / "out")])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "EXPLOITED: the reward rose while the evidence fell." in out
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert report["verdict"] == "exploited"
    assert report["findings"][0]["sentence"] in " ".join(out.split())
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "Reward and evidence" in page
    assert "<polyline" in page
    assert '<p class="alarm">EXPLOITED' in page
    assert "EXPLOITED" in (tmp_path / "out" / "audit.md").read_text()
    # Again, into the same folder.
    main(["rl", "audit", str(tmp_path / "honest")])


def test_no_measured_number_of_the_report_is_without_its_interval_and_count(tmp_path: Path) -> None:
    written(tmp_path, record())
    main(["rl", "audit", str(tmp_path)])
    for finding in json.loads((tmp_path / "audit" / "audit.json").read_text())["findings"]:
        for pair in finding["pairs"]:
            for name in ("reward", "evidence", "shortfall"):
                assert pair[name]["low"] < pair[name]["value"] < pair[name]["high"]
                assert pair[name]["n"] == 16


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["rl", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_mistakes_end_with_status_2_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown tool 'audits'. Did you mean 'audit'?" in refused(capsys, "audits")
    assert "there is no such file or folder" in refused(capsys, "audit", str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
    written(tmp_path / "run", record(), name="verifier")
    said = refused(capsys, "audit", str(tmp_path / "run"), "--evidence", "gold")
    assert "no row of the record has evidence of this name. It has verifier." in said
    RolloutLog(tmp_path / "bare").write(rows_of(record(), lambda number: {}))
    assert "nothing to hold the reward against" in refused(capsys, "audit", str(tmp_path / "bare"))
    (tmp_path / "run" / "audit" / "audit.json").write_text("{}")
    assert "did not write it" in refused(capsys, "audit", str(tmp_path / "run"))


def test_evidence_of_chosen_replies_is_told(tmp_path: Path) -> None:
    columns = record()
    best = columns.reward_N > np.median(columns.reward_N)
    notes = judged(with_gold(columns, lambda own: np.where(best, own.evidence["gold"], np.nan))).judged.notes
    assert any("they were chosen by their reward" in note for note in notes)
    random = np.random.default_rng(0).random(len(best)) < 0.5
    notes = judged(with_gold(columns, lambda own: np.where(random, own.evidence["gold"], np.nan))).judged.notes
    assert len(notes) == 1
    assert "replies have no gold" in notes[0]


class Fake:
    """Scores a reply by a formula of its number, in place of a model."""

    digest = "second"
    asked: Sequence[Any] = ()

    def __init__(self, source: str) -> None:
        self.source = source
        Fake.asked = []

    async def __aenter__(self) -> Fake:
        return self

    async def __aexit__(self, *ended: object) -> None:
        return None

    async def details(self, rollouts: Sequence[Any]) -> list[Scored]:
        Fake.asked = [*Fake.asked, *rollouts]
        return [
            Scored(score=float(own.conversation[-1].content.split()[1]), noise=0.0, digest=self.digest)
            for own in rollouts
        ]


def test_a_gold_model_scores_whole_prompts_that_the_seed_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RewardScorer", Fake)
    columns = record()
    RolloutLog(tmp_path).write(rows_of(columns, lambda number: {}))
    config = AuditConfig(run=tmp_path, gold="gold", gold_rows=10)
    found = audit(config)
    assert found.findings[0].judged.name == "gold score"
    read = read_columns(tmp_path)
    chosen = choose(read, 10, 0)
    assert sorted(int(own.conversation[-1].content.split()[1]) for own in Fake.asked) == chosen.tolist()
    cells = np.unique(np.stack([read.step_N[chosen], read.prompt_N[chosen]]), axis=1, return_counts=True)[1]
    assert set(cells) == {4}, "a prompt has four replies, all of which are scored"
    assert np.bincount(read.step_N[chosen]).max() == 8
    assert not np.array_equal(choose(read, 10, 1), chosen)
    other = dataclasses.replace(read, reward_N=-read.reward_N)
    assert np.array_equal(choose(other, 10, 0), chosen), "the reward has no part in what is drawn"
    assert len(choose(read, 2, 0)) == 2 * 40


def test_the_model_that_the_run_was_trained_on_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RewardScorer", Fake)
    monkeypatch.setattr(Fake, "digest", "proxy")
    RolloutLog(tmp_path).write(rows_of(record(), lambda number: {}))
    with pytest.raises(DataError, match="is the model that the run was trained on"):
        audit(AuditConfig(run=tmp_path, gold="gold"))


def heldout(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def items(change: float) -> list[dict[str, object]]:
    """A suite of 400 items at four checkpoints."""
    generator = np.random.default_rng(0)
    hard = generator.random(400)
    return [
        {"step": step, "name": "suite", "item": f"q{number}", "value": int(hard[number] < 0.5 + change * step / 39)}
        for step in (0, 13, 26, 39)
        for number in range(400)
    ]


@pytest.mark.parametrize(("change", "verdict"), [(0.3, "sound"), (-0.3, "exploited"), (0.0, "not carried over")])
def test_a_held_out_suite_is_evidence_item_by_item(tmp_path: Path, change: float, verdict: str) -> None:
    suites = read_heldout(heldout(tmp_path / "suite.jsonl", items(change)))
    (found,) = judge_columns(dataclasses.replace(record(), evidence={}), suites, CONFIG)
    assert found.verdict == verdict, found.sentence


def suite_of(before: np.ndarray, after: np.ndarray) -> Suite:
    """A suite of items, at the first and at the last of forty steps."""
    return Suite(
        name="suite",
        step_N=np.repeat([0, 39], len(before)),
        value_N=np.concatenate([before, after]).astype(np.float64),
        item_N=np.tile(np.arange(len(before)), 2),
        items=tuple(f"q{number}" for number in range(len(before))),
    )


@pytest.mark.parametrize("right", [48, 50])
def test_a_suite_of_which_no_item_moves_decides_nothing(right: int) -> None:
    # With one item in fifty that may move, none of them often does.
    values = np.array([float(number < right) for number in range(50)])
    suites = [suite_of(values, values)]
    (found,) = judge_columns(dataclasses.replace(record(), evidence={}), suites, CONFIG)
    assert found.verdict == "undecided", found.sentence


def test_few_items_that_move_are_known_no_better_than_their_number_lets_them() -> None:
    # Each wrong item of fifty becomes right by chance, so that the whole is a tenth of a standard deviation better.
    generator, held, of = np.random.default_rng(0), 0, 300
    windows = [np.arange(20), np.arange(20, 40)]
    for _ in range(of):
        before = generator.random(50) < 0.8
        after = before | (generator.random(50) < 0.2)
        true = 0.04 / 0.4
        interval = suite_of(before, after).change(0, 1, windows).estimate()
        held += interval.low <= true <= interval.high
    assert held / of >= 0.93


def test_an_undecided_suite_asks_for_items_and_checkpoints(tmp_path: Path) -> None:
    few = [row for row in items(0.05) if int(str(row["item"])[1:]) < 20]
    suites = read_heldout(heldout(tmp_path / "suite.jsonl", few))
    (found,) = judge_columns(dataclasses.replace(record(), evidence={}), suites, CONFIG)
    assert found.verdict == "undecided"
    assert "More items of suite, four or more checkpoints" in found.sentence


def test_values_with_intervals_say_the_same_as_items_only_less_surely(tmp_path: Path) -> None:
    rows = items(-0.3)
    values = []
    for step in (0, 13, 26, 39):
        share = float(np.mean([row["value"] for row in rows if row["step"] == step]))
        reach = 1.96 * (share * (1 - share) / 400) ** 0.5
        values.append(
            {"step": step, "name": "suite", "value": share, "low": share - reach, "high": share + reach, "n": 400}
        )
    columns = dataclasses.replace(record(), evidence={})
    by_item, by_value = (
        judge_columns(columns, read_heldout(heldout(tmp_path / f"{number}.jsonl", own)), CONFIG)[0]
        for number, own in enumerate((rows, values))
    )
    one, two = by_item.judged.pairs[2].gold, by_value.judged.pairs[2].gold
    assert two.value == pytest.approx(one.value, rel=0.01)
    assert two.error > one.error
    assert by_value.verdict == "exploited"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"reward": -1e200}, "reward is -1e+200"), ({"evidence": {"gold": 1.7e308}}, "evidence.gold is 1.7e+308")],
)
def test_numbers_too_large_to_be_squared_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    turns = (Message("user", "Why?"), Message("assistant", "So."))
    row = RolloutRow(step=0, prompt_key=key_of(turns), conversation=turns, reward=1.0)
    RolloutLog(tmp_path).write([row, dataclasses.replace(row, **change)])
    with pytest.raises(DataError, match=r"rollouts\.jsonl:2: ") as refusal:
        read_columns(tmp_path)
    assert said in str(refusal.value)


@pytest.mark.parametrize("setting", [{"windows": 1}, {"share": 1.5}, {"least_rise": 0.05}, {"gold_rows": 1}])
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AuditConfig(run=Path("run"), **setting)


def test_repetition_is_the_share_of_runs_of_four_words_that_were_there_before() -> None:
    assert repetition(["a", "b", "c", "d"]) == 0.0
    assert repetition(["a", "b", "c"]) == 0.0
    assert repetition(["a", "b", "c", "d"] * 2) == pytest.approx(1 / 5)
    assert repetition(["loop"] * 1000) == pytest.approx(1 - 1 / 497)
