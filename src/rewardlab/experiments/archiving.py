"""One file of a study, with the checksum of everything in it."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, BytesIO
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import replacing, sha256_file
from rewardlab.core.folders import remove_left_over, require_writable_folder
from rewardlab.core.spec import SPEC_FILE
from rewardlab.experiments.study import Study

SUMS: Final = "SHA256SUMS"
"""File of checksums in the archive, in the format of `sha256sum --check`."""
WEIGHTS: Final = ("best", "checkpoints")
"""Folders of a run that hold models, besides those of its steps."""
IN_MEMORY: Final = 1 << 26
"""Bytes of the largest file that is read as a whole."""
NEVER: Final = (".lock",)
OTHER_FORMATS: Final = (".7z", ".bz2", ".rar", ".tar", ".tbz2", ".txz", ".xz", ".zip", ".zst")
"""Endings of names that promise something else than a .tar.gz, so that programs would not open it."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """What was written."""

    path: Path
    num_files: int
    num_bytes: int
    sha256: str
    left_out: tuple[str, ...]
    """Folders of models that are not in it."""


def archive(study: Study, output: Path | None, *, weights: bool) -> Archived:
    """Write the archive. The same study gives the same bytes. Its runs may go on: the checksums are of what is in it.

    Raises ConfigError if the file is there, would lie in the study, or has a name that promises another format.
    """
    folder = study.folder.resolve()
    path = folder.with_name(f"{folder.name}.tar.gz") if output is None else output
    if path.exists():
        raise ConfigError(f"--output {path}: exists. Name another file, or move it away.")
    if path.suffix.lower() in OTHER_FORMATS:
        raise ConfigError(f"--output {path}: the archive is a .tar.gz. Let the name end so.")
    if path.resolve().is_relative_to(folder):
        raise ConfigError(f"--output {path}: lies in the study that is archived. Name a place outside.")
    require_writable_folder(path.parent, "--output")
    files = sorted(_files(folder, weights=weights))
    sums: dict[str, str] = {}
    remove_left_over(path)
    with (
        replacing(path) as raw,
        gzip.GzipFile(fileobj=raw, filename="", mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=True) as tar,
    ):
        for name in files:
            # What is gone by now, such as an old checkpoint, is not in the archive.
            with suppress(FileNotFoundError):
                sums[name] = _add_file(tar, folder / name, f"{folder.name}/{name}")
        _add(tar, f"{folder.name}/{SUMS}", "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode())
    left = () if weights else tuple(sorted({one for run in study.runs for one in _models(study.run_folder(run))}))
    return Archived(
        path=path, num_files=len(sums), num_bytes=path.stat().st_size, sha256=sha256_file(path), left_out=left
    )


def _files(folder: Path, *, weights: bool) -> Iterator[str]:
    """Yield the files of a study; those of folders that are links too, as of runs that lie on a larger disk."""
    whole = folder.resolve()
    for place, folders, files in os.walk(folder, followlinks=True):
        # What a link leads to within the study is there already; a link could also lead to the folder that it is in.
        folders[:] = [name for name in folders if not _leads_into(Path(place) / name, whole)]
        for path in (Path(place) / name for name in files):
            inside = path.relative_to(folder)
            if not path.is_file() or _leads_into(path, whole) or path.name in NEVER:
                continue
            if weights or not _is_of_model(inside):
                yield str(inside)


def _leads_into(path: Path, study: Path) -> bool:
    if not path.is_symlink():
        return False
    there = path.resolve()
    return there.is_relative_to(study) or study.is_relative_to(there) or path.parent.resolve().is_relative_to(there)


def _is_of_model(name: Path) -> bool:
    """Return whether a file of a study lies in the folder of a model, runs/ARM/seed_S/best/…, and is not what the
    report reads there: the step at which the model was saved."""
    if name.parts[4:] == (SPEC_FILE,):
        return False
    return len(name.parts) > 4 and name.parts[0] == "runs" and _holds_model(name.parts[3])


def _holds_model(part: str) -> bool:
    return part in WEIGHTS or part.startswith("step_")


def _models(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        yield from (path.name for path in folder.iterdir() if path.is_dir() and _holds_model(path.name))


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the entry without owner and time, so that the same files give the same bytes."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def _add_file(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Add a file and return the SHA-256 of what was added: a log may grow meanwhile, or be written anew.

    Small files, of which runs write some anew, are read as a whole first; weights and other large ones are streamed.
    """
    with path.open("rb") as file:
        entry = _plain(tar.gettarinfo(arcname=name, fileobj=file))
        hashed = _Hashed(file if entry.size > IN_MEMORY else BytesIO(file.read()))
        if isinstance(hashed.file, BytesIO):
            entry.size = len(hashed.file.getbuffer())
        tar.addfile(entry, hashed)
    return hashed.sha256.hexdigest()


class _Hashed(BufferedIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, file: BufferedReader | BytesIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        content = self.file.read(size)
        self.sha256.update(content)
        return content


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = _plain(tarfile.TarInfo(name))
    entry.size = len(content)
    tar.addfile(entry, BytesIO(content))
