"""What commands write: nothing that is there already is replaced, unless that was asked for, and never an input."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from command_line import refusal, short_run, tiny_reward_model, write_rows
from common import write_pairs
from rewardlab.cli import main
from rewardlab.core.folders import remove
from rewardlab.core.placing import placing
from rewardlab.core.run_folder import clear_folder, written_by_run
from rewardlab.evaluation import evaluate as evaluate_module

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("outputs") / "reward")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("inside", ["", "evals", "best"])
def test_an_evaluation_stays_out_of_a_run(saved, tmp_path, capsys, inside):
    run = tmp_path / "run"
    put(run, {"manifest.json": '{"config_hash": "1", "provenance": {}}', "evals/precision.json": "{}"})
    data = write_pairs(tmp_path / "pairs.jsonl", 6)
    for more in ([], ["--overwrite"]):
        said = refusal(capsys, "eval", "--model", saved, "--dataset", data, "--output-dir", run / inside, *more)
        assert said.startswith(f"--output-dir {run / inside}: {run} holds a run, with files of its own. Choose another")
    assert (run / "evals/precision.json").read_text() == "{}"
    main(["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(run / "judged")])  # its own


def test_an_evaluation_replaces_no_file_of_others(saved, tmp_path, capsys):
    put(tmp_path / "app", {"manifest.json": '{"name": "an app"}'})
    data = write_pairs(tmp_path / "pairs.jsonl", 6)
    said = refusal(capsys, "eval", "--model", saved, "--dataset", data, "--output-dir", tmp_path / "app", "--overwrite")
    assert "holds manifest.json, which `rewardlab eval` did not write" in said
    assert (tmp_path / "app/manifest.json").read_text() == '{"name": "an app"}'


@pytest.mark.slow
def test_an_evaluation_is_replaced_only_when_asked(saved, tmp_path, capsys):
    out = tmp_path / "out"
    data, other = (write_pairs(tmp_path / f"{name}.jsonl", 6, offset=offset) for name, offset in (("a", 0), ("b", 50)))
    line = ["eval", "--model", str(saved), "--output-dir", str(out)]
    main([*line, "--dataset", str(data)])
    first = files_of(out)
    assert "precision.json" in first
    said = refusal(capsys, *line, "--dataset", other)
    assert said.startswith(f"{out} already holds an evaluation (eval.scores.jsonl, eval.metrics.json, manifest.json, ")
    assert "or replace it with --overwrite" in said
    assert files_of(out) == first
    said = refusal(capsys, *line, "--dataset", out / "eval.scores.jsonl", "--overwrite")
    assert f"is a file that --output-dir {out} would replace" in said
    assert files_of(out) == first
    refusal(capsys, *line, "--dataset", tmp_path / "nosuch.jsonl", "--overwrite")
    assert files_of(out) == first, "a mistake takes nothing away"
    main([*line, "--dataset", str(other), "--overwrite", "--no-precision-card"])
    again = files_of(out)
    assert again["eval.scores.jsonl"] != first["eval.scores.jsonl"]
    assert "precision.json" not in again, "the card of another evaluation"
    assert json.loads(again["manifest.json"])["config"]["overwrite"] is False


def test_an_ensemble_that_is_none_is_refused_before_its_model_is_judged(saved, tmp_path, capsys):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 4)
    out = tmp_path / "judged"
    said = refusal(capsys, "eval", saved, "--ensemble", saved, "--dataset", pairs, "--output-dir", out)
    assert f"--ensemble {saved}: one model is not an ensemble" in said
    assert not out.exists()


def test_scores_replace_no_file_unasked_and_never_their_input(saved, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."})
    link = tmp_path / "link.jsonl"
    link.symlink_to(rows)
    text = rows.read_bytes()
    for target in (rows, link, tmp_path / "." / "rows.jsonl"):
        for more in ([], ["--overwrite"]):
            said = refusal(capsys, "score", "--model", saved, "--input", rows, "--output", target, *more)
            assert said.startswith(f"--output {target}: it is the file to be scored")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    line = ["score", "--model", str(saved), "--input", str(rows), "--output", str(metrics)]
    assert refusal(capsys, *line).startswith(f"--output {metrics}: it already exists. Name another file, or replace")
    assert metrics.read_text() == "{}\n"
    main([*line, "--overwrite"])
    assert "score" in json.loads(metrics.read_text())
    assert rows.read_bytes() == text


FOREIGN = {
    "checkpoints/epoch_3.pt": "weights",
    "evals/mine.csv": "a,b",
    "profile/flame.svg": "<svg/>",
    "config.json": "{}",
    "manifest.json": '{"name": "an app"}',
    "step_7/notes.txt": "mine",
    "best/model.bin": "weights",
}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def there(folder: Path, files: dict[str, str]) -> bool:
    return all((folder / name).is_file() and (folder / name).read_text() == text for name, text in files.items())


@pytest.mark.parametrize("more", [[], ["--resume", "auto"], ["--overwrite"]])
@pytest.mark.parametrize("names", [tuple(FOREIGN), *((name,) for name in FOREIGN)], ids=str)
def test_files_of_others_are_never_removed(base_model, pairs_file, tmp_path, capsys, names, more):
    files = {name: FOREIGN[name] for name in names}
    put(tmp_path / "run", files)
    said = refusal(capsys, *short_run(base_model, tmp_path / "run"), "--dataset", pairs_file, *more)
    assert re.match(rf"{tmp_path / 'run'} holds .*, which a run would replace, but no rewardlab run\.", said)
    assert there(tmp_path / "run", files)


@pytest.mark.slow
def test_what_others_put_into_the_folders_of_a_run_stays_when_it_is_replaced(
    base_model, pairs_file, tmp_path, capsys, caplog
):
    line = [str(word) for word in (*short_run(base_model, tmp_path / "run"), "--dataset", pairs_file)]
    main(line)
    added = {name: FOREIGN[name] for name in ("checkpoints/epoch_3.pt", "evals/mine.csv")} | {
        "notes.txt": "mine",
        "evals/mine.metrics.json": "{}",
        "checkpoints/step_500/weights.pt": "weights",
    }
    put(tmp_path / "run", added)
    (tmp_path / "run/evals/step_99.scores.jsonl").write_text("")
    main([*line, "--overwrite"])
    assert there(tmp_path / "run", added)
    assert not (tmp_path / "run/evals/step_99.scores.jsonl").exists(), "of the run that was replaced"
    assert "evals: not removed, since no run wrote them: mine.csv, mine.metrics.json" in caplog.text
    put(tmp_path / "run", {"step_7/notes.txt": "mine"})
    said = refusal(capsys, *line, "--overwrite")
    assert said.startswith(f"{tmp_path / 'run/step_7'} is not a reward model that a run saved")
    assert (tmp_path / "run/best").exists() or (tmp_path / "run/step_2").exists()


@pytest.mark.slow
def test_a_file_that_somebody_put_beside_a_saved_model_is_named_and_stays(base_model, pairs_file, tmp_path, capsys):
    run = tmp_path / "run"
    line = [str(word) for word in (*short_run(base_model, run), "--dataset", pairs_file, "--lora")]
    main(line)
    shutil.copytree(run / "step_2", run / "best", dirs_exist_ok=True)
    for model in (run / "best", run / "step_2"):
        assert (model / "adapter").is_dir()
        for name in ("notes.txt", "adapter/plot.png", "more/weights.pt"):
            put(model, {name: "mine"})
            said = refusal(capsys, *line, "--overwrite")
            expected = f"{model} holds {name}, which no run wrote and which would be removed with it. Move what"
            assert said.startswith(expected)
            assert there(model, {name: "mine"})
            (model / name).unlink()
        (model / "link").symlink_to(tmp_path)
        assert "holds link, which no run wrote" in refusal(capsys, *line, "--overwrite")
        (model / "link").unlink()
    spec = run / "best/reward_spec.json"
    text = spec.read_text()
    spec.write_text("{")
    assert "So it is unknown which files in" in refusal(capsys, *line, "--overwrite")
    spec.write_text(text)
    main([*line, "--overwrite"])


@pytest.mark.parametrize(
    ("command", "wrong", "words"),
    [
        ("train", ["--model", "runs/none/best"], "no model at 'runs/none/best'"),
        ("probe", ["--model", "runs/none/best"], "no model at 'runs/none/best'"),
        ("train", ["--dataset", "nowhere/pairs.jsonl"], "nowhere/pairs.jsonl"),
        ("probe", ["--dataset", "nowhere/pairs.jsonl"], "nowhere/pairs.jsonl"),
        ("train", ["--report-to", "wandb"], "--report-to wandb: the package is not installed"),
        ("eval", [], "no reward_spec.json"),
        ("calibrate", [], "no reward_spec.json"),
    ],
)
def test_what_cannot_begin_leaves_no_folder(
    base_model, pairs_file, tmp_path, capsys, monkeypatch, command, wrong, words
):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more))
    line = [command, "--model", base_model, "--dataset", pairs_file, "--output-dir", "out/run", *wrong]
    assert words in refusal(capsys, *line)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_links_in_a_run_are_removed_and_not_what_is_behind_them(base_model, pairs_file, tmp_path):
    line = [str(word) for word in (*short_run(base_model, tmp_path / "run"), "--dataset", pairs_file)]
    main(line)
    elsewhere = tmp_path / "all-tensorboards"
    put(elsewhere, {"events.out.tfevents.1": "of another run"})
    remove(tmp_path / "run/tensorboard")
    (tmp_path / "run/tensorboard").symlink_to(elsewhere)
    main([*line, "--overwrite"])
    assert there(elsewhere, {"events.out.tfevents.1": "of another run"})
    assert not (tmp_path / "run/tensorboard").is_symlink()


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_began_or_was_cleared_begins_again(base_model, pairs_file, tmp_path):
    line = [str(word) for word in (*short_run(base_model, tmp_path / "run"), "--dataset", pairs_file)]
    main(line)
    run = tmp_path / "run"
    put(run, {"evals/mine.csv": "a,b"})
    clear_folder(run)  # and killed before it wrote anything
    main([*line, "--resume", "auto"])
    assert (run / "config.json").is_file()
    clear_folder(run)
    (run / "manifest.json").unlink()
    put(run, {"config.json": '{"model": "m", "dataset": ["d"], "output_dir": "o"}', "samples.txt": "of before"})
    (run / "evals/mine.csv").unlink()
    main([*line, "--resume", "auto"])  # as a version that wrote its settings first left it
    assert (run / "manifest.json").is_file()


def test_a_new_run_leaves_no_evaluation_of_the_earlier_one(tmp_path):
    run = tmp_path / "run"
    written = ["step_2.scores.jsonl", "test.metrics.json", "precision.json", "live.json", "states.json"]
    (run / "evals").mkdir(parents=True)
    for name in written:
        (run / "evals" / name).write_text("{}")
    (run / "manifest.json").write_text(json.dumps({"config_hash": "x", "provenance": {}}))
    clear_folder(run)
    assert [path.name for path in run.iterdir()] == ["manifest.json"]


@pytest.mark.slow
def test_what_others_put_beside_the_steps_of_a_run_stays_when_it_goes_on(base_model, pairs_file, tmp_path):
    line = [str(word) for word in (*short_run(base_model, tmp_path / "run"), "--dataset", pairs_file)]
    main(line)
    put(tmp_path / "run", {"step_99/notes.txt": "mine"})
    main([*line, "--resume", "auto"])
    assert there(tmp_path / "run", {"step_99/notes.txt": "mine"})


@pytest.mark.slow
def test_an_evaluation_that_was_ended_while_it_was_written_is_begun_anew_by_the_same_command(
    saved, tmp_path, monkeypatch
):
    data = write_pairs(tmp_path / "pairs.jsonl", 6)
    line = ["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")]

    def killed(*_):
        raise KeyboardInterrupt

    for name in ("write_json", "write_jsonl"):
        with monkeypatch.context() as patched:
            patched.setattr(evaluate_module, name, killed)
            with pytest.raises(SystemExit):
                main(line)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    main(line)
    assert (tmp_path / "out/eval.scores.jsonl").is_file()


def test_folders_of_a_user_are_no_run_to_clear(tmp_path: Path) -> None:
    """Empty ones too, whatever they are called."""
    (tmp_path / "evals").mkdir()
    clear_folder(tmp_path)
    assert (tmp_path / "evals").is_dir()


def test_empty_folders_of_an_earlier_run_go_with_it(tmp_path: Path) -> None:
    """As of a run that was killed before it profiled anything."""
    put(tmp_path, {"manifest.json": '{"config_hash": "x", "provenance": {}}', "evals/mine.csv": "a,b"})
    for name in ("profile", "tensorboard", "mine"):
        (tmp_path / name).mkdir()
    with placing(tmp_path, lambda: written_by_run(tmp_path)) as new:
        (new / "manifest.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evals", "manifest.json", "mine"]
