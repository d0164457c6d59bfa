"""What `plan check` says about the models of a plan: missing here, missing on the hub, or refusing their settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from loopback import Answering, listening
from rewardlab.cli import main
from rewardlab.experiments.checking import check
from rewardlab.experiments.pitfalls import missing_on_hub
from rewardlab.experiments.plan import Run
from rewardlab.experiments.plan_file import read_plan
from study_folders import PLAN, edit, frozen_study, told, with_arm, write_plan


@pytest.mark.parametrize(
    ("model", "level", "said"),
    [
        ("./models/none", "error", "arm plain: no model at './models/none': there is no such folder"),
        ("~/models/none", "error", "no model at '~/models/none'"),
        ("a/b/c", "error", "no model at 'a/b/c'"),
        ("smollm2-135m", "error", "Did you mean 'smollm2-135m-instruct', the built-in model?"),
        ("./plan.yaml", "error", "is a file, and a model is a folder"),
        ("models/none", "warning", "the folder models has none of this name, so it is sought on the hub"),
        ("owner/none", "warning", ""),
    ],
)
def test_a_model_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, level: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    text = PLAN.replace("a-model-3b", model)
    told_of = {name: told(tmp_path, text, name) for name in ("error", "warning")}
    assert [said in one for one in told_of[level]] == ([True] if said else []), told_of


def test_models_are_looked_at_once_for_each_limit(tmp_path: Path) -> None:
    seen: list[Run] = []

    def look(run: Run) -> str:
        seen.append(run)
        return "too long" if run.settings["max_seq_len"] == 64 else ""

    problems = check(read_plan(write_plan(tmp_path, with_arm("max_seq_len: 64"))), look=look).problems
    assert [one.text for one in problems if one.level == "error"] == ["arm smooth: too long"]
    assert [run.arm for run in seen] == ["plain", "smooth"]


def test_a_limit_above_the_positions_of_a_model_is_refused_before_any_run(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    positions = json.loads((base_model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    plan = write_plan(tmp_path, PLAN.replace("a-model-3b", str(base_model)))
    main(["plan", "check", str(plan), "--set", f"max_seq_len={positions}"])
    capsys.readouterr()
    for tool, status in (("check", 1), ("freeze", 2)):
        with pytest.raises(SystemExit) as ended:
            main(["plan", tool, str(plan), "--set", f"max_seq_len={positions + 1}"])
        assert ended.value.code == status
        assert f"arm plain: max_seq_len {positions + 1} is above the {positions} positions" in capsys.readouterr().out
    # Nothing but the plan gives a length in a plan, whatever TRL's default is.
    with pytest.raises(SystemExit):
        main(["plan", "check", str(plan), "--set", "max_seq_len=1024", "--set", "compat=trl"])
    said = " ".join(capsys.readouterr().out.split())
    assert "max_seq_len 1024 is above the" in said
    assert "Where no length is given" not in said


MISSING = RepositoryNotFoundError("404", response=cast("Any", SimpleNamespace(headers={}, request=None)))


def asked_for(*names: str, by: str, **environment: str) -> list[str]:
    """What a process that has imported nothing else says of models, by the hub at an address."""
    code = f"from rewardlab.experiments.pitfalls import missing_on_hub; print(*map(missing_on_hub, {names}), sep='|')"
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": by, **environment}
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    return found.stdout.strip().split("|")


@pytest.mark.slow
def test_the_hub_is_asked_for_models_that_are_no_folders() -> None:
    asked: list[str] = []

    class Hub(Answering):
        def do_GET(self) -> None:
            asked.append(self.path)
            if "there" in self.path:
                self.answer(200, b'{"id": "owner/there"}')
                return
            self.send_response(404)
            self.send_header("X-Error-Code", "GatedRepo" if "gated" in self.path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with listening(Hub) as endpoint:
        said = asked_for("owner/typo", "owner/there", "owner/gated", by=endpoint)
        assert "the hub shows no model of this name" in said[0]
        assert said[1:] == ["", ""]
        assert asked_for("owner/typo", by=endpoint, HF_HUB_OFFLINE="1") == [""]
    assert [path.rpartition("/")[2] for path in asked if "/models/" in path] == ["typo", "there", "gated"]
    assert asked_for("owner/typo", by=endpoint) == [""], "nobody listens there any more"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("a-model-3b", MISSING, "the hub shows no model of this"),
        ("a--model", AssertionError("asked for a name with two dashes"), "no model of the hub can have this name"),
        ("folder/typo", MISSING, "the hub shows no model of this"),
        ("a-model-3b", None, ""),
        ("SmolLM2-135M-Instruct", AssertionError("asked for the built-in model"), ""),
    ],
)
def test_a_plan_with_a_model_that_is_nowhere_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    error: Any,
    said: str,
) -> None:
    questions: list[str] = []

    def model_info(api: HfApi, asked: str, revision: str | None, timeout: float) -> None:
        questions.append(asked)
        if error is not None:
            raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    missing_on_hub.cache_clear()
    plan = write_plan(tmp_path, with_arm("max_seq_len: 64").replace("a-model-3b", name))
    for tool, status in (("check", 1), ("freeze", 2)):
        with pytest.raises(SystemExit) if said else nullcontext() as ended:
            main(["plan", tool, str(plan)])
        assert not said or (ended is not None and ended.value.code == status)
        out = " ".join(capsys.readouterr().out.split())
        assert (f"no model at {name!r}: there is no such folder, and {said}" in out) == bool(said)
    assert questions == ([] if isinstance(error, AssertionError) else [name]), "once for each model"
    missing_on_hub.cache_clear()


def test_a_study_is_not_amended_to_a_model_that_is_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = frozen_study(tmp_path)
    edit(study.folder, "a-model-3b", "a--model")
    with pytest.raises(SystemExit) as ended:
        main(["plan", "amend", str(study.folder), "--reason", "another model", "--seen", "nothing-run"])
    assert ended.value.code == 2
    out = " ".join("".join(capsys.readouterr()).split())
    assert "the plan is not amended: arm plain: no model at 'a--model'" in out
