"""The files of a command that judges, ended while they get their names: the next one knows them for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from killing import EndedError
from rewardlab.report import outputs
from rewardlab.report.document import Document

TABLES = {"arms.csv": "a,b\n", "seeds.csv": "c,d\n"}


def write(folder: Path) -> list[Path]:
    outputs.claim(folder, "found", "rewardlab judge", overwrite=False, also=[*TABLES])
    document = Document(title="Found", made_by="A test.", parts=())
    return outputs.write(folder, "found", document, {"made_by": "rewardlab judge"}, TABLES)


@pytest.mark.parametrize("at", range(5))
def test_ended_between_two_of_its_files_the_same_command_writes_all(tmp_path: Path, at: int) -> None:
    replace, count = Path.replace, 0

    def ending(path: Path, target: Path) -> Path:
        nonlocal count
        if count == at:
            raise EndedError
        count += 1
        return replace(path, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "replace", ending)
        with pytest.raises(EndedError):
            write(tmp_path)
    assert len(list(tmp_path.iterdir())) == at
    wanted = ["found.json", "found.md", "found.html", *TABLES]
    assert [path.name for path in write(tmp_path)] == wanted
    assert {path.name for path in tmp_path.iterdir()} == {*wanted}
