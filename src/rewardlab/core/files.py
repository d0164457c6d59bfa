"""Files: atomic writes, JSON and JSONL, hashes, and where a number came from.

Everything is written beside its target under a temporary name, flushed to the disk and then renamed, so a
crash or a full disk leaves the previous file or folder as it was.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, cast

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.terminal import brief

HASH_CHUNK_BYTES = 1 << 20
SUM = "sha256"
"""Entry of a JSON object that holds the hash of its other entries."""
UTF8 = "utf-8-sig"
"""UTF-8 with or without the byte order mark that some programs write."""
AT_FDCWD, EXCHANGE = -100, 2
"""Arguments of Linux's renameat2."""
PACKAGES = ("rewardlab", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "scipy")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Append `text` to a file by one write, and flush it to the disk."""
    content = text.encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        while content:  # more than once only on a full disk, whose error the next write then raises
            content = content[os.write(handle, content) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: object, *, indent: int | None = 2) -> str:
    """JSON text; NaN and infinity are refused, since no other reader accepts them."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def finite_or_none(value: float | None) -> float | None:
    """For JSON: null instead of NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


def jsonable(values: Mapping[str, object]) -> dict[str, object]:
    """With null in place of numbers that JSON does not have."""
    return {name: finite_or_none(value) if isinstance(value, float) else value for name, value in values.items()}


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, in one step."""
    write_text(path, _encodable(to_json(value)) + "\n")


def read_json(path: Path) -> object:
    """The JSON value in `path`; DataError names file and position if it is not JSON, or has a key twice."""
    try:
        return parse_json(path.read_text(encoding=UTF8))
    except DuplicateKeyError as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}). Fix or replace the file.") from error


class DuplicateKeyError(ValueError):
    """A key that an object has twice, of which readers would take one in silence."""


def parse_json(text: str) -> object:
    """The JSON value in a text. Raises DuplicateKeyError, RecursionError for one nested too deep, and ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_with_unique_keys)
    except DuplicateKeyError:
        raise DuplicateKeyError(_first_twice(text)) from None


def _first_twice(text: str) -> str:
    """Where valid JSON has a key twice in one object, in words: the parser does not say."""
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
                    f"line {text.count(chr(10), 0, match.start()) + 1}: the key {brief(key)} is there twice. Keep one."
                )
            keys[-1].add(key)
    raise AssertionError("the parser saw a key twice")


def write_summed_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace `path` by a JSON object that holds the SHA-256 of all else in it, for `read_summed_json`."""
    plain = json.loads(to_json(dict(values)))  # as it will be read back
    write_json(path, {**plain, SUM: sha256_json(plain)})


def read_summed_json(path: Path) -> dict[str, object]:
    """The object that `write_summed_json` wrote, without its sum.

    Raises DataError if it is not JSON, has no sum, or is not what was written.
    """
    values = read_json(path)
    if not isinstance(values, dict) or SUM not in values:
        raise DataError(f"{path}: it has no checksum. Replace the file.")
    found = values.pop(SUM)
    try:
        same = sha256_json(values) == found
    except ValueError:  # NaN and infinity, which are never written
        same = False
    if not same:
        raise DataError(f"{path}: it is not what was written. Replace the file.")
    return values


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Replace `path` by one JSON object a line, in one step."""
    write_text(path, "".join(_encodable(to_json(row, indent=None)) + "\n" for row in rows))


def _encodable(text: str) -> str:
    """JSON with half characters escaped, which no UTF-8 has: a file name that is not UTF-8 has some in Python."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, object) for every non-empty line of a .jsonl or .jsonl.gz file.

    Raises DataError naming file and line for a line that is not a JSON object.
    """
    for number, line in read_lines(path):
        yield number, parse_line(path, number, line)


def read_lines(path: Path, *, max_characters: int | None = None) -> Iterator[tuple[int, str]]:
    """(line number, line) for every non-empty line of a text file, which may be a .gz file.

    Of a line of more than `max_characters`, its end included, the first `max_characters` + 1 are given; all of it is at
    no time in memory. Raises DataError naming file and line where it is damaged or not UTF-8.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number, most = 0, -1 if max_characters is None else max_characters + 1
    try:
        with cast("IO[str]", opener(path, "rt", encoding=UTF8)) as file:
            while line := file.readline(most):
                number += 1
                if line.strip():
                    yield number, line
                while len(line) == most and not line.endswith("\n"):  # what is left of it
                    line = file.readline(most)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read after line {number} ({error}). Is it UTF-8 text, and complete?"
        ) from error


def parse_line(path: Path, number: int, line: str) -> dict[str, object]:
    """The JSON object in a line; DataError names file and line if it is none."""
    try:
        row = json.loads(line.strip(), object_pairs_hook=_with_unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}. "
            f"Fix or remove this line; each line must be one JSON object."
        ) from error
    except (ValueError, RecursionError) as error:  # a key twice, thousands of digits in a number, or of brackets
        raise DataError(f"{path}:{number}: cannot be read ({error}). Fix or remove this line.") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{number}: expected a JSON object, got {type(row).__name__}. "
            f'Each line must look like {{"prompt": …, "chosen": …, "rejected": …}}.'
        )
    return row


def _with_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON; DuplicateKeyError if a key stands in it twice, since nobody knows which value is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {twice!r} stands twice in one object")
    return found


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(value: object) -> str:
    """Hex SHA-256 of a value's canonical JSON: equal values hash equal, whatever the order of keys."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))


def fsync_folder(folder: Path) -> None:
    """Flush every file below `folder`, and the folder itself, to the disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends without an error.

    On any error the previous `target` stays as it was and the temporary folder is removed. Where Linux can swap two
    names, there is a whole `target` at every moment, whenever the process is killed. Elsewhere the previous one is
    moved aside before the rename, and a kill between the two leaves it as `.NAME.old-…`.
    """
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    previous = target.with_name(f".{target.name}.old-{os.getpid()}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_folder(temporary)
        if target.exists() and _exchange(temporary, target):
            return
        remove(previous)
        if target.exists():
            target.rename(previous)
        try:
            temporary.rename(target)
        except OSError:
            if previous.exists():
                previous.rename(target)
            raise
        remove(previous)
    finally:
        remove(temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    answer: int = rename(AT_FDCWD, os.fsencode(first.absolute()), AT_FDCWD, os.fsencode(second.absolute()), EXCHANGE)
    return answer == 0


def remove(path: Path) -> None:
    """Delete a file, a link or a folder; nothing happens if it is not there.

    A folder gets a temporary name first, so that none with half of its files is left by who is killed meanwhile.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if not re.search(r"\.(tmp|old)-\d+$", path.name):
        path = path.rename(path.with_name(f".{path.name}.tmp-{os.getpid()}"))
    shutil.rmtree(path)


def require_writable_folder(folder: Path, flag: str) -> None:
    """Create `folder` and prove that a file can be written in it, before any long work begins.

    Raises RewardlabError naming `flag` if not, also for a name that TensorBoard and JSON could not write down.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise RewardlabError(
            f"cannot write to {folder}: this name is not UTF-8. Choose another place with {flag}."
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".write-test", "")
        (folder / ".write-test").unlink(missing_ok=True)
    except OSError as error:
        raise RewardlabError(
            f"cannot write to {folder} ({error.strerror or error}). Choose another place with {flag}, "
            f"or make this one writable."
        ) from error


def provenance() -> dict[str, object]:
    """Code version, package versions and platform, for manifests."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    commit = _git("rev-parse", "HEAD")
    return {
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
        "packages": versions,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that this package runs from; None if it is installed, even inside another."""
    root = Path(__file__).resolve().parents[3]
    project = root / "pyproject.toml"
    if not ((root / ".git").exists() and project.is_file() and 'name = "rewardlab"' in project.read_text(UTF8)):
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where converted models are kept: $REWARDLAB_CACHE, else $XDG_CACHE_HOME/rewardlab, else ~/.cache/rewardlab."""
    if chosen := environment.get("REWARDLAB_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "rewardlab"
