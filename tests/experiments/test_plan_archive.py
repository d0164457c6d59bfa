"""The archive of a study: everything but models, with checksums, whatever goes on meanwhile."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from killing import abandon, ended_process
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file
from rewardlab.experiments import archiving
from rewardlab.experiments.archiving import SUMS, archive
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import open_study
from study_folders import finished_study, frozen_study

UNPACKED = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11 has the filter from its fourth release on."""


@pytest.mark.slow
def test_an_archive_holds_everything_but_models_with_checksums_and_is_the_same_each_time(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    for run in study.runs:
        (study.run_folder(run) / "best" / "model.safetensors").write_bytes(b"weights")
    first = archive(study, tmp_path / "one.tar.gz", weights=False)
    again = archive(study, tmp_path / "two.tar.gz", weights=False)
    assert first.sha256 == again.sha256
    assert first.left_out == ("best",)
    with tarfile.open(first.path) as tar:
        names = tar.getnames()
        sums = tar.extractfile(f"study/{SUMS}")
        assert sums is not None
        lines = sums.read().decode().splitlines()
        tar.extractall(tmp_path / "out", **UNPACKED)
    assert {Path(name).name for name in names if "/best/" in name} == {"reward_spec.json"}, "by which it is reported on"
    assert {line.split("  ")[1] for line in lines} == {name.removeprefix("study/") for name in names} - {SUMS}
    assert all(
        sha256_file(tmp_path / "out/study" / name) == digest for digest, name in (one.split("  ") for one in lines)
    )
    whole = archive(study, tmp_path / "three.tar.gz", weights=True)
    assert whole.num_files > first.num_files
    with pytest.raises(ConfigError, match="exists"):
        archive(study, first.path, weights=False)
    with pytest.raises(ConfigError, match="lies in the study"):
        archive(study, study.folder / "a.tar.gz", weights=False)
    told = [text_report(summarise(one)) for one in (study, open_study(tmp_path / "out/study"))]
    assert told[0] == told[1], "it is reported on where it is unpacked"
    assert "chosen step" in told[0]


def test_an_archive_is_not_given_the_name_of_another_format(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.ZIP: the archive is a \.tar\.gz"):
        archive(study, tmp_path / "a.ZIP", weights=False)
    assert archive(study, tmp_path / "kept.2026", weights=False).path.is_file(), "the name is a matter of taste"


def test_an_archive_of_a_study_whose_runs_go_on_has_the_checksums_of_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, plain = frozen_study(tmp_path), archiving._plain
    log, gone, anew = (study.folder / name for name in ("logs/plain.log", "runs/old", "runs/anew"))
    for path in (log, gone, anew):
        path.parent.mkdir(exist_ok=True)
        path.write_text("one line and one more\n", encoding="utf-8")

    def goes_on(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        with log.open("a", encoding="utf-8") as file:
            file.write("another line\n")
        anew.write_text("anew\n", encoding="utf-8")
        gone.unlink(missing_ok=True)
        return plain(entry)

    monkeypatch.setattr(archiving, "_plain", goes_on)
    made = archive(study, tmp_path / "one.tar.gz", weights=False)
    with tarfile.open(made.path) as tar:
        tar.extractall(tmp_path / "out", **UNPACKED)
    lines = (tmp_path / "out/study" / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert {"logs/plain.log", "log.jsonl"} <= sums.keys()
    assert "runs/old" not in sums
    assert all(sha256_file(tmp_path / "out/study" / name) == digest for name, digest in sums.items())


@pytest.mark.slow
def test_an_archive_holds_runs_that_lie_on_another_disk(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    plain = archive(study, tmp_path / "one.tar.gz", weights=False)
    (study.folder / "runs").rename(tmp_path / "disk")
    (study.folder / "runs").symlink_to(tmp_path / "disk")
    (study.folder / "logs").mkdir(exist_ok=True)
    for name, there in {"newest": study.folder / "records", "around": study.folder, "gone": tmp_path / "none"}.items():
        (study.folder / "logs" / name).symlink_to(there)
    (tmp_path / "disk" / "again").symlink_to(tmp_path / "disk")
    linked = archive(open_study(study.folder), tmp_path / "two.tar.gz", weights=False)
    assert (linked.sha256, linked.left_out) == (plain.sha256, plain.left_out)


def test_an_archive_that_a_killed_process_began_goes_when_it_is_made(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    half = tmp_path / f".a.tar.gz.tmp-{ended_process()}"
    half.write_bytes(b"half of it")
    abandon(half)
    archive(study, tmp_path / "a.tar.gz", weights=False)
    assert not list(tmp_path.glob(".a.*"))


def test_an_archive_is_written_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name by which the next one finds what a kill left."""
    seen: list[str] = []
    add = archiving._add

    def looking(*given: Any) -> None:
        seen.extend(path.name for path in tmp_path.glob(".a.*"))
        add(*given)

    monkeypatch.setattr(archiving, "_add", looking)
    archive(frozen_study(tmp_path), tmp_path / "a.tar.gz", weights=False)
    assert {*seen} == {f".a.tar.gz.tmp-{os.getpid()}"}
