"""Write rows to a file that appears whole or not at all, in the form that its ending asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, replacing, sha256_file
from rewardlab.core.folders import remove_left_over, removed_at_end
from rewardlab.core.lock import only_process
from rewardlab.core.optional import import_optional
from rewardlab.core.signals import IS_WHOLE
from rewardlab.core.terminal import visible
from rewardlab.curation.rewriting import ENDINGS as LINES
from rewardlab.curation.rewriting import ending_of, replacing_lines, require_package

ENDINGS: Final = (*LINES, ".parquet")
BATCH_ROWS: Final = 1024
"""Rows of a Parquet file that are held in memory."""
MANIFEST: Final = "manifest.json"
"""The file that says which tool wrote a folder, and from which data."""
TOOLS: Final = "rewardlab data "
"""How the names of the tools begin in their manifests."""
Columns = Callable[[], Any]
"""Returns the `pyarrow.Schema` of the rows; called only for Parquet, since pyarrow may be missing otherwise."""


def own_columns() -> Any:
    """Return the `pyarrow.Schema` of the project's own rows."""
    arrow = import_optional("pyarrow", "an --output in Parquet")
    number, text = arrow.float64(), arrow.string()
    index = arrow.int32()
    judgement = {"first": index, "second": index, "label": number, "weight": number, "margin": number}
    judgement |= {"strength": number, "annotator": text}
    messages = _messages(arrow)
    return arrow.schema(
        {
            "id": text,
            "source": text,
            "prompt": messages,
            "replies": arrow.list_(messages),
            "comparisons": arrow.list_(arrow.struct(judgement)),
            "ranking": arrow.list_(index),
        }
    )


def pair_columns(*, implicit: bool, with_margin: bool) -> Any:
    """Return the `pyarrow.Schema` of TRL's pairs."""
    arrow = import_optional("pyarrow", "an --output in Parquet")
    messages = _messages(arrow)
    names = ("chosen", "rejected") if implicit else ("prompt", "chosen", "rejected")
    margin = {"margin": arrow.float64()} if with_margin else {}
    return arrow.schema({"id": arrow.string(), "source": arrow.string(), **dict.fromkeys(names, messages), **margin})


def _messages(arrow: Any) -> Any:
    return arrow.list_(arrow.struct({"role": arrow.string(), "content": arrow.string()}))


def require_output(path: Path, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Raise ConfigError unless `path` may be written.

    It must have a known ending, must not be one of the datasets that are read, and must not exist without `overwrite`.
    In the place of its manifest there must be nothing but one.

    Raises DataError if the package that the ending needs is missing.
    """
    if ending_of(path, ENDINGS) is None:
        raise ConfigError(f"--output {path}: unknown ending. Wanted one of {', '.join(ENDINGS)}.")
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a folder. Name a file.")
    real = os.path.realpath(path)
    if any(os.path.realpath(one) == real for one in inputs):
        raise ConfigError(f"--output {path}: is one of the datasets that are read. Name another file.")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output {path}: exists. Name another file, or replace it with --overwrite.")
    manifest = manifest_beside(path)
    if os.path.lexists(manifest) and not str(_told_by(manifest).get("tool", "")).startswith(TOOLS):
        raise ConfigError(
            f"--output {path}: its manifest goes to {manifest}, which is there and which no `{TOOLS}…` wrote. Move "
            f"that away, or name another file."
        )
    require_package(path, "an --output in .zst")
    if path.suffix == ".parquet":
        import_optional("pyarrow.parquet", "an --output in Parquet")


def require_output_folder(folder: Path, inputs: Iterable[Path], *, tool: str, what: str, overwrite: bool) -> None:
    """Raise ConfigError unless the folder of `--output-dir` may be written.

    It must not be a file, nor hold a dataset that is read or files that `tool` did not write. Without `overwrite` it
    must not hold an earlier output of the tool either, which `what` names in the message.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"--output-dir {folder}: is a file. Name a folder.")
    there = {path.name for path in folder.iterdir()}
    if not there:
        return
    if any(folder.resolve() in path.resolve().parents for path in inputs):
        raise ConfigError(f"--output-dir {folder}: holds a dataset that is read. Name another folder.")
    if foreign := sorted(there - _own_files(folder, tool)):
        named = f"{foreign[0]}{f' and {len(foreign) - 1} more' if foreign[1:] else ''}"
        raise ConfigError(
            f"--output-dir {folder}: holds files that `{tool}` did not write ({visible(named)}). Move them away, or "
            f"name another folder."
        )
    if not overwrite:
        raise ConfigError(
            f"--output-dir {folder}: holds {what}. Name another folder, or replace them with --overwrite. {IS_WHOLE}"
        )


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """Keep other processes from a folder that is to be written, and remove what a killed one left behind.

    Raises ConfigError if another one is at work.
    """
    # The folder itself is replaced as a whole, so the lock lies beside it.
    work = target.with_name(f".{target.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ended, only_process(work, "--output-dir"):
        remove_left_over(work, alone=True)
        remove_left_over(target, alone=True)
        try:
            yield
        finally:
            removed_at_end(work, ended)


def require_place(path: Path, flag: str) -> None:
    """Raise ConfigError, naming `flag`, if the folder in which `path` would be made lets nothing be written.

    Called before any data are read. It makes no folder, so that none is left where the data cannot be read.
    """
    above = next((folder for folder in path.absolute().parents if folder.exists()), path.absolute())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot write to {above} (Permission denied). Choose another place with {flag}, or make this one writable."
        )


def _own_files(folder: Path, tool: str) -> set[str]:
    """Return the names of the files that an earlier call of a tool wrote into a folder, by its manifest."""
    told = _told_by(folder / MANIFEST)
    if told.get("tool") != tool:
        return set()
    outputs = told.get("outputs")
    files = outputs if isinstance(outputs, list) else []
    return {MANIFEST, *(str(one["file"]) for one in files if isinstance(one, dict) and "file" in one)}


def _told_by(manifest: Path) -> dict[str, Any]:
    """Return what a manifest says; nothing if it is none."""
    try:
        told = read_json(manifest) if manifest.is_file() else None
    except DataError:
        return {}
    return told if isinstance(told, dict) else {}


class RowFile:
    """Takes rows as lines of JSON."""

    def __init__(self, sink: Any, rows: Any) -> None:
        self._sink = sink
        self._rows = rows
        """The writer of Parquet; None for lines."""
        self._waiting: list[dict[str, Any]] = []
        self.num_rows = 0

    def write(self, line: str) -> None:
        """Write a row."""
        self.num_rows += 1
        if self._rows is None:
            self._sink.write(f"{line}\n".encode())
            return
        self._waiting.append(json.loads(line))
        if len(self._waiting) == BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows of Parquet that are still held in memory."""
        if self._waiting:
            import pyarrow

            self._rows.write_table(pyarrow.Table.from_pylist(self._waiting, schema=self._rows.schema))
            self._waiting = []


@contextmanager
def writing(path: Path, columns: Columns) -> Iterator[RowFile]:
    """Yield a `RowFile` for a file that replaces `path` when the block ends without an error.

    The same rows give the same bytes. Raises OSError if the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        with replacing_lines(path) as sink:
            yield RowFile(sink, None)
        return
    parquet = import_optional("pyarrow.parquet", "an --output in Parquet")
    remove_left_over(path)
    with replacing(path) as raw, parquet.ParquetWriter(raw, columns(), compression="zstd") as rows:
        file = RowFile(None, rows)
        yield file
        file.flush()


def facts_of(path: Path, num_rows: int, *, now: Path | None = None) -> dict[str, object]:
    """Return the entry of a manifest about a file that was written, and perhaps has another name `now`."""
    read = path if now is None else now
    return {"file": path.name, "rows": num_rows, "bytes": read.stat().st_size, "sha256": sha256_file(read)}


def manifest_beside(path: Path) -> Path:
    """Return the path of the manifest of a file."""
    return path.with_name(f"{path.name}.manifest.json")
