"""Checkpoints on the disk: the same bits for any ranks, nothing that is run, and damage of every kind."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

from common import write_base_model, write_pairs
from harming import HARMS, harm_folder
from held_in_parts import SHAPES, tensors_of
from resuming import interrupted, weights_of
from rewardlab.core.errors import ArtifactError, RewardlabError
from rewardlab.core.files import read_summed_json, sha256_file, write_json, write_summed_json
from rewardlab.distributed.ranks import ALONE
from rewardlab.training import start
from rewardlab.training.checkpoints.checkpoint import checkpoint_at, newest_checkpoint
from rewardlab.training.checkpoints.distcp import _Names
from rewardlab.training.checkpoints.shards import open_shards, read_shards, write_shards
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import history_of

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> RewardTrainerConfig:
    """How to go on with a run that was stopped after step 5, of which there are checkpoints 4 and 5; `whole` lies
    beside it, and its `config.run.output_dir` is to be copied.
    """
    folder = tmp_path_factory.mktemp("stopped")
    base, pairs = write_base_model(folder / "base"), write_pairs(folder / "pairs.jsonl", 40)
    test = write_pairs(folder / "test.jsonl", 8, offset=500)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rewardlab.training.run.verify_in_clean_process", lambda _: None)
        config = interrupted(base, pairs, folder / "run", patched, test_dataset=(str(test),))
        train(config.replace(resume=None, output_dir=folder / "whole"))
    return config


@pytest.fixture
def copied(stopped, tmp_path) -> RewardTrainerConfig:
    """The same with a copy of its own."""
    shutil.copytree(stopped.run.output_dir, tmp_path / "run")
    return stopped.replace(output_dir=tmp_path / "run")


def whole_of(config: RewardTrainerConfig) -> Path:
    return Path(config.data.dataset[0]).with_name("whole")


def as_earlier_version(run: Path, step: int) -> Path:
    """Write a checkpoint as earlier versions did; returns its folder."""
    folder = run / f"checkpoints/step_{step}"
    held = open_shards(folder / "tensors")
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in held.items()}
    read_shards(held, tensors, where=folder)
    shutil.rmtree(folder / "tensors")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(tensors, storage_writer=FileSystemWriter(folder / "tensors"))
    state = json.loads((folder / "state.json").read_text().replace("_accuracy", "_acc")) | {"format": 1}
    assert any("eval_acc" in row for row in state["rows"])
    (folder / "state.json").write_text(json.dumps(state))
    list_again(folder)
    return folder


def list_again(folder: Path) -> None:
    """The list of an earlier version, which no one protects."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "checkpoint.json"]
    sums = {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
    write_json(folder / "checkpoint.json", {"format": 1, "sha256": sums})


# --- ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("written", [(2, "full"), (4, "hybrid"), (1, "full"), (2, "none")])
def test_what_some_ranks_write_any_number_reads_bit_for_bit(written, tmp_path, on_ranks):
    size, sharding = written
    ends, said, _ = on_ranks("keep_tensors", size, tmp_path, write=True, sharding=sharding, per_node=2)
    assert set(ends.values()) == {0}, said[-3000:]
    for readers, how in ((3, "full"), (4, "hybrid"), (2, "none"))[: None if size == 2 else 1]:
        ends, said, _ = on_ranks("keep_tensors", readers, tmp_path, write=False, sharding=how, per_node=2)
        assert set(ends.values()) == {0}, said[-3000:]
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of().items()}
    read_shards(open_shards(tmp_path / "tensors"), found, where=tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of().items())
    index = json.loads((tmp_path / "tensors/index.json").read_text())
    assert sum(count for _, _, count in index["matrix"]["pieces"]) == SHAPES["matrix"][0], "nothing is there twice"
    files = {file for entry in index.values() for file, _, _ in entry["pieces"]}
    assert len(files) == size, "all of them write"


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path, on_ranks):
    ends, said, seconds = on_ranks("keep_tensors", 2, tmp_path, write=True, sharding="full", full=1)
    assert 0 not in ends.values()
    assert said.count("OSError: [Errno 28] No space left on device, on rank 1") == 2
    assert "this process ended, because" not in said
    assert seconds < 60


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"more": torch.zeros(1)}, "is of a model in which other parameters train: more and 0 more"),
        ({"matrix": torch.zeros(2, 2)}, r"matrix is torch.float32 \[7, 3\] there, and torch.float32 \[2, 2\] here"),
        ({"matrix": torch.zeros(7, 3, dtype=torch.float64)}, "torch.float64"),
    ],
)
def test_tensors_of_another_model_are_refused_in_words(other, words, tmp_path):
    (tmp_path / "tensors").mkdir()
    write_shards(tmp_path / "tensors", tensors_of(), ALONE)
    with pytest.raises(ArtifactError, match=words):
        read_shards(open_shards(tmp_path / "tensors"), tensors_of() | other, where=tmp_path)


# --- nothing is run --------------------------------------------------------------------------------------------


class Payload:
    """What a pickle may do to whoever reads it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.slow
def test_resuming_unpickles_nothing(copied, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    train(copied)
    assert history_of(copied.run.output_dir) == history_of(whole_of(copied))


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_goes_on_exactly(copied, log):
    as_earlier_version(copied.run.output_dir, 5)
    train(copied)
    assert "checkpoints/step_5, after step 5" in log.text
    assert history_of(copied.run.output_dir) == history_of(whole_of(copied))


def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(copied, tmp_path, log):
    folder, trace = as_earlier_version(copied.run.output_dir, 5), tmp_path / "trace"
    metadata = folder / "tensors/.metadata"
    metadata.write_bytes(pickle.dumps(Payload(trace)))
    list_again(folder)
    assert newest_checkpoint(copied.run.output_dir).step == 4
    assert "which no checkpoint does" in log.text
    assert not trace.exists()


@pytest.mark.slow
def test_a_part_that_calls_something_is_refused_and_calls_nothing(copied, tmp_path):
    folder, trace = as_earlier_version(copied.run.output_dir, 5), tmp_path / "trace"
    (data,) = (folder / "tensors").glob("*.distcp")
    evil, content = pickle.dumps(Payload(trace), protocol=2), bytearray(data.read_bytes())
    content[:] = (evil * (len(content) // len(evil) + 1))[: len(content)]
    data.write_bytes(content)
    list_again(folder)
    with pytest.raises(ArtifactError, match="cannot be read"):
        train(copied)
    assert not trace.exists()


class AsOlderPython:
    """Pickles a member of an enumeration as Python before 3.11.4 does, which some systems have."""

    def __reduce__(self):
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")


def test_members_that_an_older_python_wrote_are_read_and_call_nothing():
    assert _Names(io.BytesIO(pickle.dumps(AsOlderPython()))).load() is None


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd"])
def test_an_index_does_not_lead_out_of_its_folder(name, tmp_path):
    (tmp_path / "tensors").mkdir()
    write_shards(tmp_path / "tensors", tensors_of(), ALONE)
    index = json.loads((tmp_path / "tensors/index.json").read_text())
    index["matrix"]["pieces"][0][0] = name
    write_json(tmp_path / "tensors/index.json", index)
    with pytest.raises(ValueError, match="is not the name of a file here"):
        open_shards(tmp_path / "tensors")


# --- damage ----------------------------------------------------------------------------------------------------

FILES = ("checkpoint.json", "state.json", "tensors/index.json", "tensors/rank_0.safetensors")
DAMAGE = [(name, how) for name in FILES for how in HARMS]
FOLDERS = [
    (name, how)
    for name in ("", "tensors")
    for how in ("gone", "empty", "a file", "a link elsewhere", "a link to nothing", "a link to itself", "a pipe")
    if (name, how) != ("", "gone")
]


def harm(checkpoint: Path, name: str, how: str) -> None:
    if (checkpoint / name).is_dir():
        harm_folder(how, checkpoint / name)
    else:
        HARMS[how](checkpoint / name)


@pytest.mark.parametrize(("name", "how"), [*DAMAGE, *FOLDERS])
def test_damage_of_any_kind_leads_to_the_checkpoint_before(name, how, copied, log):
    folder = copied.run.output_dir / "checkpoints/step_5"
    harm(folder, name, how)
    with pytest.raises(ArtifactError, match="is damaged"):
        checkpoint_at(folder)
    found = newest_checkpoint(copied.run.output_dir)
    assert found.step == 4
    assert "step_5 is damaged (" in log.text
    assert not folder.exists()
    assert newest_checkpoint(copied.run.output_dir).step == 4, "once is enough"


@pytest.mark.parametrize("name", ["state.json", "tensors/index.json"])
def test_a_list_that_leaves_a_file_out_is_damage(name, copied):
    folder = copied.run.output_dir / "checkpoints/step_5"
    listed = read_summed_json(folder / "checkpoint.json")
    del listed["files"][name]
    write_summed_json(folder / "checkpoint.json", listed)
    with pytest.raises(ArtifactError, match=f"checkpoint.json does not list {name}"):
        checkpoint_at(folder)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize("how", [how for how in HARMS if how != "a link elsewhere"])
def test_a_run_whose_settings_are_damaged_is_refused_in_words(name, how, copied):
    HARMS[how](copied.run.output_dir / name)
    with pytest.raises(RewardlabError, match=f"{name}.* begin again with --overwrite|already holds a run"):
        train(copied)


def test_a_digit_in_the_settings_of_a_run_is_no_other_learning_rate(copied):
    path = copied.run.output_dir / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.003', '"lr": 0.008'))
    with pytest.raises(ArtifactError, match="config.json is not what the run wrote, by the hash in manifest.json"):
        train(copied.replace(lr=0.008))


@pytest.mark.slow
def test_settings_are_those_before_if_a_process_died_between_manifest_and_settings(copied, monkeypatch):
    def dies(path: Path, _value: object) -> None:
        assert path.name == "config.json"
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(start, "write_json", dies)
            with pytest.raises(KeyboardInterrupt):
                train(copied.replace(log_every=1))
    train(copied.replace(log_every=1))
    assert (copied.run.output_dir / "step_8").is_dir()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("damaged", [("step_0", "test_before_training"), ("step_4",)])
def test_scores_that_changed_on_the_disk_are_not_taken_for_what_the_model_gave(damaged, copied, log):
    evals, whole = copied.run.output_dir / "evals", whole_of(copied)
    for name in damaged:
        path = evals / f"{name}.scores.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"score": row["score"] + 1}) + "\n" for row in rows))
    result = train(copied)
    for name in damaged:
        assert f"{name}.scores.jsonl does not match its checksum" in log.text
    assert history_of(copied.run.output_dir) == history_of(whole)
    if "step_0" in damaged:  # of the untrained model, which is at hand
        for name in damaged:
            assert (evals / f"{name}.scores.jsonl").read_text() == (whole / f"evals/{name}.scores.jsonl").read_text()
        rows = [json.loads(line)["score"] for line in (whole / "evals/step_0.scores.jsonl").read_text().splitlines()]
        assert [row.score for row in result.baseline.rows] == rows
    drawn, wanted = (
        json.loads((run / "reward_distributions.json").read_text()) for run in (copied.run.output_dir, whole)
    )
    assert drawn == {step: scores for step, scores in wanted.items() if f"step_{step}" not in {*damaged} - {"step_0"}}


@pytest.mark.slow
def test_a_best_that_says_another_step_is_refused(copied):
    path = copied.run.output_dir / "best/reward_spec.json"
    spec = json.loads(path.read_text())
    spec["provenance"]["step"] += 10
    path.write_text(json.dumps(spec))
    with pytest.raises(ArtifactError, match="best/reward_spec.json: its provenance was changed"):
        train(copied)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "how"), [*DAMAGE, *FOLDERS])
def test_a_run_goes_on_exactly_from_the_checkpoint_before_a_damaged_one(name, how, copied):
    harm(copied.run.output_dir / "checkpoints/step_5", name, how)
    train(copied)
    assert history_of(copied.run.output_dir) == history_of(whole_of(copied))
    for model in ("best", "step_8"):
        ours, theirs = (weights_of(run / model) for run in (copied.run.output_dir, whole_of(copied)))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


OF_A_RUN = (
    *("metrics.csv", "metrics.jsonl", "warnings.jsonl", "reward_distributions.json", "samples.txt"),
    *(
        f"evals/{name}.{end}"
        for name in ("step_0", "step_2", "test_before_training")
        for end in ("scores.jsonl", "metrics.json")
    ),
)


@pytest.mark.soak
@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_run_with_any_other_file_damaged_goes_on_or_is_refused_in_words(name, how, copied):
    HARMS[how](copied.run.output_dir / name)
    with suppress(RewardlabError):  # in words; anything else is a traceback
        train(copied)
        assert history_of(copied.run.output_dir) == history_of(whole_of(copied))
