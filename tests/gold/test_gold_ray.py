"""`--engine ray`: on a cluster of two worker processes it writes what one process writes, whatever ends on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ray_workers
import rewardlab
from killing import run_program
from ray_workers import formula
from reward_models import save_tiny
from rewardlab.core.errors import ConfigError, DataError, EndpointError
from rewardlab.gold import on_ray
from rewardlab.gold import reward_models as reward_models_module
from rewardlab.gold.engine import EngineConfig
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.run import label
from rewardlab.gold.sampling import run as sampling
from rewardlab.gold.sampling.config import DrawConfig, SampleConfig, SamplerConfig
from rewardlab.gold.sampling.run import sample
from rewardlab.gold.scoring import ScoringConfig
from tiny_chat import save_chat_model

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "rewardlab[ray]"')
# Ray leaves files and sockets of its own to the garbage collector, and deprecates what it calls itself.
pytestmark = [
    pytest.mark.soak,  # each cluster is a dozen processes, too many beside the other tests on two cores
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]
NUM = 10
ON_RAY = EngineConfig(engine="ray", ray_workers=2)
MARK = "REWARDLAB_TEST_RAY"
"""In the environment of every process that a cluster of these tests has."""
PATH = os.pathsep.join([str(Path(rewardlab.__file__).parents[1]), str(Path(ray_workers.__file__).parent)])
"""Where the workers find the package, and what stands in for models."""


def alive(mark: str) -> list[int]:
    """The processes with a mark, apart from this one; those of a cluster get three minutes to end, which a machine with
    much else to do has needed."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for _ in range(900):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or is another user's
                continue
        if not found:
            break
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A folder with a short name, since the names of sockets have a limit."""
    folder = Path(tempfile.mkdtemp(prefix="rl-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def _two(short: Path) -> Iterator[None]:
    """A cluster with room for two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, f"{os.getpid()} module")
        patch.setenv("RAY_TMPDIR", str(short))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", PATH)
        patch.setenv("RAY_worker_niceness", "0")  # it gives way to whatever else runs
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 1024 * 1024,
            _node_ip_address=on_ray.LOOPBACK,
        )
        try:
            yield
        finally:
            ray.shutdown()
    assert not alive(f"{os.getpid()} module")


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stand-ins for language models leave notes."""
    monkeypatch.setattr(sampling, "samplers_of", formula)
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def asked(folder: Path, model: str, *, workers: EngineConfig = ON_RAY, num: int = 2, **more: Any) -> SampleConfig:
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([f"question {number}" for number in range(NUM)]))
    return SampleConfig(
        **{
            "output": folder / "ray.jsonl",
            "draw": DrawConfig(num_responses=num, max_tokens=6),
            "sampler": SamplerConfig(batch_size=4),
            **more,
        },
        prompts=str(prompts),
        model=model,
        workers=workers,
    )


def content(place) -> tuple[bytes, bytes]:
    return place.rows.read_bytes(), place.twin.read_bytes()


def undisturbed(folder: Path, notes: Path) -> tuple[bytes, bytes]:
    """What one process writes of the formula."""
    return content(sample(asked(folder, f"{notes}:", workers=EngineConfig(), output=folder / "one.jsonl")).place)


# --- the same as in one process ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_two")
def test_replies_are_those_of_one_process(tmp_path) -> None:
    folder = save_chat_model(tmp_path / "model")
    how = {"sampler": SamplerConfig(batch_size=5)}
    one = sample(asked(tmp_path, str(folder), workers=EngineConfig(), output=tmp_path / "one.jsonl", **how))
    # A worker of its own takes seconds to import torch; the tests with two have sources without it.
    found = sample(asked(tmp_path, str(folder), workers=EngineConfig(engine="ray"), **how))
    assert content(found.place) == content(one.place)
    assert found.counts == one.counts
    assert sample(asked(tmp_path, str(folder), workers=EngineConfig(), **how)).was_complete, "whoever drew them"


@pytest.mark.usefixtures("_two")
def test_scores_are_those_of_one_process_and_a_reply_that_cannot_be_scored_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reward_models_module, "REPLIES_AT_A_TIME", 2)
    folder = save_tiny(tmp_path / "model")
    rows = [
        {"id": f"row {k}", "prompt": f"question {k}", "responses": [f"answer {k}", "basil " * (200 if k == 3 else 1)]}
        for k in range(NUM)
    ]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, workers: EngineConfig):
        scoring = ScoringConfig(overlong="refuse")
        read = InputConfig(input=(samples,))
        return label(
            LabelConfig(model=str(folder), output=tmp_path / name, rows=read, scoring=scoring, workers=workers)
        )

    one, found = run("one.jsonl", EngineConfig()), run("ray.jsonl", ON_RAY)
    assert found.counts == one.counts
    assert found.counts["errors"] == 1
    wanted = list(read_gold_rows(one.place.rows, labelled=True))
    for row, other in zip(read_gold_rows(found.place.rows, labelled=True), wanted, strict=True):
        assert (row.id, row.gold_errors) == (other.id, other.gold_errors)
        scores = [(a, b) for a, b in zip(row.gold, other.gold, strict=True) if a is not None]
        assert [a for a, _ in scores] == pytest.approx([b for _, b in scores], abs=1e-4)


# --- what ends on the way ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_two")
def test_a_worker_that_is_killed_loses_nothing_and_doubles_nothing(tmp_path, notes) -> None:
    wanted = undisturbed(tmp_path, notes)
    (notes / "asked").unlink()
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        from rewardlab.gold.kept_results import Kept

        add = Kept.add
        patch.setattr(Kept, "add", lambda self, results: (keys.extend(key for key, _ in results), add(self, results)))
        found = sample(asked(tmp_path, f"{notes}:kills once"))
    assert content(found.place) == wanted
    assert found.counts["errors"] == 0
    assert (notes / "killed").exists()
    assert len(keys) == len(set(keys)) == NUM * 2
    workers = {line.split()[0] for line in (notes / "asked").read_text().splitlines()}
    assert len(list(notes.glob("pid-*"))) >= 1 + 1 + 2 + 1, "this process, the first worker, two, and one anew"
    assert str(os.getpid()) not in workers


@pytest.mark.usefixtures("_two")
def test_an_item_that_always_kills_its_worker_is_alone_in_having_no_result(tmp_path, notes, monkeypatch) -> None:
    rows = json.loads(undisturbed(tmp_path, notes)[1])
    rows[5]["response_2"] = None
    # `caplog` would keep what Ray logs, with its frames, and so the workers and their cores.
    told: list[str] = []
    monkeypatch.setattr(on_ray.logger, "warning", lambda text, *values: told.append(text % values))
    found = sample(asked(tmp_path, f"{notes}:kills always"))
    assert json.loads(found.place.twin.read_text()) == rows
    assert found.counts["errors"] == 1
    assert on_ray.LOST in found.examples
    assert told == ["Ray: workers ended over 1 parts; their 4 items are done one by one"]
    again = sample(asked(tmp_path, f"{notes}:", overwrite=True))
    assert content(again.place) == undisturbed(tmp_path, notes)


@pytest.mark.parametrize(
    ("what", "wanted", "why"),
    [("fails", {(5, 1)}, "ZeroDivisionError: planted"), ("refuses", {(k, 0) for k in range(NUM)}, "it is too long")],
)
@pytest.mark.usefixtures("_two")
def test_an_item_that_fails_in_a_worker_has_the_cause_in_its_place(tmp_path, notes, what, wanted, why) -> None:
    found = sample(asked(tmp_path, f"{notes}:{what}", max_error_fraction=1))
    errors = {
        (place, index): facts["error"]
        for place, row in enumerate(read_gold_rows(found.place.rows))
        for index, facts in enumerate(row.samples)
        if "error" in facts
    }
    assert errors == dict.fromkeys(wanted, why)
    assert found.counts["replies"] == NUM * 2 - len(wanted)


PROGRAM = """
import sys
from killing import end_while_appending
from rewardlab.cli import main
from rewardlab.gold import kept_results
from rewardlab.gold.sampling import run
from ray_workers import formula
run.samplers_of = formula
end_while_appending(kept_results, at=3, number=int(sys.argv[1]))
main(sys.argv[2:])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
@pytest.mark.usefixtures("_two")
def test_a_run_that_is_ended_leaves_no_processes_and_goes_on(tmp_path, short, notes, number, status) -> None:
    config = asked(tmp_path, f"{notes}:")
    words = ["gold", "sample", "--prompts", config.prompts, "--model", config.model, "--output", str(config.output)]
    words += ["--num-responses", "2", "--max-tokens", "6", "--batch-size", "4", "--engine", "ray", "--ray-workers", "1"]
    mark = f"{os.getpid()} {number.name}"
    environment = {**os.environ, MARK: mark, "RAY_TMPDIR": str(short), "PYTHONPATH": PATH, "RAY_worker_niceness": "0"}
    environment.pop("RAY_ADDRESS", None)
    ended = run_program(PROGRAM, [str(int(number)), *words], environment)
    assert ended.returncode == status, ended.stderr
    assert not alive(mark)
    assert not config.output.exists()
    lines = (tmp_path / ".ray.jsonl.partial" / "kept.jsonl").read_text().splitlines()
    assert 2 * 4 <= len(lines) < NUM * 2
    (notes / "asked").unlink()
    assert content(sample(config).place) == undisturbed(tmp_path, notes)
    parts = [line for line in (notes / "asked").read_text().splitlines() if not line.startswith(f"{os.getpid()} ")]
    assert len(parts) == NUM * 2 // 4 - 2, "only what was missing"


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "told"), [("no model", "no such model"), ("differs", "another model")])
@pytest.mark.usefixtures("_two")
def test_workers_without_the_model_are_told(tmp_path, notes, what, told) -> None:
    with pytest.raises(EndpointError, match=f"could not load it: .*{told}"):
        sample(asked(tmp_path, f"{notes}:{what}"))


def test_a_cluster_that_is_away_is_told(monkeypatch) -> None:
    def away(**_: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(on_ray, "import_optional", lambda *_, **__: type("Ray", (), {"init": staticmethod(away)}))
    with pytest.raises(EndpointError, match="--ray-address elsewhere:6379: the cluster cannot be used: nobody answers"):
        on_ray._connect(on_ray.import_optional("ray"), "elsewhere:6379")


def test_without_ray_it_says_how_to_get_it(tmp_path, notes, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r'--engine ray needs the package ray.*pip install "rewardlab\[ray\]"'):
        sample(asked(tmp_path, f"{notes}:"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ray_workers": 2}, "--ray-workers: only with --engine ray"),
        ({"ray_address": "auto"}, "--ray-address: only with --engine ray"),
        ({"engine": "ray", "ray_workers": 0}, "--ray-workers 0: must be at least 1"),
    ],
)
def test_settings_of_ray_are_refused_without_it(settings, told) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig(**settings)


def test_ray_loads_models_itself(tmp_path) -> None:
    with pytest.raises(ConfigError, match="with several --url"):
        SampleConfig(
            prompts="p", output=tmp_path / "o.jsonl", sampler=SamplerConfig(backend="http", url=("u",)), workers=ON_RAY
        )
    with pytest.raises(ConfigError, match="--processes: only with --engine process"):
        LabelConfig(model="m", output=tmp_path / "o.jsonl", scoring=ScoringConfig(processes=2), workers=ON_RAY)
