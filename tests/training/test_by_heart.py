"""Whether a set-up can learn: a dry run trains on a few preferences alone."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest

import runs
from rewardlab import rehearse
from rewardlab.training import by_heart as module
from rewardlab.training.by_heart import FEW, MOST, ByHeart
from rewardlab.training.rehearsed import dry_run_report
from rewardlab.training.run import TrainResult

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, epochs=2.0, eval_every=4)


def _tried(base_model: Path, rows: Path, folder: Path, **changes):
    tried = rehearse(config_for(base_model, rows, folder / "run", **changes))
    return tried.by_heart, " ".join(dry_run_report(tried).split())


def _rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("changes", [{}, {"lora": True}, {"train_head_only": True, "cache_states": True, "lr": 0.1}])
def test_a_set_up_that_learns_is_seen_to(changes, base_model, pairs_file, tmp_path):
    # Fewer steps before it, in which they are not learned yet.
    slow = {"lr": 1e-3, "steps": 2, "eval_fraction": 0.0}
    found, said = _tried(base_model, pairs_file, tmp_path, **slow | changes)
    assert found.preferences == FEW
    assert 0 < found.updates < MOST
    assert found.known
    assert found.nll_after < found.nll_before
    assert found.nll_least == pytest.approx(0, abs=1e-4)
    assert "learning 8 preferences alone at the full rate: NLL 0." in said
    assert "; so it can learn" in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("lr", "advice"),
    [
        (1e-12, "That is hardly less: raise --lr, which is 1e-12"),
        (10.0, "to inf in 4 updates. It begins far above that of chance, 0.69: lower --lr, which is 10"),
    ],
)
def test_a_rate_that_does_not_fit_is_named(lr, advice, base_model, pairs_file, tmp_path):
    found, said = _tried(base_model, pairs_file, tmp_path, lr=lr, steps=2, eval_fraction=0.0)
    assert not found.known
    assert found.updates == (MOST if lr < 1 else 4)
    assert advice in said
    assert "it can learn" not in said


def test_it_takes_the_shortest_that_say_something_and_leaves_the_run_alone(base_model, tmp_path, monkeypatch):
    rows = [{"prompt": f"What is {n}?", "chosen": "yes " * (n + 2), "rejected": "no " * (n + 2)} for n in range(20)]
    rows += [{"prompt": f"Tie {n}", "chosen": "a", "rejected": "b", "label": 0.5} for n in range(10)]
    rows += [
        {"prompt": "What is 0?", "chosen": "no", "rejected": "yes"},
        {"prompt": "Same", "chosen": "a", "rejected": "a"},
    ]
    taken: list[list] = []
    results: list[tuple] = []
    steps = module.RewardSteps
    monkeypatch.setattr(module, "RewardSteps", lambda *own: taken.append(own[2]) or steps(*own))
    monkeypatch.setattr(
        "rewardlab.training.rehearsal._Shortened.rehearsal",
        lambda own, result: results.append((own._by_heart, result)),
    )
    config = config_for(base_model, _rows(tmp_path / "rows.jsonl", rows), tmp_path / "run", eval_fraction=0.0)
    assert rehearse(config.replace(batch_size=32, max_drop_fraction=1.0)) is None
    (few,), ((found, result),) = taken, results
    assert len({group.prompt_key for group in few}) == len(few) == found.preferences == FEW
    lengths = [group.num_tokens for group in few]
    assert lengths == sorted(lengths)
    assert all(comparison.label == 1.0 for group in few for comparison in group.comparisons)
    assert isinstance(result, TrainResult)
    assert result.last.name == f"step_{result.last_step}", "its own steps do not count"


def test_soft_labels_have_a_least_nll(base_model, tmp_path):
    rows = [{"prompt": f"What is {n}?", "chosen": "yes", "rejected": f"no {n}", "label": 0.8} for n in range(20)]
    found, said = _tried(base_model, _rows(tmp_path / "rows.jsonl", rows), tmp_path, lr=1e-3, steps=2)
    assert found.nll_least == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2))
    assert ", of at least 0.50 in " in said


@pytest.mark.parametrize(
    ("row", "changes", "least"),
    [
        # What annotators disagree about cannot be learned: the least NLL is that of their shares.
        ({"labels": [1, 1, 0]}, {}, 0.6365),
        # Without its margin, which would pull a soft label away from the least NLL.
        ({"label": 0.7, "margin": 2.0}, {"margin_column": "margin"}, 0.6109),
    ],
)
def test_what_cannot_be_learned_is_not_the_fault_of_the_rate(row, changes, least, base_model, tmp_path):
    rows = [{"prompt": f"What is {n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} | row for n in range(20)]
    found, said = _tried(base_model, _rows(tmp_path / "rows.jsonl", rows), tmp_path, lr=1e-3, steps=2, **changes)
    assert found.nll_least == pytest.approx(least, abs=1e-4)
    assert found.known
    assert "; so it can learn" in said


def test_a_ranking_with_a_tie_says_something(base_model, tmp_path):
    rows = [{"prompt": f"What is {n}?", "responses": ["yes", "no", f"n {n}"], "scores": [3, 2, 2]} for n in range(20)]
    path = _rows(tmp_path / "rows.jsonl", rows)
    found, _ = _tried(base_model, path, tmp_path, lr=1e-3, steps=2, ties="half")
    assert (found.preferences, found.known) == (FEW, True)
    assert found.nll_least == pytest.approx(math.log(2) / 3, abs=1e-4)


def test_where_nothing_is_decided_there_is_nothing_to_learn(base_model, tmp_path):
    rows = [{"prompt": f"What is {n}?", "chosen": "yes", "rejected": "no", "label": 0.5} for n in range(20)]
    found, said = _tried(base_model, _rows(tmp_path / "rows.jsonl", rows), tmp_path)
    assert found is None
    assert "learning not tried: none of the preferences seen says which of two different replies is better" in said


@pytest.mark.parametrize(
    ("before", "after", "updates", "said"),
    [
        (0.7, 0.5, 30, "NLL 0.70 to 0.50 in 30 updates"),
        (
            0.7,
            0.69,
            1,
            "NLL 0.70 to 0.69 in 1 update. That is hardly less: raise --lr, which is 0.003, or look at what trains",
        ),
        (0.7, 0.3, 30, "NLL 0.70 to 0.30 in 30 updates; so it can learn"),
        (0.04, 0.04, 0, "NLL 0.04, which the model knows already"),
        (
            3.4,
            0.1,
            9,
            "NLL 3.40 to 0.10 in 9 updates. It begins far above that of chance, 0.69: lower --lr, which is 0.003",
        ),
        (0.9, 1.0, 30, "NLL 0.90 to 1.00 in 30 updates. It does not settle: lower --lr, which is 0.003"),
        (0.2, 0.4, 30, "NLL 0.20 to 0.40 in 30 updates. It does not settle: lower --lr, which is 0.003"),
    ],
)
def test_what_is_said_of_it(before, after, updates, said):
    found = ByHeart(preferences=8, updates=updates, nll_before=before, nll_after=after, nll_least=0.0)
    assert found.line(0.003) == f"8 preferences alone at the full rate: {said}"
