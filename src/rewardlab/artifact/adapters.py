"""Loads and checks folders that were trained with LoRA from the same base, as models on one backbone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rewardlab.artifact.config import require_config
from rewardlab.artifact.load import open_renderer, require_canaries, require_files
from rewardlab.artifact.shared_backbone import AdaptedModel, Adapter, NotSharedError, SharedBackbone, read_adapter
from rewardlab.core.spec import read_spec
from rewardlab.score import Scorer

logger = logging.getLogger("rewardlab")
Load = Callable[[Path], Scorer]
"""Loads a folder as a separate model, and checks it."""


class Adapters:
    """Models of several folders on one backbone, of which only one computes at a time."""

    def __init__(self, lender: Path, load: Load, *, trust: bool = False) -> None:
        """Load the backbone by `load` from a folder with an adapter, which is still to be installed.

        Raises ArtifactError if the folder fails its checks, NotSharedError if its adapter cannot share a backbone.
        """
        adapter = read_adapter(lender)
        self._scorer = load(lender)
        self._max_length = read_spec(lender).renderer.max_length
        self._backbone = SharedBackbone(self._scorer.model, adapter)
        self._trust = trust

    def check(self, folder: Path) -> Adapter:
        """Return the adapter of a folder; may be called while the backbone computes.

        Raises ArtifactError if files are changed, NotSharedError if it was trained from another base.
        """
        spec = read_spec(folder)
        require_files(folder, spec)
        adapter = read_adapter(folder)
        self._backbone.require_same_base(adapter)
        if spec.renderer.max_length > self._max_length:
            # The layout of attention was chosen for conversations of at most that length.
            raise NotSharedError(
                folder,
                f"its conversations may have {spec.renderer.max_length} tokens, those of the first adapter "
                f"{self._max_length}. Name this one first",
            )
        return adapter

    def install(self, adapter: Adapter) -> tuple[Scorer, AdaptedModel]:
        """Put a checked adapter on the backbone, score its canaries, and return its model, which computes now.

        Raises ArtifactError, naming the fault, if they differ; then the adapter is taken off again.
        """
        folder = adapter.folder
        spec = read_spec(folder)
        renderer = open_renderer(folder, spec, trust=self._trust)
        renderer.pad_token_id = require_config(folder, spec)
        adapted = self._backbone.add(adapter)
        try:
            adapted.activate()
            renderer.num_embeddings = adapted.model.config.vocab_size
            scorer = Scorer(
                adapted.model,
                renderer,
                beta=spec.beta,
                token_budget=self._scorer.token_budget,
                compute=self._scorer.compute,
                temperature=spec.temperature,
                affine=spec.affine,
            )
            require_canaries(scorer, spec, where=str(folder))
        except BaseException:
            adapted.remove()
            raise
        return scorer, adapted


class Members:
    """Models of an ensemble. Only the one that was opened last computes.

    If all are adapters of the same base, the base is in memory once for all. Otherwise each is loaded when it is
    opened.
    """

    def __init__(self, folders: Sequence[Path], *, precision: str) -> None:
        self.folders = tuple(folders)
        self._precision = precision
        self._lender = max(folders, key=lambda folder: read_spec(folder).renderer.max_length)
        self._adapters: dict[Path, Adapter] = {}
        self._shared: Adapters | None = None
        self._is_decided = False
        self._active: AdaptedModel | None = None

    @property
    def is_shared(self) -> bool:
        """Return whether the models share a backbone, which is decided when the first one is opened."""
        return self._shared is not None

    def open(self, folder: Path, load: Load) -> Scorer:
        """Return the model of one of the folders. If they share a backbone, the one opened before can no longer
        compute.

        Raises ArtifactError if the folder fails its checks, and as `load` does.
        """
        if not self._is_decided:
            self._share(load)
        if self._shared is None:
            return load(folder)
        if self._active is not None:
            self._active.remove()
            self._active = None
        scorer, self._active = self._shared.install(self._adapters[folder])
        return scorer

    def release(self) -> None:
        """Free the memory of the backbone that they share; the next call of `open` loads it again."""
        self._shared, self._active, self._adapters, self._is_decided = None, None, {}, False

    def _share(self, load: Load) -> None:
        """Load the backbone that all members share; if they cannot share one, log why."""
        self._is_decided = True
        try:
            if self._precision != "fp32":
                raise NotSharedError(
                    self._lender, f"adapters on one backbone are computed in fp32, not {self._precision}"
                )
            for folder in self.folders:  # before weights are loaded, which would be in vain if one has no adapter
                read_adapter(folder)
            shared = Adapters(self._lender, load)
            self._adapters = {folder: shared.check(folder) for folder in self.folders}
        except NotSharedError as error:
            logger.info(
                "ensemble: one member is in memory at a time, loaded in full. No backbone is shared: %s", error.why
            )
            return
        self._shared = shared
        logger.info(
            "ensemble: its %d members are adapters of one base, which is in memory once for all of them",
            len(self.folders),
        )
