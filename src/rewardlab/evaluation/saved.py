"""A saved reward model that is loaded only when there is something to compute, and a cache of its scores.

Scores are kept in the user's cache under a hash of everything that they depend on: the files of the model, the tokens
and their comparisons, the precision and the kernels asked for, the device, the code and the packages. An entry is used
only if it passes its checksum, belongs to exactly these groups, and the files of the model are as they were saved.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from rewardlab.artifact.adapters import Members
from rewardlab.artifact.load import load, open_renderer, require_files
from rewardlab.core.controls import notice_of
from rewardlab.core.errors import DataError
from rewardlab.core.files import (
    at_home,
    cache_folder,
    read_summed_json,
    sha256_file,
    sha256_json,
    to_json,
    write_summed_json,
)
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.core.types import ScoreRow, TokenGroup
from rewardlab.core.values import require
from rewardlab.evaluation.config import EvalConfig
from rewardlab.score import Scorer, score_groups, score_rows

logger = logging.getLogger("rewardlab")
FORMAT: Final = 1
"""Version of the entries, raised when their content changes."""
PACKAGES: Final = ("torch", "transformers", "numpy")
"""Packages whose versions are part of a key: another version's kernels may give other last digits."""
CODE: Final = (
    "score.py",
    "batch.py",
    "model/*.py",
    *(f"artifact/{name}.py" for name in ("load", "halves", "adapters", "shared_backbone")),
    "data/pack.py",
)
"""Modules whose code is part of a key, since they decide what a score is."""


class SavedModel:
    """A reward-model folder, loaded on demand."""

    def __init__(self, config: EvalConfig, members: Members | None = None) -> None:
        """Read the spec and the renderer of the folder `config.run.model`, without its weights.

        `members` are those of an ensemble to which the model belongs; its weights come from there.

        Raises ArtifactError if it is not a reward-model folder, or if its template was changed; ConfigError if
        --calibrated is asked of a model without calibration.
        """
        self.config = config
        self._members = members
        self.path = Path(config.run.model)
        self.spec = read_spec(self.path)
        self.spec_sum: Final = sha256_file(self.path / SPEC_FILE)
        """The hash by which a report recognises that a model is still the one that was judged."""
        require(
            not config.run.calibrated or self.spec.calibration is not None,
            f"--calibrated: {self.path} holds no calibration. Fit and store one with `rewardlab calibrate {self.path} "
            f"--dataset … --store`.",
        )
        if (control := notice_of(self.spec.provenance.get("control"))) is not None:
            logger.warning("model %s: %s", self.path, control)
        self.renderer = open_renderer(self.path, self.spec)
        self.decided: dict[str, Any] = {}
        """Setting -> value with which its scores were computed, every `auto` decided; empty before there are scores."""
        self._scorer: Scorer | None = None

    @property
    def beta(self) -> float:
        """The β with which σ(β · score difference) is the probability that the first reply is preferred; with
        --calibrated, divided by the temperature that is stored in the model.
        """
        return self.spec.beta / (self.spec.temperature if self.config.run.calibrated else 1.0)

    def scorer(self) -> Scorer:
        """Return the model, which the first call loads and checks. Raises as `artifact.load.load` does."""
        if self._scorer is None:
            self._scorer = self._load(self.path) if self._members is None else self._members.open(self.path, self._load)
            assert self._scorer.compute is not None, "it was loaded from a folder"
            layout = "padded" if self._scorer.model.layout == "padded" else "shared"
            self.decided = {**asdict(self._scorer.compute), "attention": layout}
        return self._scorer

    def scorer_to_change(self) -> Scorer:
        """Return the model for a caller that changes its weights and releases it afterwards.

        It is the model of `scorer` if that is loaded. Otherwise it is loaded separately, even if the model could share
        a backbone with other members, since these must not get the changed weights.
        """
        assert self._scorer is None or not self.is_on_shared_backbone, "others compute with these weights"
        if self._scorer is None:
            self._scorer = self._load(self.path)
        return self._scorer

    def _load(self, folder: Path) -> Scorer:
        run = self.config.run
        return load(
            folder, precision=run.precision, attention=run.attention, compute=self.config.compute, log=logger.info
        )

    @property
    def is_on_shared_backbone(self) -> bool:
        """Return whether it is loaded on a backbone that it shares with other members of an ensemble."""
        return self._members is not None and self._members.is_shared

    def release(self) -> None:
        """Free the memory of the model; the next call of `scorer` loads it again."""
        self._scorer = None

    def score(self, groups: Sequence[TokenGroup], *, progress: str) -> list[ScoreRow]:
        """Return the score rows of groups; arguments and errors are those of `scores`."""
        return score_rows(groups, self.scores(groups, progress=progress))

    def scores(self, groups: Sequence[TokenGroup], *, progress: str) -> list[np.ndarray]:
        """Return [K] scores of each group, from the cache if this model has scored the same tokens in the same way.

        `progress` is the title of the progress bar. Raises as `scorer` does, and ArtifactError if kept scores would be
        used and a file of the model was changed.
        """
        entries = self._entries(groups)
        for entry in entries.values():
            if (kept := self._read(entry, groups)) is not None:
                scores, decided = kept
                self.decided = dict(decided) if isinstance(decided, Mapping) else {}
                self._tell_kept(entry, scores, self.config.run.precision)
                return scores
        scores = score_groups(self.scorer().model, groups, budget=self.config.run.micro_token_budget, progress=progress)
        if entries:
            self._write(entries[self.is_on_shared_backbone], scores)
        return scores

    # --- kept scores -------------------------------------------------------------------------------------------

    def kept(self, groups: Sequence[TokenGroup], precision: str) -> list[np.ndarray] | None:
        """Return the scores of these groups in a precision of the card that `keep` has kept; None if there are none."""
        entry = self._entries(groups, card=precision).get(False)
        if entry is None or (kept := self._read(entry, groups)) is None:
            return None
        scores, _ = kept
        self._tell_kept(entry, scores, precision)
        return scores

    def keep(self, groups: Sequence[TokenGroup], precision: str, scores: Sequence[np.ndarray]) -> None:
        """Keep the scores of groups in a precision of the card, if scores are kept at all."""
        if (entry := self._entries(groups, card=precision).get(False)) is not None:
            self._write(entry, scores)

    def _entries(self, groups: Sequence[TokenGroup], *, card: str | None = None) -> dict[bool, Path]:
        """Return the files of these scores, which may not exist; empty if scores are not kept.

        The keys say whether the scores were computed on a shared backbone, which changes the last digits. `card` is the
        precision if the scores are for the precision card, which uses a separate model.
        """
        setting = self.config.data.reading.cache_dir
        if not self.config.run.reuse or setting == "none":
            return {}
        folder = cache_folder(os.environ) if setting == "auto" else at_home(setting).absolute()
        run = self.config.run
        key = {
            "format": FORMAT,
            "code": _hash_of_code(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            # The hash of every file that decides a score, as the spec records it; the files are checked before use.
            "model": sha256_json({"files": dict(self.spec.files), "renderer": asdict(self.spec.renderer)}),
            "groups": digest_of_groups(groups),
            "precision": run.precision if card is None else f"card {card}",
            "attention": run.attention,
            "compute": asdict(self.config.compute),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
        }
        keys = {False: key}
        if self._members is not None and card is None:
            keys[True] = {**key, "backbone": [read_spec(member).files for member in self._members.folders]}
        kind = "scores" if card is None else "cards"
        return {is_shared: folder / kind / f"{sha256_json(own)[:32]}.json" for is_shared, own in keys.items()}

    def _read(self, entry: Path, groups: Sequence[TokenGroup]) -> tuple[list[np.ndarray], object] | None:
        """Return the kept scores [K] of each group and how they were computed; None if there are none or, with a
        warning, if they are damaged."""
        if not entry.is_file():
            return None
        try:
            values = read_summed_json(entry)
            scores = _unpacked(values["scores"], [group.num_replies for group in groups])
            decided = values["decided"]
        except (OSError, DataError, KeyError, TypeError, ValueError) as error:
            logger.warning("kept scores: %s is damaged (%s), so everything is scored again", entry, error)
            return None
        require_files(self.path, self.spec)
        return scores, decided

    def _tell_kept(self, entry: Path, scores: Sequence[np.ndarray], precision: str) -> None:
        logger.info(
            "kept scores: %s has scored these %d replies in %s before, so they are not computed again (%s; "
            "--no-reuse computes them)",
            self.path,
            sum(map(len, scores)),
            precision,
            entry,
        )

    def _write(self, entry: Path, scores: Sequence[np.ndarray]) -> None:
        """Keep scores. If the disk cannot be written, log a warning: the evaluation goes on."""
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_summed_json(entry, {"scores": _packed(scores), "decided": self.decided, "model": str(self.path)})
        except OSError as error:
            logger.warning("kept scores: %s cannot be written (%s)", entry, error.strerror or error)


def digest_of_groups(groups: Iterable[TokenGroup]) -> str:
    """Return the SHA-256 of groups: of ids, tokens, comparisons and everything else that score rows depend on."""
    digest = hashlib.sha256()
    for group in groups:
        facts = [
            group.preference_id,
            group.source,
            group.prompt_key,
            group.prompt_tokens,
            group.truncated_tokens,
            group.truncated_reply_tokens,
            group.numbers,
            [astuple(comparison) for comparison in group.comparisons],
            [len(group.shared), *map(len, group.suffixes)],
        ]
        digest.update(to_json(facts, indent=None).encode("utf-8", "surrogatepass"))
        for tokens in (group.shared, *group.suffixes):
            digest.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return digest.hexdigest()


def _packed(scores: Sequence[np.ndarray]) -> str:
    """Return float32 scores as hexadecimal text, which keeps every bit, NaN and infinity included."""
    return b"".join(np.asarray(own, dtype="<f4").tobytes() for own in scores).hex()


def _unpacked(text: object, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the scores of `_packed`, one array for each group. Raises ValueError if their number is another."""
    if not isinstance(text, str):
        raise ValueError("no scores")
    flat = np.frombuffer(bytes.fromhex(text), dtype="<f4").astype(np.float32)
    if len(flat) != sum(sizes):
        raise ValueError(f"{len(flat)} scores for {sum(sizes)} replies")
    return np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []


def _hash_of_code(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of the modules in `CODE`."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
