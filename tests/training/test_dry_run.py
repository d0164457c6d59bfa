"""`train --dry-run`: a run in small, of which nothing is kept, and what the whole run would take."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import runs
from resuming import stop_after
from rewardlab import Rehearsal, rehearse, train
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError, DiskFullError, RewardlabError, RunInterrupted
from rewardlab.core.files import read_json
from rewardlab.data.pack import costs
from rewardlab.data.step_order import batch_of_step
from rewardlab.training import closing
from rewardlab.training import rehearsal as module
from rewardlab.training.checkpoints import cadence
from rewardlab.training.loop.reward_trainer import RewardSteps
from rewardlab.training.rehearsed import dry_run_report

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, epochs=2.0, eval_every=4)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes; folders end with a slash."""
    return {
        f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}": b"" if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def test_a_dry_run_forecasts_the_run_and_keeps_nothing(base_model, pairs_file, tmp_path, caplog):
    caplog.set_level("INFO", logger="rewardlab")
    place = tmp_path / "not" / "yet"
    config = config_for(base_model, pairs_file, place / "run", test_dataset=(str(pairs_file),), test_split="train")
    before = tree(tmp_path)
    tried = rehearse(config.replace(dry_run=True))
    assert tree(tmp_path) == before, "neither the run's folder nor one above it"
    said = caplog.text
    result = train(config)
    folder = place / "run"
    rows = runs.rows_of(folder)
    assert tried.num_steps == result.last_step
    assert tried.steps_taken == 5
    assert tried.steps_timed == 4
    assert read_json(folder / "manifest.json")["config_hash"] in said, "the settings are those of the run"
    assert runs.settings_of(tried.config) == read_json(folder / "config.json")
    assert tried.evaluations == sum(row["eval_pairs"] != "" for row in rows)
    saved = sum(path.stat().st_size for path in result.last.rglob("*") if path.is_file())
    assert tried.model_bytes == pytest.approx(saved, rel=0.01)
    held = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    assert tried.checkpoint_bytes == pytest.approx(held, rel=0.05)
    models_and_checkpoints = 2 * tried.model_bytes + 2 * tried.checkpoint_bytes
    assert tried.disk_bytes == models_and_checkpoints + max(tried.model_bytes, tried.checkpoint_bytes)
    assert tried.preferences["training"] + tried.preferences["evaluation"] == tried.preferences["test"]
    low, high = tried.train_seconds
    assert 0 < low <= high
    assert tried.eval_seconds > 0
    assert 0 < tried.peak_bytes < tried.memory_bytes


def test_the_tokens_of_the_forecast_are_those_that_the_run_computes(base_model, pairs_file, tmp_path, monkeypatch):
    seen, reckon = [], module._tokens_of_training
    monkeypatch.setattr(module, "_tokens_of_training", lambda whole: seen.append(reckon(whole)) or seen[-1])
    config = config_for(base_model, pairs_file, tmp_path / "run")
    rehearse(config)
    train(config)
    assert seen == [sum(float(row["tokens"] or 0) for row in runs.rows_of(tmp_path / "run"))]


def test_the_heaviest_steps_come_first(base_model, pairs_file, tmp_path, monkeypatch):
    whole, taken = [], []
    shorten = module._Shortened.shorten
    plan = RewardSteps.plan
    monkeypatch.setattr(module._Shortened, "shorten", lambda own, ready: whole.append(ready) or shorten(own, ready))

    def planned(steps, step, budget):
        batches = plan(steps, step, budget)
        taken.append(sorted(steps.train[index].preference_id for batch in batches for index in batch.indices))
        return batches

    monkeypatch.setattr(RewardSteps, "plan", planned)
    rehearse(config_for(base_model, pairs_file, tmp_path / "run", batch_size=4))
    (ready,) = whole
    groups, number = ready.data.train, len(ready.data.train)
    steps = [batch_of_step(step, num_groups=number, batch_size=4, seed=0) for step in range(number // 4)]
    tokens = np.array(costs(groups, ready.layout))
    ids = [sorted(groups[index].preference_id for index in batch) for batch in steps]
    most = max(range(len(steps)), key=lambda step: tokens[steps[step]].sum())
    largest = max(range(len(steps)), key=lambda step: tokens[steps[step]].max())
    wanted = list(dict.fromkeys([most, largest, *range(5)]))[:5]
    # What follows are the few preferences that are learned by heart.
    assert taken[:5] == [ids[step] for step in wanted]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": True, "lora_rank": 2, "checkpoints": False},
        {"train_head_only": True, "cache_states": True},
        {"eval_fraction": 0.0, "steps": 1},
        {"micro_token_budget": "auto", "save_every": 2, "save_total_limit": 3},
        {"publish_to": "http://127.0.0.1:9", "publish_every": "eval"},
        {"batch_size": 64, "steps": 9},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_kind_of_run_can_be_tried(changes, base_model, pairs_file, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARDLAB_ADMIN_TOKEN", "some")
    tried = rehearse(config_for(base_model, pairs_file, tmp_path / "run", **changes))
    text = dry_run_report(tried)
    assert f"with {tried.steps_taken} of {tried.num_steps} step" in " ".join(text.split())
    assert (tried.checkpoint_bytes == 0) == (not tried.config.run.checkpoints)
    assert (tried.train_seconds is None) == tried.config.model.cache_states
    assert (tried.eval_seconds is None) == (not tried.preferences["evaluation"])
    assert not (tmp_path / "run").exists()
    assert tried.config.run.save_every == (4 if "publish_to" in changes else changes.get("save_every"))
    if "save_every" in changes:
        assert tried.disk_bytes == 4 * tried.model_bytes + 2 * tried.checkpoint_bytes + max(
            tried.model_bytes, tried.checkpoint_bytes
        )


def test_a_folder_with_a_run_is_refused_as_by_the_run_itself_and_stays(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    train(config)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        rehearse(config)
    assert rehearse(config.replace(overwrite=True)) is not None
    assert tree(tmp_path) == before


def test_folders_of_others_stay(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    mine = tmp_path / "run" / ".dry-run" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    before = tree(tmp_path)
    assert rehearse(config) is not None
    assert tree(tmp_path) == before
    (tmp_path / "run" / f".dry-run-{os.getpid()}").mkdir()
    with pytest.raises(ConfigError, match="a dry run that was killed left it"):
        rehearse(config)
    assert (tmp_path / "run" / f".dry-run-{os.getpid()}").is_dir()


@pytest.mark.parametrize("name", ["file", "file/below", "link"])
def test_a_folder_that_cannot_be_made_is_an_error_of_both(base_model, pairs_file, tmp_path, name):
    (tmp_path / "file").write_text("here")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    config = config_for(base_model, pairs_file, tmp_path / name)
    for attempt in (rehearse, train):
        with pytest.raises(RewardlabError, match="cannot write to"):
            attempt(config)
    assert not list(tmp_path.glob("**/.dry-run*"))


def test_long_names_are_no_trouble(base_model, pairs_file, tmp_path):
    assert rehearse(config_for(base_model, pairs_file, tmp_path / ("n" * 240))) is not None
    assert not list(tmp_path.glob(".dry-run*"))


def test_a_run_that_is_under_way_is_seen(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    train(config)
    monkeypatch.setattr(module, "only_process", lambda folder, flag: pytest.fail(f"asked for {folder.name}"))
    with pytest.raises(pytest.fail.Exception, match="asked for run"):
        rehearse(config.replace(overwrite=True))


def test_the_closing_card_is_tried_where_the_run_has_one(base_model, pairs_file, tmp_path, monkeypatch):
    cards = []
    monkeypatch.setattr(closing, "CARD_WORTH", 60)
    monkeypatch.setattr(closing, "card_of_chosen", lambda *_, **__: cards.append(1))
    for steps, made in ((7, 0), (8, 1)):
        cards.clear()
        rehearse(config_for(base_model, pairs_file, tmp_path / "run", steps=steps))
        assert len(cards) == made


def test_settings_of_the_whole_run_are_checked(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", profile=True, profile_steps=100)
    with pytest.raises(ConfigError, match="--profile-steps 100"):
        rehearse(config)


def test_errors_are_those_of_the_run_and_leave_nothing(base_model, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a"}\n' * 12)
    before = tree(tmp_path)
    with pytest.raises(DataError, match="pairs"):
        rehearse(config_for(base_model, data, tmp_path / "run"))
    assert tree(tmp_path) == before


def test_a_full_disk_is_told_as_one_of_the_run_to_come(base_model, pairs_file, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints/step_5")

    monkeypatch.setattr(cadence, "write_checkpoint", full)
    with pytest.raises(DiskFullError, match="run: No space left on device there .* A dry run keeps nothing") as error:
        rehearse(config_for(base_model, pairs_file, tmp_path / "run"))
    assert "--resume" not in str(error.value)
    assert "--overwrite" not in str(error.value)


def test_what_killed_dry_runs_left_is_named_and_what_goes_on_is_not(
    base_model, pairs_file, tmp_path, holder, caplog, monkeypatch
):
    left, held = tmp_path / ".dry-run-1", tmp_path / ".dry-run-2"
    left.mkdir()
    (left / ".lock").write_text("process 1 on here\n")
    holder(held)
    monkeypatch.setattr(module, "carry_out", lambda *_, **__: pytest.fail("far enough"))
    with pytest.raises(pytest.fail.Exception):
        rehearse(config_for(base_model, pairs_file, tmp_path / "run"))
    assert [line for line in caplog.messages if "a dry run that was killed left it" in line] == [
        f"{left} is there; a dry run that was killed left it. Remove it."
    ]
    assert left.is_dir()


def test_it_is_for_runs_that_begin(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    with pytest.raises(ConfigError, match="--dry-run tries a run that begins"):
        rehearse(config.replace(resume="auto"))
    with pytest.raises(ConfigError, match=r"Call rewardlab\.rehearse"):
        train(config.replace(dry_run=True))


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_leaves_nothing(how, status, base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    before, handler = tree(tmp_path), signal.getsignal(how)
    with monkeypatch.context() as patched:
        stop_after(patched, 3, how=how)
        with pytest.raises(SystemExit) as ended:
            main(["train", *words, "--dry-run"])
    assert ended.value.code == status
    assert "A dry run keeps nothing; the same command begins anew." in capsys.readouterr().err
    assert tree(tmp_path) == before
    # Also where a run has no step to end after.
    monkeypatch.setattr(module, "carry_out", lambda *_, **__: signal.raise_signal(how))
    with pytest.raises(RunInterrupted, match="keeps nothing") as stopped:
        rehearse(config_for(base_model, pairs_file, tmp_path / "run"))
    assert stopped.value.exit_status == status
    assert signal.getsignal(how) is handler


def test_the_command_prints_what_the_run_would_take(base_model, pairs_file, tmp_path, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    main(["train", *words, "--dry-run"])
    _, begins, said = capsys.readouterr().out.partition("Dry run: all from the data to the saved model was ")
    assert begins
    assert said.startswith("gone through, with 5 of 8 steps; nothing is kept.")
    assert [line.split()[0] for line in said.splitlines() if line[:1].islower()][1:] == [
        *("preferences", "training", "learning", "evaluation", "memory", "disk"),
    ]
    assert not (tmp_path / "run").exists()


def test_the_text_of_what_a_run_would_take(tmp_path):
    tried = Rehearsal(
        config=runs.config_for(tmp_path, tmp_path, Path("runs/mine")),
        preferences={"training": 12345, "evaluation": 500, "training rows evaluated": 0, "test": 0},
        num_steps=772,
        steps_taken=5,
        steps_timed=4,
        train_seconds=(3601.0, 7322.0),
        by_heart=None,
        evaluations=11,
        eval_seconds=95.0,
        peak_bytes=3 * 2**30,
        on_cpu=False,
        memory_bytes=8 * 2**30,
        model_bytes=2**30,
        checkpoint_bytes=0,
        disk_bytes=3 * 2**30,
        free_disk_bytes=2 * 2**30,
    )
    said = " ".join(dry_run_report(tried).split())
    assert "12,345 training, 500 evaluation training" in said
    assert "training 772 steps, 1 h 0 min to 2 h 2 min by the fastest and the slowest of 4 steps" in said
    assert "evaluation 11 times, the saved model once more: about 1 min 35 s by the pace of one" in said
    assert "memory 3.0 GiB at the peak, of 8.0 GiB that could be had" in said
    assert "at most 3.0 GiB in runs/mine (a model takes 1.0 GiB); 2.0 GiB are free. That is too little" in said
    said = " ".join(dry_run_report(replace(tried, on_cpu=True)).split())
    assert "memory 3.0 GiB at the peak of these steps, of 8.0 GiB that could be had. On a CPU it grows: 20" in said
    alone = replace(tried, steps_taken=1, steps_timed=1, evaluations=0, memory_bytes=None, train_seconds=(4.0, 4.0))
    said = " ".join(dry_run_report(alone).split())
    assert "772 steps, about 4.0 s by the pace of one, which prepared the kernels too" in said
    assert "evaluation none without evaluation data memory" in said
    tested = dry_run_report(replace(alone, preferences={"training": 5, "test": 9}))
    assert "none without evaluation data, and the test data twice, not timed here" in " ".join(tested.split())
    assert "3.0 GiB at the peak disk" in said
