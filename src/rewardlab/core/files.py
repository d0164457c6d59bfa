"""Read and write files: atomic replacement, JSON and JSON Lines, hashes, and provenance for manifests.

Everything is written beside its target under a temporary name, flushed to the disk and then renamed, so a
crash or a full disk leaves the previous file as it was. Folders are replaced in core/folders.py.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from io import BufferedWriter
from pathlib import Path
from typing import TypeGuard

from rewardlab.core.errors import ConfigError, DataError, naming
from rewardlab.core.terminal import brief, visible
from rewardlab.core.together import present
from rewardlab.core.undecodable import about_bytes, misnamed
from rewardlab.core.zst import DamagedZstError, open_zst

OF_MODELS = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")
"""Endings of the files of a model that decide what is trained; others, such as a card, may change."""
HASH_CHUNK_BYTES = 1 << 20
SUM = "sha256"
"""The key of a JSON object under which the hash of its other entries is stored."""
PREFERENCE_LINE = '{"prompt": …, "chosen": …, "rejected": …}'
"""An example of a line of a file of preferences."""
UTF8 = "utf-8-sig"
"""The codec that reads UTF-8 with or without the byte order mark that some programs write."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, DamagedZstError)
"""What compressed files raise that are damaged or not whole."""
PACKAGES = ("rewardlab", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "scipy")


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in one step: readers see the old file or the new one, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """Yield a file of bytes that replaces `path` when the block ends without an error.

    Raises OSError, which names `path`, if the disk is full.
    """
    # The process id keeps two processes that write the same file from sharing one temporary file.
    temporary, waiting = path.with_name(f".{path.name}.tmp-{os.getpid()}"), present()
    waits = False
    try:
        with naming(path, temporary=temporary), temporary.open("wb") as file:
            yield file
            file.flush()
            # Without the flush, a power cut after the rename can leave an empty file under the final name.
            os.fsync(file.fileno())
        if waiting is None:
            temporary.replace(path)
        else:
            waiting.add(path, temporary)
            waits = True
    finally:
        if not waits:
            temporary.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Append `text` to an existing file, normally by one write call, and flush it to the disk."""
    with naming(path), _open_to_write(path, os.O_APPEND) as handle:
        _write_flushed(handle, text.encode())


def replace_end(path: Path, text: str, *, at: int) -> None:
    """Replace what an existing file has from byte `at` on, as `append_text` appends."""
    content = text.encode()
    with naming(path), _open_to_write(path) as handle:
        os.lseek(handle, at, os.SEEK_SET)
        _write_flushed(handle, content)
        os.ftruncate(handle, at + len(content))


@contextmanager
def _open_to_write(path: Path, flags: int = 0) -> Iterator[int]:
    handle = os.open(path, os.O_WRONLY | flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _write_flushed(handle: int, content: bytes) -> None:
    # A short write happens on a full disk. The next write then raises the error that says so.
    while content:
        content = content[os.write(handle, content) :]
    os.fsync(handle)


def to_json(value: object, *, indent: int | None = 2) -> str:
    """Return `value` as JSON text.

    Raises ValueError for NaN and infinity, which are not JSON and which other readers refuse.
    """
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def finite_or_none(value: float | None) -> float | None:
    """Return `value`, or None (null in JSON) if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def write_json(path: Path, value: object) -> None:
    """Replace the content of `path` by `value` as JSON, in one step. Raises ValueError as `to_json` does."""
    write_text(path, encodable(to_json(value)) + "\n")


def read_json(path: Path) -> object:
    """Return the JSON value in `path`.

    Raises DataError, naming file and position, if it is not JSON, if an object has the same key twice, and for a named
    pipe. A pipe that a shell opened for this process, as `<(…)` does, is read.
    """
    if not os.path.realpath(path).startswith(("/dev/fd/", "/proc/")):
        require_no_pipe(path)
    try:
        return parse_json(path.read_text(encoding=UTF8))
    except DuplicateKeyError as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}). Fix or replace the file.") from error


class DuplicateKeyError(ValueError):
    """An object has the same key twice. Most readers would silently take one of the two values."""


def parse_json(text: str) -> object:
    """Return the JSON value in `text`.

    Raises DuplicateKeyError if an object has the same key twice, RecursionError for nesting that is too deep, and
    ValueError for anything else that is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_unique_keys)
    except DuplicateKeyError:
        raise DuplicateKeyError(_first_twice(text)) from None


def _first_twice(text: str) -> str:
    """Return a sentence that names the line and the key which valid JSON has twice in one object."""
    # The parser's hook knows the key but not its position, so the text is scanned again for the message.
    keys: list[set[str]] = []
    for match in re.finditer(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{\[]|[}\]]', text):
        if match[0] in ("{", "["):
            keys.append(set())
        elif match[0] in ("}", "]"):
            keys.pop()
        elif match[2]:
            key = json.loads(match[1])
            if key in keys[-1]:
                return (
                    f"line {text.count(chr(10), 0, match.start()) + 1}: the key {brief(key)} appears twice. Keep one."
                )
            keys[-1].add(key)
    raise AssertionError("the parser saw a key twice")


def write_summed_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace `path` by a JSON object that holds the SHA-256 of its other entries, for `read_summed_json`."""
    # The hash is taken over the values as they will be read back: tuples become lists, and keys become text.
    plain = json.loads(to_json(dict(values)))
    write_json(path, {**plain, SUM: sha256_json(plain)})


def read_summed_json(path: Path) -> dict[str, object]:
    """Return the object that `write_summed_json` wrote, without its checksum.

    Raises DataError if the file is not JSON, has no checksum, or was changed after it was written.
    """
    values = read_json(path)
    if not isinstance(values, dict) or SUM not in values:
        raise DataError(f"{path}: it has no checksum. Replace the file.")
    checksum = values.pop(SUM)
    try:
        same = sha256_json(values) == checksum
    except ValueError:
        # The file holds NaN or infinity, which `write_summed_json` never writes.
        same = False
    if not same:
        raise DataError(f"{path}: its checksum does not match its content. Replace the file.")
    return values


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replace the content of `path` by one JSON object a line, in one step. Raises ValueError as `to_json` does."""
    write_text(path, "".join(encodable(to_json(row, indent=None)) + "\n" for row in rows))


def keep_report(text: str, folder: Path) -> None:
    """Write a report as it is printed to `report.txt` in a folder."""
    write_text(folder / "report.txt", visible(text, lines=True).lstrip() + "\n")


def encodable(text: str) -> str:
    """Return JSON text in which lone surrogates are escaped, so that it can be written as UTF-8.

    Python represents the bytes of a file name that is not UTF-8 as lone surrogates, which UTF-8 cannot encode.
    """
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number, object) for every non-empty line of a .jsonl file, which may be compressed (.gz, .zst).

    Raises DataError, naming file and line, for a line that is not a JSON object or cannot be read.
    """
    for number, line in read_lines(path):
        yield number, parse_line(path, number, line)


def read_lines(path: Path, *, max_characters: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) for every non-empty line of a text file, which may be compressed (.gz, .zst).

    Of a line longer than `max_characters`, its line end included, only the first `max_characters` + 1 characters are
    yielded, and no more are held in memory.

    Raises DataError, naming file and line, where the file is damaged or not UTF-8, and without the package that .zst
    needs.
    """
    number, most = 0, -1 if max_characters is None else max_characters + 1
    try:
        with _open_text(path) as file:
            while line := file.readline(most):
                number += 1
                if line.strip():
                    yield number, line
                # Skip the rest of a line that was cut, so that the next line read is the next row.
                while len(line) == most and not line.endswith("\n"):
                    line = file.readline(most)
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except DAMAGED as error:
        if number == 0 and (why := misnamed(path)):
            raise DataError(f"{path}: {why}") from error
        raise DataError(
            f"{path}: cannot be read after line {number} ({error}). Is it UTF-8 text, and complete?"
        ) from error


def not_utf8(path: Path) -> DataError:
    """Return the error for a file that is not UTF-8, with line, byte, and what to do."""
    try:
        with _open_text(path) as file:
            line, why = about_bytes(file.buffer)
    except DAMAGED as error:
        return DataError(f"{path}: cannot be read ({error}). Is it UTF-8 text, and complete?")
    return DataError(f"{path}:{line}: not UTF-8 text: {why}")


def _open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file for reading, which may be compressed. Raises DataError without the package that .zst needs."""
    if path.suffix == ".zst":
        return open_zst(path, UTF8)
    return gzip.open(path, "rt", encoding=UTF8) if path.suffix == ".gz" else path.open(encoding=UTF8)


def parse_line(path: Path, number: int, line: str, *, like: str = PREFERENCE_LINE) -> dict[str, object]:
    """Return the JSON object in a line. Raises DataError, naming file and line, if it is not one; `like` is an example
    of a line for its message."""
    listed = " If the file is one list of rows, name it .json." if number == 1 and line.lstrip()[:1] == "[" else ""
    try:
        row = json.loads(line.strip(), object_pairs_hook=_with_unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}. "
            f"Fix or remove this line; each line must be one JSON object.{listed}"
        ) from error
    except (ValueError, RecursionError) as error:
        # The same key twice, a number of thousands of digits, or thousands of nested brackets.
        raise DataError(f"{path}:{number}: cannot be read ({error}). Fix or remove this line.") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{number}: expected a JSON object, got {type(row).__name__}. Each line must look like "
            f"{like}.{listed}"
        )
    return row


def to_float(value: object) -> float:
    """Return a number, or a text that holds one as in CSV, as a float; NaN for anything else, also for booleans."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that a float can hold; texts and booleans do not count."""
    return not isinstance(value, str) and math.isfinite(to_float(value))


def _with_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raises DuplicateKeyError if it has the same key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {twice!r} appears twice in one object")
    return values


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes. Raises DataError for a pipe."""
    require_no_pipe(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Return the hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(value: object) -> str:
    """Return the hex SHA-256 of a value's canonical JSON, in which the order of keys does not matter.

    Raises ValueError for NaN and infinity.
    """
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))


def require_no_pipe(path: Path) -> None:
    """Raise DataError for a named pipe, whose reader would wait for ever."""
    if path.is_fifo():
        raise DataError(f"{path}: it is a pipe, not a file. Move it away, or name another place.")


def absent(path: Path) -> str:
    """Return in words why a path that is not a regular file cannot be read: a pipe, a folder, or nothing there."""
    if path.is_dir():
        return "is a folder"
    if path.is_fifo() or str(path) in ("-", "/dev/stdin"):
        return "no pipe is read, nor standard input. Write what comes through it to a file, and name that"
    return "no such file"


def provenance() -> dict[str, object]:
    """Return code version, package versions, platform and command line, for manifests."""
    commit, is_dirty = _version_of_code(Path(__file__).resolve().parents[3])
    return {
        "git_commit": commit,
        "git_dirty": is_dirty,
        "packages": versions_of(PACKAGES),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None for one that is not installed."""
    return {name: _version_of(name) for name in packages}


# Both are determined only once per process, when they are first needed: a long run saves its model often, and a commit
# that is made meanwhile is not the code that trains it.
@cache
def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _version_of_code(root: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout at `root`, and whether files differ from it; None for what git does not say."""
    # A copy installed in an environment inside another project's checkout must not report that project's commit.
    project = root / "pyproject.toml"
    if not ((root / ".git").exists() and project.is_file() and 'name = "rewardlab"' in project.read_text(UTF8)):
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = commit and _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git in `root`; None where it fails or takes more than ten seconds."""
    command = ["git", "-C", str(root), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def at_home(name: str | Path) -> Path:
    """Return a path whose `~` at the beginning is a home folder; one that names nobody's home stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the cache folder: $REWARDLAB_CACHE, else $XDG_CACHE_HOME/rewardlab, else ~/.cache/rewardlab.

    Raises ConfigError where the last is wanted and this user has no home folder.
    """
    if chosen := environment.get("REWARDLAB_CACHE"):
        return at_home(chosen).absolute()
    base = at_home(environment.get("XDG_CACHE_HOME") or "~/.cache")
    if base.parts[0] == "~":
        raise ConfigError("this user has no home folder for prepared data. Name one in REWARDLAB_CACHE, or set HOME.")
    return base.absolute() / "rewardlab"
