"""What a user can get wrong with data and folders ends in one message with place and remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from command_line import BASE, ROW, in_process, only_message, refusal, short_run, tiny_reward_model, write_rows
from common import write_pairs
from rewardlab import cli
from rewardlab.artifact import save as save_module
from rewardlab.artifact.load import load
from rewardlab.core import folders
from rewardlab.core.errors import ConfigError
from rewardlab.training.loop.trainer import Trainer


@pytest.fixture
def flags(base_model: Path, tmp_path: Path) -> list[object]:
    """See `short_run`."""
    return short_run(base_model, tmp_path / "run")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("mistakes") / "reward")


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OTHER_PROMPT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}]
TWO_PROMPTS = {"chosen": MESSAGES, "rejected": OTHER_PROMPT}
LONG = {"prompt": "a", "chosen": "yes " * 90, "rejected": "no " * 90}
ALL = "--eval-fraction 0 "


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (
            [{"ask": "a", "good": "b"}],
            "",
            r"data\.jsonl:1: the columns 'ask', 'good' match no known schema.*The nearest formats: .*--prompt-column",
        ),
        ([], "", r"data\.jsonl: no rows"),
        ([ROW | {"chosen": ""}] * 3, "", r"none of the 3 rows can be used:\n  empty_reply: 3 .*data\.jsonl:1"),
        ([TWO_PROMPTS], "", r"prompt_differs: 1 .*data\.jsonl:1: the sides part at turn 1"),
        ([ROW, ROW | {"rejected": " Water it."}], "", r"1 of 2 rows .*identical_replies: 1 .*data\.jsonl:2"),
        ([ROW, ROW | {"rejected": " Water it."}], "", r"allow it with --max-drop-fraction 0\.5"),
        ([ROW, ROW | {"rejected": 7}], "", r"reply_not_text: 1 .*data\.jsonl:2: got 7, wanted text"),
        ([ROW, '{"prompt": "a", "cho', ROW], "", r"/data\.jsonl:2: not valid JSON: .*Fix or remove this line"),
        ([ROW, "[1]"], "", r"/data\.jsonl:2: expected a JSON object, got list"),
        ([ROW] * 2, "", r"holding out 1 of 1 different prompts leaves nothing to train on"),
        ([ROW], ALL + "--max-seq-len 16", r"--max-seq-len 16 is too small .*Raise it"),
        (
            [LONG],
            ALL + "--max-seq-len 64",
            r"1 of 1 preference cannot be used with --max-seq-len 64 .*Raise --max-seq",
        ),
        ([ROW], ALL + "--micro-token-budget 16", r"above --micro-token-budget 16\. Raise the budget to at least"),
        ([ROW], ALL + "--eval-dataset nosuch.jsonl", r"dataset 'nosuch\.jsonl', split 'test': no such file"),
        ([ROW], ALL + "--strength-as weight", r"missing_strength: 1 .*--strength-as asks for a strength"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_with_place_and_remedy(flags, tmp_path, capsys, rows, more, message):
    data = write_rows(tmp_path / "data.jsonl", *rows)
    assert re.search(message, refusal(capsys, *flags, "--dataset", data, *more.split()), re.DOTALL)
    assert not (tmp_path / "run/config.json").exists()


def test_a_dataset_that_is_not_there_is_named_with_what_is(flags, tmp_path, capsys):
    write_pairs(tmp_path / "pairs.jsonl", 4)
    said = refusal(capsys, *flags, "--dataset", tmp_path / "pair.jsonl")
    assert said.startswith(f"dataset '{tmp_path / 'pair.jsonl'}', split 'train': no such file")
    assert str(tmp_path / "pairs.jsonl") in said


def test_a_folder_with_the_name_of_a_file_is_told_for_what_it_is(flags, tmp_path, capsys):
    folder = tmp_path / "pairs.csv"
    folder.mkdir()
    said = refusal(capsys, *flags, "--dataset", folder)
    assert f"Looked for {folder}/train.* and {folder}.train.*" in said
    assert said.endswith(f" {folder} is a folder without data files.\n")
    write_pairs(folder / "mine.jsonl", 4)
    assert refusal(capsys, *flags, "--dataset", folder).endswith(f" There is: {folder / 'mine.jsonl'}.\n")


@pytest.mark.parametrize(
    ("file", "kind"),
    [("reward_spec.json", "a reward model"), ("model.safetensors", "a model"), ("metrics.jsonl", "a run")],
)
def test_a_folder_of_a_model_in_place_of_data_is_told(file, kind, flags, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / file).write_text("{}")
    said = refusal(capsys, *flags, "--dataset", tmp_path / "other")
    assert said.endswith(
        f" {tmp_path / 'other'} is the folder of {kind}, and data are wanted here. Are two names swapped?\n"
    )


def test_names_of_other_trainers_are_told(flags, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json", "ranking": true}}')
    said = refusal(capsys, *flags, "--dataset", folder)
    assert f"{folder / 'dataset_info.json'} lists datasets of LLaMA-Factory, which are not found by their" in said
    said = refusal(capsys, *flags, "--freeze_trainable_layers", "2")
    assert "Did you mean '--freeze-layers'? It counts the first layers, which stay as they are" in said
    rows = write_rows(tmp_path / "rl.jsonl", {"context_messages": [], "label": 1})
    assert "Perhaps 'context_messages' as 'prompt' is meant." in refusal(capsys, *flags, "--dataset", rows)


def test_a_model_that_is_not_there_is_named(flags, pairs_file, tmp_path, capsys):
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--model", tmp_path / "nosuch")
    assert said.startswith(f"no model at '{tmp_path / 'nosuch'}'")


def test_what_is_no_folder_of_a_model_is_told_for_what_it_is(flags, pairs_file, tmp_path, capsys):
    def said(model):
        return refusal(capsys, *flags, "--dataset", pairs_file, "--model", model)

    assert f"no model at '{pairs_file}': it is a file, and a model is a folder." in said(pairs_file)
    run = tmp_path / "earlier"
    (run / "best").mkdir(parents=True)
    assert f"no model at '{run}': it holds no config.json. Give a hub name" in said(run)
    (run / "best/reward_spec.json").write_text("{}")
    (run / "config.json").write_text('{"model": "m", "dataset": ["d"], "output_dir": "o"}')
    assert f"its config.json is not that of a model. Reward models in {run}: best. Give a hub name" in said(run)
    assert f"its config.json is not that of a model. Reward models in {run}: best." in refusal(
        capsys, "data", "show", pairs_file, "--model", run
    )


def test_a_file_in_place_of_a_folder_is_told(flags, pairs_file, capsys):
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--output-dir", pairs_file)
    assert said == f"cannot write to {pairs_file}: it is a file. Choose another place with --output-dir.\n"


@pytest.mark.parametrize("name", ["-", "pipe.jsonl"])
@pytest.mark.parametrize(
    "line",
    [
        ["score", "--model", "best", "--output", "scored.jsonl", "--input"],
        ["data", "inspect"],
        ["compare", "pairs.jsonl"],
        ["train", "--config"],
        ["plan", "check"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_twice_is_refused_in_words(name, line, saved_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").symlink_to(saved_model)
    write_rows(Path("pairs.jsonl"), {"id": 1, "reply": 0, "score": 1.0})
    os.mkfifo("pipe.jsonl")
    assert "no pipe is read, nor standard input. Write what comes through it to a file" in refusal(capsys, *line, name)


def test_no_file_is_called_like_the_standard_output(saved_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."})
    said = refusal(capsys, "score", "--model", saved_model, "--input", rows, "--output", "-")
    assert said == "--output -: nothing is written to standard output. Name the file to write.\n"


@pytest.mark.parametrize("device", ["gpu", "", "cuda:99", "xpu:7"])
def test_a_device_that_is_not_here_is_told(device, saved_model):
    with pytest.raises(ConfigError, match=f"^device '{device}' cannot be used here .*Leave it out for the usual one"):
        load(saved_model, device=device)


def test_a_folder_that_already_holds_a_run_is_kept(flags, pairs_file, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    text = '{"model": "m", "dataset": ["d"], "output_dir": "o"}'
    (tmp_path / "run/config.json").write_text(text)
    said = refusal(capsys, *flags, "--dataset", pairs_file)
    assert said == (
        f"{tmp_path / 'run'} already holds a run. Choose another --output-dir, or replace it with --overwrite.\n"
    )
    assert (tmp_path / "run/config.json").read_text() == text
    (tmp_path / "run/checkpoints/step_4").mkdir(parents=True)
    assert "already holds a run. Go on with it by --resume auto, choose another" in refusal(
        capsys, *flags, "--dataset", pairs_file
    )


@pytest.mark.parametrize(
    ("command", "number", "remedy"),
    [
        ("train", errno.EACCES, "make this one writable"),
        ("eval", errno.ENOSPC, "make room there"),
        ("score", errno.EDQUOT, "make room there"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
    command, number, remedy, flags, saved_model, pairs_file, tmp_path, monkeypatch, capsys
):
    def denied(**where):
        raise OSError(number, os.strerror(number), str(where["dir"]))

    # Root may write anywhere, so the system is played here.
    monkeypatch.setattr(folders.tempfile, "TemporaryFile", denied)
    place = tmp_path / "place"
    arguments = {
        "train": [*flags, "--dataset", pairs_file, "--output-dir", place],
        "eval": ["eval", "--model", saved_model, "--dataset", pairs_file, "--output-dir", place],
        "score": ["score", "--model", tmp_path, "--input", pairs_file, "--output", place / "scored.jsonl"],
    }[command]
    said = refusal(capsys, *arguments)
    flag = "--output" if command == "score" else "--output-dir"
    assert said == (
        f"cannot write to {place} ({os.strerror(number)}). Choose another place with {flag}, or {remedy}.\n"
    )


def test_a_folder_below_a_file_is_refused(flags, pairs_file, capsys):
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--output-dir", pairs_file / "run")
    assert said.startswith(f"cannot write to {pairs_file / 'run'} (Not a directory)")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(flags, pairs_file, tmp_path, monkeypatch, capsys):
    write = save_module.write_weights

    def full_at_the_second_step(path, *arguments, **more):
        if "step_2" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments, **more)

    monkeypatch.setattr(save_module, "write_weights", full_at_the_second_step)
    more = [
        "--dataset",
        pairs_file,
        "--save-every",
        "1",
        "--eval-fraction",
        "0",
        "--report-to",
        "none",
        "--no-checkpoints",
    ]
    said = refusal(capsys, *flags, *more)
    run = tmp_path / "run"
    assert said == (
        f"{run}: No space left on device while writing {run / 'step_2/model.safetensors'}. Make room there, or move "
        "the folder to another disk; then start again with --overwrite, since there is no checkpoint. What was saved "
        "before is still there.\n"
    )
    folders = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert folders - {"tensorboard"} == {"step_1"}
    assert load(tmp_path / "run/step_1")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "run/x"),
            "run/x: No space left on device. Make room there, or write to another disk. What was saved before is still",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "Disk quota exceeded. Make room there, or write to another disk.",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "run/.metrics.csv.tmp-7"),
            "run/.metrics.csv.tmp-7: No such file or directory. If run was there before, it has been moved or deleted.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a\nb"),
            r"a\nb: Permission denied. Let this user read and",
        ),
        (OSError("torn"), "torn. What was saved before is still there."),
    ],
)
def test_what_the_system_refuses_is_said_with_what_to_do(error, message, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "commands", lambda: {"fail": fail})
    assert refusal(capsys, "fail").startswith(message)


def test_a_run_whose_folder_is_deleted_says_that(flags, pairs_file, tmp_path, monkeypatch, capsys):
    step = Trainer.train_step

    def deletes(trainer, batches):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", deletes)
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--eval-fraction", "0", "--report-to", "none")
    assert re.search(rf"No such file or directory\. If {tmp_path / 'run'} was there before, it has been moved or", said)
    assert "still there" not in said


def test_a_checkpoint_for_which_there_is_no_room_says_that(flags, pairs_file, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rewardlab.training.checkpoints.shards._write", full)
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--eval-fraction", "0", "--report-to", "none")
    wanted = f"{tmp_path / 'run'}: No space left on device while writing {tmp_path / 'run/checkpoints/step_2'}. Make"
    assert said.startswith(wanted)


@pytest.mark.slow
def test_the_script_itself_exits_with_2_and_no_traceback(tmp_path):
    answer = in_process("train", *BASE[:2], "--dataset", tmp_path / "nosuch.jsonl", "--output-dir", tmp_path / "run")
    assert answer.returncode == 2
    assert only_message(answer.stderr).startswith(f"dataset '{tmp_path / 'nosuch.jsonl'}', split 'train': no such file")
    answer = in_process("train", "--limit", "0", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "error: --limit 0: must be at least 1; leave it out to use every row.\n"
