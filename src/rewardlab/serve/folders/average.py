"""The average of several reward models' weights, as one reward model that costs what one of them costs.

Source: weight-averaged reward models (WARM, Ramé et al. 2024). Averages of weights mean something only for models that
began from the same weights, the head included, and stayed near each other.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rewardlab.artifact.canaries import render_canaries, score_tokens
from rewardlab.artifact.config import read_config_file
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model, verify_in_clean_process
from rewardlab.artifact.seal import KEY
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import provenance, sha256_file
from rewardlab.core.folders import replacing_folder
from rewardlab.core.spec import SPEC_FILE, RewardSpec, read_spec
from rewardlab.core.values import require
from rewardlab.model.reward import RewardModel
from rewardlab.serve.folders.export import require_apart

logger = logging.getLogger("rewardlab")
SAME_HEAD: Final = 0.5
"""Smallest cosine of two heads at which nothing is said. Heads that began alike stay near 1; heads that were drawn
apart are near 0, and their average cancels what each has learned."""
FAR: Final = 0.5
"""Share of the spread of the members' scores up to which nothing is said of the distance of the average's scores. Those
of members that began from one model were 0.03 to 0.05 of it away, those of others 0.8 and more."""
OF_THE_SAVE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", KEY)
"""Fields of config.json that say how a folder was saved, and nothing of the model."""
WRITTEN: Final = ("template_source", "system_prompt")
"""Fields of a rendering that are written into its template, which a model that is trained further has from its folder
alone."""


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """The result of an average, and how near it is to the average of the members' scores."""

    spec: RewardSpec
    shares: tuple[float, ...]
    """The share of each member, in their order; together 1."""
    head_cosine: float
    """Smallest cosine between the heads of two members."""
    distance: float
    """Largest distance of the average's score of a canary from the members' scores, averaged by the same shares."""
    spread: float
    """Standard deviation of the latter over the canaries."""

    def lines(self, target: Path) -> list[str]:
        """Return what the command prints."""
        return [
            f"{target}: the average of {len(self.shares)} models in float32, verified. Heads of two members have a "
            f"cosine of {self.head_cosine:.3f} or more.",
            f"Its scores of the {len(self.spec.canaries)} canaries are at most {self.distance:.2g} from the average of "
            f"the members' scores (their standard deviation: {self.spread:.2g}).",
            "What it is worth, `rewardlab eval` tells beside its members.",
        ]


def average(
    sources: Sequence[Path], target: Path, *, weights: Sequence[float] = (), overwrite: bool = False
) -> Averaged:
    """Write the average of the models in `sources` as the reward-model folder `target`, in float32.

    `weights` has a positive number for each source; by default all count alike. Adapters are averaged as merged
    weights, since an average of their factors is not that of their products. The calibrations of the members do not
    hold for the average and are left out. The new spec names the members, their digests and shares.

    Raises ArtifactError if a source fails verification; ConfigError if the sources differ in anything but their
    weights (architecture, rendering, β), for weights that cannot be used, or if `target` may not be replaced.
    """
    shares = _shares(sources, weights)
    for source in sources:
        require_apart(source, target, overwrite=overwrite)
    specs = [read_spec(source) for source in sources]
    _require_alike(sources, specs)
    _tell_rounding(sources, specs)
    scorer = load(sources[0], device="cpu", attention="padded")
    canaries = [token_ids for _, _, token_ids in render_canaries(scorer.renderer)]
    heads, scores = [_head(scorer.model)], [score_tokens(scorer.model, canaries)]
    total = shares[0]
    for source, share in zip(sources[1:], shares[1:], strict=True):
        other = load(source, device="cpu", attention="padded").model
        heads.append(_head(other))
        scores.append(score_tokens(other, canaries))
        total += share
        _move(scorer.model, other, source, share / total)
        del other
    cosine = _tell_heads(heads)
    with replacing_folder(target, is_result=True) as place:
        spec = save_reward_model(
            place,
            scorer.model,
            scorer.renderer,
            beta=specs[0].beta,
            save_dtype=torch.float32,
            provenance={**provenance(), "average": _members(sources, shares)},
        )
        # Free this model first: the verifying process loads one as well, and memory may not be enough for both.
        del scorer
        verify_in_clean_process(place)
        wanted = np.average(scores, axis=0, weights=shares)
        made = Averaged(
            spec=spec,
            shares=tuple(shares),
            head_cosine=cosine,
            distance=float(np.abs(np.array([canary.score for canary in spec.canaries]) - wanted).max()),
            spread=float(wanted.std(ddof=1)),
        )
        _tell_far(made)
        require_apart(sources[0], target, overwrite=overwrite)  # another process may have made it meanwhile
    return made


def _tell_heads(heads: Sequence[torch.Tensor]) -> float:
    """Return the least cosine of two heads; a warning if they point in different directions."""
    cosine = min(
        float(torch.nn.functional.cosine_similarity(*pair, dim=0)) for pair in itertools.combinations(heads, 2)
    )
    if cosine < SAME_HEAD:
        logger.warning(
            "the heads of these models point in different directions (cosine %.3f), as heads do that were drawn by "
            "different seeds; their average cancels much of what each has learned. Train the members from one "
            "reward model (`rewardlab train --model FOLDER`), which gives all of them its head",
            cosine,
        )
    return cosine


def _tell_far(made: Averaged) -> None:
    """Warn of scores that are far from the average of the members' scores, if their heads have not told of it."""
    if made.head_cosine >= SAME_HEAD and made.distance > FAR * made.spread:
        logger.warning(
            "a canary's score is %.2g from the average of the members' scores, whose standard deviation is %.2g. The "
            "members' weights do not lie close together: they did not begin from the same weights, or went far apart, "
            "and their average holds little of what each has learned. Train the members from one reward model, and "
            "judge the average beside them with `rewardlab eval`",
            made.distance,
            made.spread,
        )


def _shares(sources: Sequence[Path], weights: Sequence[float]) -> list[float]:
    """Return each member's share. Raises ConfigError for sources or weights that cannot be used."""
    require(len(sources) >= 2, "an average needs two reward-model folders or more.")
    places = [source.resolve() for source in sources]
    twice = next((source for number, source in enumerate(sources) if places[number] in places[:number]), None)
    require(twice is None, f"{twice}: it is named twice. Give it more weight with --weights instead.")
    weights = weights or [1.0] * len(sources)
    require(
        len(weights) == len(sources),
        f"--weights: {len(weights)} numbers for {len(sources)} folders. Give one for each, in their order.",
    )
    require(
        all(math.isfinite(weight) and weight > 0 for weight in weights),
        f"--weights {' '.join(f'{weight:g}' for weight in weights)}: each has to be a positive number.",
    )
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _require_alike(sources: Sequence[Path], specs: Sequence[RewardSpec]) -> None:
    """Raise ConfigError unless all models have one architecture, one rendering and one β."""
    first, spec = sources[0], specs[0]
    config = _of_the_model(first)
    for source, other in zip(sources[1:], specs[1:], strict=True):
        differ = [
            item.name
            for item in fields(spec.renderer)
            if item.name not in WRITTEN and getattr(spec.renderer, item.name) != getattr(other.renderer, item.name)
        ]
        if spec.renderer.joins_texts != other.renderer.joins_texts:
            differ.append("template_source")
        require(
            not differ,
            f"{source} renders conversations otherwise than {first} ({', '.join(differ)}), so their scores are of "
            f"different texts. Average models that were trained with the same rendering.",
        )
        require(
            spec.beta == other.beta,
            f"{source} was trained with --beta {other.beta:g} and {first} with {spec.beta:g}, so their scores have "
            f"different scales. Average models of one beta.",
        )
        theirs = _of_the_model(source)
        unlike = sorted(name for name in config | theirs if config.get(name) != theirs.get(name))
        require(
            not unlike,
            f"{source} is another model than {first}: their config.json differ in {', '.join(unlike)}. Average "
            f"models that began from the same weights.",
        )


def _of_the_model(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json without what tells of the save alone."""
    return {name: value for name, value in read_config_file(folder).items() if name not in OF_THE_SAVE}


def _tell_rounding(sources: Sequence[Path], specs: Sequence[RewardSpec]) -> None:
    """Warn of members whose weights were rounded."""
    rounded = [str(source) for source, spec in zip(sources, specs, strict=True) if spec.rounding != "none"]
    if rounded:
        logger.warning(
            "%s: these weights were rounded, and the average keeps what that lost; average the folders with the "
            "weights as they were trained, if there are any",
            ", ".join(rounded),
        )


def _move(model: RewardModel, other: RewardModel, source: Path, part: float) -> None:
    """Move the weights of `model` that `part` of the way to those of `other`; equal weights stay the same to the bit.

    Raises ArtifactError if they have other names or shapes.
    """
    mine, theirs = _weights(model), _weights(other)
    if {name: weight.shape for name, weight in mine.items()} != {name: weight.shape for name, weight in theirs.items()}:
        raise ArtifactError(f"{source}: its weights have other names or shapes than those of the first model.")
    with torch.no_grad():
        for name, weight in mine.items():
            if weight.is_floating_point():
                weight.lerp_(theirs[name], part)
            elif not torch.equal(weight, theirs[name]):
                raise ArtifactError(f"{source}: {name} holds whole numbers that differ from those of the first model.")


def _weights(model: RewardModel) -> Mapping[str, Tensor]:
    """Return all that a folder holds of the model, each tensor once."""
    seen: dict[int, str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        seen.setdefault(tensor.data_ptr(), name)
    return {name: state[name] for name in seen.values()}


def _head(model: RewardModel) -> Tensor:
    """Return the head's weights [W] as they are now."""
    return model.head.weight.detach().flatten().clone()


def _members(sources: Sequence[Path], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Return what the new spec says of its members."""
    return [
        {"folder": str(source), "share": share, "spec_sha256": sha256_file(source / SPEC_FILE)}
        for source, share in zip(sources, shares, strict=True)
    ]
