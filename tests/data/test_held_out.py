"""What a run holds out shares no conversation with its training data, which it says; it keeps the rule it began by."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from common import make_tokenizer
from resuming import interrupted
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.errors import DataError
from rewardlab.core.files import SUM
from rewardlab.core.spec import CUT_BY_STEPS, CUT_FEWEST, read_spec
from rewardlab.data.prepare import FEWEST_PROMPTS, Prepared, load_data
from rewardlab.data.splits import count_shared
from rewardlab.data.templates import build_renderer
from rewardlab.training.checkpoints import resume
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import to_groups


def write_dialogues(path: Path, count: int, *, opening: str = "Tell me about topic {}.", turns: int = 3) -> Path:
    """Conversations, each there as often as it has turns: every row goes on from the one before."""
    rows = []
    for number in range(count):
        said = [{"role": "user", "content": opening.format(number)}]
        for turn in range(turns):
            reply = f"Answer {turn} about topic {number}, which is none of the others."
            rows.append({"prompt": list(said), "chosen": reply, "rejected": f"No {turn} {number}."})
            said += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"More {turn} {number}?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(*paths: Path, **changes) -> RewardTrainerConfig:
    settings = {"model": "m", "eval_fraction": 0.2, "max_seq_len": 256, "num_workers": 1, "cache_dir": "none"}
    return RewardTrainerConfig.of(**{**settings, "dataset": tuple(map(str, paths)), **changes})


def prepare(config: RewardTrainerConfig, **how) -> Prepared:
    return load_data(config.data, build_renderer(make_tokenizer(), config.data.rendering), seed=config.run.seed, **how)


@pytest.mark.parametrize("limit", [None, 11])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_conversation_of_one_or_two_files_is_on_both_sides(tmp_path, caplog, limit, seed):
    files = [write_dialogues(tmp_path / f"{name}.jsonl", 8) for name in ("a", "b")]
    config = config_for(*files, limit=limit, seed=seed)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        prepared = prepare(config)
    nothing = {"rows": 0, "prompts": 0, "first_turns": 0, "replies": 0, "phrases": 0}
    assert count_shared(prepared.eval.texts(), prepared.train.texts()) == nothing
    assert prepared.reports["shared"] == {"evaluation_with_training": nothing}
    held_out = prepared.reports["held_out"]
    said = f"held out: {held_out['prompts']} prompts"
    if held_out["prompts"] < 0.9 * held_out["wanted"]:
        said += f" instead of {held_out['wanted']}, since up to {held_out['largest']} belong together"
    assert f"{said}; training sees none of their first turns and none of their replies" in caplog.text
    assert "flatter" not in caplog.text
    by_prompt = prepare(config, held_out_by=("prompt",)).reports
    assert by_prompt["held_out"]["prompts"] == by_prompt["held_out"]["wanted"] == held_out["wanted"]
    assert by_prompt["shared"]["evaluation_with_training"]["first_turns"] > 0


def test_of_what_is_held_out_a_limit_takes_away_and_brings_nothing_back(tmp_path):
    config = config_for(write_dialogues(tmp_path / "a.jsonl", 20))
    whole, limited = prepare(config), prepare(config.replace(eval_limit=4))
    assert len(limited.eval) == limited.reports["held_out"]["evaluated"] == 4
    assert limited.reports["held_out"]["not_used"] == len(whole.eval) - 4
    assert limited.train.numbers_P.tolist() == whole.train.numbers_P.tolist()


@pytest.mark.parametrize(("prompts", "rows", "is_told"), [(4, 60, True), (4, 40, False), (10, 60, False)])
def test_many_rows_of_a_few_prompts_are_told(tmp_path, caplog, prompts, rows, is_told):
    assert FEWEST_PROMPTS == MIN_CLUSTERS
    judged = tmp_path / "judged.jsonl"
    said = [{"prompt": f"P{n % prompts}?", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(rows)]
    judged.write_text("".join(json.dumps(row) + "\n" for row in said))
    config = config_for(write_dialogues(tmp_path / "a.jsonl", 8), eval_fraction=0.0, test_dataset=(str(judged),))
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        prepare(config)
    line = f"the {rows} test rows have only {prompts} prompts: below 10 their numbers have no intervals"
    assert (line in caplog.text) is is_told
    assert ("have no intervals" in caplog.text) is is_told


def test_where_one_first_turn_joins_everything_prompts_are_held_out_and_it_is_said(tmp_path, caplog):
    config = config_for(write_dialogues(tmp_path / "a.jsonl", 10, opening="Rate what follows."))
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        reports = prepare(config).reports
    assert reports["held_out"]["rule"] == "prompt"
    assert "training sees none of these prompts, but first turns and replies of theirs" in caplog.text
    shared = reports["shared"]["evaluation_with_training"]
    said = f"the evaluation data share 1 first turn with the training data ({shared['rows']} of {shared['rows']} rows)"
    assert said in caplog.text


def test_what_named_evaluation_and_test_data_share_is_counted(tmp_path, caplog):
    train_file, both = (write_dialogues(tmp_path / f"{n}.jsonl", n) for n in (6, 2))
    later = tmp_path / "later.jsonl"
    later.write_text("".join(both.read_text().splitlines(keepends=True)[1:3]))  # goes on where training began
    config = config_for(train_file, eval_dataset=(str(later),), test_dataset=(str(both),))
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        shared = prepare(config.replace(dataset=(str(write_first(train_file, tmp_path)),))).reports["shared"]
    own = {"prompts": 0, "first_turns": 1, "replies": 0, "phrases": 0}
    assert shared["evaluation_with_training"] == {"rows": 2, **own}
    assert shared["test_with_training"] == {"rows": 6, "prompts": 2, "first_turns": 2, "replies": 2, "phrases": 2}
    assert "the evaluation data share 1 first turn with the training data (2 of 2 rows); numbers" in caplog.text
    assert "the test data share 2 prompts, 2 first turns, 2 replies with the training data (6 of 6" in caplog.text
    assert "the test data share 2 phrases as replies with the training data" in caplog.text


def write_first(path: Path, folder: Path) -> Path:
    """The first row of each conversation in the file."""
    found = folder / "first.jsonl"
    found.write_text("".join(path.read_text().splitlines(keepends=True)[::3]))
    return found


SETTINGS = {"max_seq_len": 256, "micro_token_budget": 512, "batch_size": 4, "steps": 3, "eval_every": 2}


def test_a_run_goes_on_with_the_rule_that_it_began_by(base_model, tmp_path, monkeypatch, caplog):
    data = write_dialogues(tmp_path / "dialogues.jsonl", 8)
    with monkeypatch.context() as patched:
        patched.setattr(resume, "RULES", ("prompt",))
        config = interrupted(base_model, data, tmp_path / "run", monkeypatch, step=2, **SETTINGS)
    manifest_file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    begun = manifest["data"]["held_out"]
    # As runs were recorded when there was no other rule:
    manifest["data"]["held_out"] = {name: begun[name] for name in ("evaluated", "not_used")}
    assert manifest.pop("truncation") == CUT_FEWEST
    manifest.pop(SUM, None)
    manifest_file.write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        train(config)
    assert "RESUME: evaluation rows are held out by whole prompts alone, which is how this run began" in caplog.text
    assert "with the training data" in caplog.text

    assert read_spec(tmp_path / "run" / "step_3").renderer.truncation == CUT_BY_STEPS

    manifest["data"]["held_out"] = begun | {"digest": "of other prompts"}
    manifest.pop(SUM, None)
    manifest_file.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="the evaluation data are not what the run began with"):
        train(config)


@pytest.mark.parametrize("truncation", ["prompt-left", "drop"])
def test_held_out_rows_that_are_all_too_long_are_refused_with_the_flags_that_hold_out_others(tmp_path, truncation):
    path = write_dialogues(tmp_path / "rows.jsonl", 20, turns=1)
    config = config_for(path, eval_fraction=0.05, truncation=truncation)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[int(prepare(config).eval.groups()[0].preference_id.rpartition(":")[2]) - 1]["chosen"] += " word" * 300
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = build_renderer(make_tokenizer(), config.data.rendering)
    with pytest.raises(DataError, match=r"evaluation data: 1 of 1 preference .*--eval-fraction, others with .* --seed"):
        to_groups(config, prepare(config), renderer)
