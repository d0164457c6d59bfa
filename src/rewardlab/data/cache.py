"""Prepared datasets kept on disk under a hash of all that they depend on, and written whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import remove, replacing_folder, sha256_file, sha256_json, sha256_text
from rewardlab.data.chat import Renderer
from rewardlab.data.formats import Rules
from rewardlab.data.readers import Source
from rewardlab.data.store import FORMAT, DamagedError, TokenStore, open_store

logger = logging.getLogger("rewardlab")
PACKAGES = ("transformers", "tokenizers", "jinja2", "numpy")
"""Their versions are part of a key: templates, tokenizers and draws may change with them."""
BENEATH = ("core/files.py", "core/spec.py", "core/types.py")
"""Modules below this room that decide prompt keys, what a line or a row is, and what a renderer's settings mean."""
READING = ("incomplete_pairs", "ties", "max_replies", "margin_column", "strength_as")
"""Settings that decide what becomes of a row."""


def key_of(
    source: Source, fingerprint: str, *, rules: Rules, limit: int | None, renderer: Renderer, overlong: str
) -> str:
    """The name of a prepared dataset: it changes with the content, with what is done to it and with the code that does.

    What only a run decides is no part of it: weights, what is held out, the share of rows that may be dropped.
    """
    drawn = limit is not None or rules.reading.max_replies is not None
    return sha256_json(
        {
            "format": FORMAT,
            "code": _hash_of_code(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "dataset": {"fingerprint": fingerprint, "name": source.name, "label": source.label},
            "suffix": "".join(source.path.suffixes[-2:]) if source.path else None,
            "reading": {name: getattr(rules.reading, name) for name in READING},
            "bare": rules.bare,
            "kwise_loss": rules.kwise_loss,
            "limit": limit,
            "seed": rules.seed if drawn else None,
            "renderer": asdict(renderer.spec),
            "tokenizer": hash_of_tokenizer(renderer.tokenizer),
            "overlong": overlong,
        }
    )[:32]


def hash_of_tokenizer(tokenizer: Any) -> str:
    """A hash of everything that decides the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        split = getattr(tokenizer, "split_special_tokens", False)
        names = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())  # for the template
        return sha256_text(f"{type(tokenizer).__name__} {names} {split} {backend.to_str()}")
    with tempfile.TemporaryDirectory() as scratch:  # a tokenizer in Python: what it would save
        tokenizer.save_pretrained(scratch)
        files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        return sha256_json([type(tokenizer).__name__, *([path.name, sha256_file(path)] for path in files)])


def _hash_of_code(package: Path = Path(__file__).parents[1]) -> str:
    """Of the modules of this room and those beneath it, so that no entry outlives the rules that it was made by."""
    digest = hashlib.sha256()
    for path in [*sorted(package.glob("data/*.py")), *(package / name for name in BENEATH)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Cache:
    """Stores in the folders `<folder>/<key>`; without a folder, each lives as long as the process that made it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find(self, key: str) -> TokenStore | None:
        """The store with this key, if there is one; a damaged one is said and left for `make` to replace."""
        if self.folder is None or not (self.folder / key).is_dir():
            return None
        try:
            return open_store(self.folder / key)
        except DamagedError as damage:
            logger.warning("cache: %s is damaged (%s); it is prepared again", self.folder / key, damage)
            return None

    def make(self, key: str, write: Callable[[Path], None]) -> tuple[TokenStore, bool]:
        """(the store with this key, whether this call made it): of several processes, one writes, the others wait.

        `write` fills an empty folder, which takes its place only when it is whole.

        Raises RewardlabError if there is no room, and what `write` raises.
        """
        try:
            if self.folder is None:
                return self._make_unkept(write), True
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / f".{key}.lock", self.folder / key):
                if (store := self.find(key)) is not None:
                    return store, False
                for left_over in self.folder.glob(f".{key}.tmp-*"):  # of processes that were killed: they hold no lock
                    remove(left_over)
                with replacing_folder(self.folder / key) as folder:
                    write(folder)
                return open_store(self.folder / key), True
        except OSError as error:
            raise RewardlabError(
                f"cannot keep prepared data in {self.folder or tempfile.gettempdir()} ({error.strerror or error}). "
                f"Make room, choose another folder with --cache-dir, or use --cache-dir none."
            ) from error

    def _make_unkept(self, write: Callable[[Path], None]) -> TokenStore:
        folder = Path(tempfile.mkdtemp(prefix="rewardlab-"))
        try:
            write(folder)
            return open_store(folder)
        finally:
            shutil.rmtree(folder)  # its maps keep the content until they are gone, however the process ends


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Hold a lock file, saying so where that means waiting."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("cache: another process prepares %s; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
