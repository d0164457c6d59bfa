"""Cache of prepared datasets on disk, keyed by a hash of everything that they depend on.

Tokenising a large dataset takes minutes, and most runs prepare the same one again. A stale entry would train a model on
the wrong tokens without any sign of it, so the key covers content, settings, tokenizer, package versions and our own
code: too many misses cost time, one false hit costs a result. An entry is written as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from rewardlab.core.errors import NO_ROOM, RewardlabError
from rewardlab.core.files import sha256_file, sha256_json, sha256_text
from rewardlab.core.folders import remove, replacing_folder
from rewardlab.core.signals import hears_of_end
from rewardlab.data.chat import Renderer
from rewardlab.data.config import MAPPED_COLUMNS
from rewardlab.data.finding import Source
from rewardlab.data.judgements import Rules
from rewardlab.data.store import FORMAT, DamagedError, TokenStore, open_store

logger = logging.getLogger("rewardlab")
PACKAGES = ("transformers", "tokenizers", "jinja2", "numpy")
"""Packages whose versions are part of a key: templates, tokenizers and random draws may change with them."""
BENEATH = ("core/files.py", "core/spec.py", "core/types.py", "core/zst.py")
"""Modules outside `data` whose code is part of a key: they decide prompt keys, what a line or a row is, and what the
settings of a renderer mean."""
ABANDONED_S: Final = 24 * 3600.0
"""A process that prepares data writes more often than this, even one that was stopped for a night."""
LEFT_OVER: Final = re.compile(r"\.[0-9a-f]{32}\.tmp-[0-9]+")
"""Names of the temporary folders of keys."""
READING = (
    *("incomplete_pairs", "ties", "max_replies", "margin_column", "strength_as"),
    *("shp", "max_per_post", "min_score_ratio", "attributes", "map_label"),
    *(f"{name}_column" for name in MAPPED_COLUMNS),
)
"""Settings that decide whether and how a row becomes a preference."""


def key_of(source: Source, fingerprint: str, *, rules: Rules, limit: int | None, renderer: Renderer) -> str:
    """Return the key of a prepared dataset: 32 hex digits that change with its content, its settings and our code.

    Settings that only concern a run are not part of it: weights, what is held out, the share of rows that may be
    dropped. They are applied when the entry is read.
    """
    # The seed decides only which rows and replies are drawn. Without a draw, runs of all seeds share one entry.
    drawn = any(most is not None for most in (limit, rules.reading.max_replies, rules.reading.max_per_post))
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
            "control": asdict(rules.control) if rules.control is not None else None,
            "limit": limit,
            "seed": rules.seed if drawn else None,
            "renderer": asdict(renderer.spec),
            "tokenizer": hash_of_tokenizer(renderer.tokenizer),
            "embeddings": _too_few(renderer),
        }
    )[:32]


def _too_few(renderer: Renderer) -> int | None:
    """Return the number of embeddings of a model that has fewer than its tokenizer has tokens, for which rows are
    dropped; else None, so that models of one tokenizer share what is prepared.
    """
    number = renderer.num_embeddings
    return number if number is not None and number < len(renderer.tokenizer) else None


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        split = getattr(tokenizer, "split_special_tokens", False)
        # Templates refer to special tokens by their roles (`bos_token`), which the backend does not know.
        names = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        return sha256_text(f"{type(tokenizer).__name__} {names} {split} {backend.to_str()}")
    # A tokenizer written in Python has no serialised form but the files that it saves.
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        return sha256_json([type(tokenizer).__name__, *([path.name, sha256_file(path)] for path in files)])


def _hash_of_code(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of the modules in `data` and of those in `BENEATH`.

    A version number raised by hand would be forgotten some day, and entries made by old rules would be used.
    """
    digest = hashlib.sha256()
    for path in [*sorted(package.glob("data/**/*.py")), *(package / name for name in BENEATH)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Cache:
    """Stores in the folders `<folder>/<key>`. Without a folder, a store lives as long as the process that made it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find(self, key: str, *, tells: bool = True) -> TokenStore | None:
        """Return the store with this key; None if there is none, or if it is damaged (which is logged if it `tells`;
        `make` replaces it). Raises RewardlabError if this user may not look into the folder, as into that of another
        one."""
        if self.folder is None:
            return None
        with self._told_in_words():
            try:
                return open_store(self.folder / key) if (self.folder / key).is_dir() else None
            except DamagedError as damage:
                if tells:
                    logger.warning("cache: %s is damaged (%s); the data are prepared again", self.folder / key, damage)
                return None

    def make(self, key: str, write: Callable[[Path], None]) -> tuple[TokenStore, bool]:
        """Return (the store with this key, whether this call made it). Of several processes, one writes, the others
        wait.

        `write` fills an empty temporary folder, which takes its final name only when it is complete.

        Raises RewardlabError if the folder cannot be written, for example on a full disk, and what `write` raises.
        """
        # A folder that cannot be written has no place for a lock, and may have the store.
        if (store := self.find(key)) is not None:
            return store, False
        with self._told_in_words():
            if self.folder is None:
                return self._make_unkept(write), True
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / f".{key}.lock", self.folder / key):
                # Another process may have finished it while this one waited for the lock.
                if (store := self.find(key, tells=False)) is not None:
                    return store, False
                # This process holds the lock, so temporary folders of this key belong to processes that were killed.
                for left_over in self.folder.glob(f".{key}.tmp-*"):
                    remove(left_over)
                self._remove_old()
                with replacing_folder(self.folder / key) as folder, _removed_at_end(folder):
                    write(folder)
                return open_store(self.folder / key), True

    @contextmanager
    def _told_in_words(self) -> Iterator[None]:
        """Raise RewardlabError, which names the flag, for what the system refuses in the folder."""
        try:
            yield
        except OSError as error:
            room = "Make room, choose" if error.errno in NO_ROOM else "Choose"
            raise RewardlabError(
                f"cannot keep prepared data in {self.folder or tempfile.gettempdir()} ({error.strerror or error}). "
                f"{room} another folder with --cache-dir, or use --cache-dir none."
            ) from error

    def _remove_old(self) -> None:
        """Remove temporary folders of other keys in which nothing was written for so long that their process must have
        been killed."""
        assert self.folder is not None
        for left_over in self.folder.iterdir():
            # What is named otherwise is not of this cache, whose folder a user chooses.
            if not LEFT_OVER.fullmatch(left_over.name):
                continue
            # It may be another user's, or have gone meanwhile.
            with suppress(OSError):
                if time.time() - max(path.stat().st_mtime for path in (left_over, *left_over.iterdir())) > ABANDONED_S:
                    remove(left_over)

    def _make_unkept(self, write: Callable[[Path], None]) -> TokenStore:
        """Return a store in a temporary folder that is already deleted."""
        folder = Path(tempfile.mkdtemp(prefix="rewardlab-"))
        try:
            with _removed_at_end(folder):
                write(folder)
                return open_store(folder)
        finally:
            # The memory maps keep the content readable until they are closed. Deleting the folder now instead of at
            # exit leaves nothing behind, however the process ends.
            shutil.rmtree(folder)


@contextmanager
def _removed_at_end(folder: Path) -> Iterator[None]:
    """Within the block, remove a folder where a signal ends the process at once, which `finally` does not see."""
    with hears_of_end(lambda _: shutil.rmtree(folder)):
        yield


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Hold a lock file. If another process holds it, log that this one waits for it."""
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
