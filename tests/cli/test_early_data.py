"""What is wrong with data and shows without a model is told before the libraries of models are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rewardlab.cli import main
from rewardlab.data import dataset_names
from rewardlab.data.config import ReadingConfig

PAIR = {"prompt": "Why?", "chosen": "a", "rejected": "b"}

HEAVY = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise AssertionError(name + " is imported")
sys.meta_path.insert(0, Refuse())
from rewardlab.cli import main
main(sys.argv[1:])
"""
"""The command line in a process in which nothing heavy can be imported."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Data that cannot be used, and some that can."""
    contents = {
        "good.jsonl": json.dumps(PAIR) + "\n",
        "empty.jsonl": "\n",
        "odd.jsonl": '{"question": "Why?", "best": "a"}\n',
        "odd.csv": "question,best\nWhy?,a\n",
        "odd.json": '[{"question": "Why?", "best": "a"}]',
        "splits/train.jsonl": json.dumps(PAIR) + "\n",
    }
    (tmp_path / "splits").mkdir()
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    names = ("splits", "missing.jsonl", *contents)
    own = {name.removesuffix(".jsonl").replace(".", "_"): str(tmp_path / name) for name in names}
    return own | {"out": str(tmp_path / "run")}


CASES = [
    ("train --dataset {missing}", "no such file"),
    ("train --dataset {empty}", "no rows"),
    ("train --dataset {odd}", "no known schema"),
    ("train --dataset {good} --eval-dataset {odd_csv}", "no known schema"),
    ("train --dataset {good} --test-dataset {odd_json}", "no known schema"),
    ("train --dataset {good} --eval-split tset", "is one file and has no splits"),
    ("train --dataset {splits} --hf-split tset", "There is: "),
    ("probe --dataset {odd_csv}", "no known schema"),
    ("probe --dataset {splits} --test-split tset", "There is: "),
    ("eval --dataset {odd}", "no known schema"),
    ("eval --dataset {splits} --hf-split tset", "There is: "),
]


@pytest.mark.parametrize(("words", "said"), CASES)
def test_it_is_told_before_the_model_is_looked_for(files, capsys, words, said):
    command, *flags = words.format_map(files).split()
    with pytest.raises(SystemExit) as caught:
        main([command, "--model", "no/such/model/folder", "--output-dir", files["out"], *flags])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path(files["out"]).exists()


def test_the_other_processes_of_a_run_are_told(files, capsys, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("rewardlab.distributed.meeting.tell_of_failure", told.append)
    words = ["train", "--model", "x", "--dataset", files["missing"], "--output-dir", files["out"]]
    for size in (None, "2"):
        if size is not None:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(SystemExit):
            main(words)
        assert f"{told[0]}\n" in capsys.readouterr().err if size else not told
    with pytest.raises(SystemExit):
        main([*words, "--steps", "none"])
    assert len(told) == 2
    assert "--steps" in told[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "words", ["train --dataset {odd_csv}", "eval --dataset {missing}", "probe --dataset {empty}", "score"]
)
def test_nothing_heavy_is_imported_to_tell_it(files, words):
    command, *flags = words.format_map(files).split()
    own = {"score": ["--input", files["missing"], "--output", files["out"]]}
    arguments = [command, "--model", "m", *own.get(command, ["--output-dir", files["out"]]), *flags]
    answer = subprocess.run([sys.executable, "-c", HEAVY, *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("error: ")


def test_a_large_json_file_is_not_read_twice(files, monkeypatch):
    monkeypatch.setattr(dataset_names, "WHOLE_BYTES", 3)
    dataset_names.require_readable([files["odd_json"]], "train", ReadingConfig())


LISTENS = """
import signal, sys

class Looks:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.exit(int(any(signal.getsignal(one) is signal.SIG_DFL for one in (signal.SIGUSR1, signal.SIGUSR2))))

sys.meta_path.insert(0, Looks())
from rewardlab.cli import main
main({words!r})
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("rewardlab.experiments.one_run", ["plan", "task", "study", "--run", "a/seed_0"]),
        (
            "rewardlab.gold.sampling.run",
            ["gold", "sample", "--prompts", "p.jsonl", "--model", "m", "--output", "o.jsonl"],
        ),
        (
            "rewardlab.gold.labelling.run",
            ["gold", "label", "--input", "i.jsonl", "--model", "m", "--output", "o.jsonl"],
        ),
    ],
)
def test_what_batch_jobs_run_hears_the_signal_before_a_time_limit_while_it_still_imports(module, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LISTENS.format(module=module, words=words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
