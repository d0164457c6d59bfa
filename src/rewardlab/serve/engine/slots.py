"""The models that an engine has under its names, loaded and checked: whole folders, and adapters on one backbone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from rewardlab.artifact.adapters import Adapters
from rewardlab.artifact.load import load
from rewardlab.artifact.seal import digest_of, require_digest
from rewardlab.artifact.shared_backbone import AdaptedModel, Adapter
from rewardlab.client.protocol import ServedModel, WireCanary, WireMessage
from rewardlab.core.controls import notice_of
from rewardlab.core.spec import SCORE_TOLERANCE, RewardSpec, read_spec
from rewardlab.core.values import require
from rewardlab.model.config import DEFAULT_COMPUTE, ComputeConfig
from rewardlab.score import Scorer
from rewardlab.serve.engine.prefix_cache import PrefixCache
from rewardlab.serve.engine.request_tokens import Turns
from rewardlab.serve.engine.scoring_model import ScoringModel

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine computes, and how much it takes on."""

    precision: str = "fp32"
    """Arithmetic, as in `rewardlab.load`: fp32, bf16 or fp16."""
    device: str | torch.device | None = None
    """By default CUDA if there is one, else the CPU."""
    compute: ComputeConfig = DEFAULT_COMPUTE
    """The kernels."""
    trust_remote_code: bool = False
    """Whether Python code that comes with a folder is run."""
    token_budget: int = 8192
    """Most tokens computed at a time, unless a single conversation has more."""
    max_waiting_tokens: int = 1_048_576
    """Most tokens that may wait; also the most that a request may have."""
    max_batch_wait_ms: float = 0.0
    """Milliseconds for which a batch that is not full waits for others to join it."""
    cache_tokens: int = 16_384
    """Tokens of prompts whose keys and values are kept between requests, 0 for none. A token takes 2 · layers · key
    heads · head width numbers."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is too small."""
        for name, least in (("token_budget", 1), ("max_waiting_tokens", 1), ("max_batch_wait_ms", 0)):
            require(getattr(self, name) >= least, f"{name} is {getattr(self, name)}; it must be at least {least}.")
        require(self.cache_tokens >= 0, f"cache_tokens is {self.cache_tokens}; it must be at least 0.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """A model under a name, until another one takes its place."""

    model: ScoringModel
    scorer: Scorer
    served: ServedModel
    rendering: Turns
    """Held while a part of a request is rendered: the copies of the tokenizer that `Markers` makes may be used by one
    thread at a time."""
    adapted: AdaptedModel | None = None
    """The adapter of a model that shares its backbone."""


def open_model(name: str, folder: Path, cache: PrefixCache, config: EngineConfig) -> Slot:
    """Load a model and check it. Raises as `rewardlab.load` does, and ArtifactError if the folder is replaced
    meanwhile."""
    digest = digest_of(folder)
    spec, scorer = read_spec(folder), _load(folder, config)
    require_digest(folder, digest)
    return _slot(name, digest, spec, scorer, ScoringModel(scorer.model, cache))


def _load(folder: Path, config: EngineConfig) -> Scorer:
    scorer = load(
        folder,
        device=config.device,
        precision=config.precision,
        compute=config.compute,
        trust_remote_code=config.trust_remote_code,
        log=logger.info,
    )
    scorer.token_budget = config.token_budget
    return scorer


def _slot(
    name: str,
    digest: str,
    spec: RewardSpec,
    scorer: Scorer,
    model: ScoringModel,
    adapted: AdaptedModel | None = None,
) -> Slot:
    if model.cache_off:
        logger.info("model %s: no cache of prompts, because %s", name, model.cache_off)
    if (control := notice_of(spec.provenance.get("control"))) is not None:
        logger.warning("model %s: %s", name, control)
    # Computed on first use and kept: do it now, while loading, and not during the first request.
    _ = scorer.renderer.markers
    return Slot(
        model=model,
        scorer=scorer,
        served=_served(name, digest, spec, scorer),
        rendering=Turns(),
        adapted=adapted,
    )


class AdapterFamily:
    """Adapters on one backbone."""

    def __init__(self, folder: Path, cache: PrefixCache, config: EngineConfig) -> None:
        """Load the backbone from a folder with an adapter, which is still to be installed.

        Raises ArtifactError if the folder fails its checks or its adapter cannot share a backbone.
        """
        digest = digest_of(folder)
        self._adapters = Adapters(folder, lambda lender: _load(lender, config), trust=config.trust_remote_code)
        require_digest(folder, digest)
        self._cache = cache

    def check(self, folder: Path) -> tuple[Adapter, str]:
        """Return (the adapter of a folder, its digest); may be called while the backbone computes.

        Raises ArtifactError if files are changed, or if it was trained from another base.
        """
        digest = digest_of(folder)
        return self._adapters.check(folder), digest

    def install(self, name: str, adapter: Adapter, digest: str) -> Slot:
        """Put a checked adapter on the backbone and score its canaries, in the thread that computes.

        Raises ArtifactError, naming the fault, if they differ, or if its folder does not have this digest any more;
        then the adapter is taken off again.
        """
        folder = adapter.folder
        scorer, adapted = self._adapters.install(adapter)
        try:
            require_digest(folder, digest)
            model = ScoringModel(adapted.model, self._cache, adapted)
            return _slot(name, digest, read_spec(folder), scorer, model, adapted)
        except BaseException:
            adapted.remove()
            raise


def _served(name: str, digest: str, spec: RewardSpec, scorer: Scorer) -> ServedModel:
    """Return what clients are told about a model."""
    dtype = str(scorer.model.compute_dtype).removeprefix("torch.")
    return ServedModel(
        name=name,
        digest=digest,
        template_hash=spec.renderer.template_hash,
        dtype=dtype,
        tolerance=SCORE_TOLERANCE[dtype],
        max_length=spec.renderer.max_length,
        truncation=spec.renderer.truncation,
        joins_texts=spec.renderer.joins_texts,
        reward_mean=None if spec.calibration is None else spec.calibration.reward_mean,
        reward_std=None if spec.calibration is None else spec.calibration.reward_std,
        affine=scorer.affine,
        outputs=["raw"] if scorer.affine is None else ["raw", "calibrated", "probability"],
        canaries=[
            WireCanary(
                name=canary.name,
                messages=[WireMessage(**message) for message in canary.messages],
                token_ids=canary.token_ids,
                score=canary.score,
                references=canary.references,
                decoys=dict(canary.decoys),
            )
            for canary in spec.canaries
        ],
    )
