"""Scores of rollouts, from a model in this process or a server, singly or as an ensemble.

Legend: M members, R rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast

import numpy as np
from scipy.special import expit

from rewardlab.analysis.ensembles import Scale, combinations
from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.opened_once import OpenedOnce
from rewardlab.core.remaking import added, remade
from rewardlab.rl.config import ScorerConfig, is_address, require_known
from rewardlab.rl.members import About, Found, member_of, require_scores
from rewardlab.rl.noise import FloatArray, Noise
from rewardlab.rl.reading import Reading

AND: Final = "+"
"""What stands between the digests of the members of an ensemble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The score of one rollout; always finite."""

    score: float
    """Raw score, or what the setting `output` makes of it; that of an ensemble in standard deviations of a member."""
    noise: float
    """The largest distance to another scoring of the same rollout, in the unit of `score`."""
    spread: float | None = None
    """Standard deviation over the members of an ensemble, None for one model."""
    digest: str | None = None
    """Digest of the model that gave it; for an ensemble, those of the members joined by `+`."""
    num_tokens: int | None = None
    """Tokens of the whole conversation after cuts; for an ensemble, the most that a member reads."""
    truncated_tokens: int | None = None
    """Tokens of the prompt that were cut; for an ensemble, the most that were cut for a member."""
    truncated_reply_tokens: int | None = None
    """Tokens that were cut from the middle of the reply, likewise."""


class RewardScorer:
    """Scores rollouts with a saved reward model: in this process, on a server, or with several as an ensemble.

    It may be made anywhere, loads or connects when it is first used, and belongs to the event loop and the process in
    which that happens. Any number of tasks may ask at the same time; the replies to one prompt of a call are computed
    with one copy of it, and by one model.
    """

    def __init__(
        self, source: str | Path | Sequence[str | Path], config: ScorerConfig | None = None, **settings: Any
    ) -> None:
        """Make a scorer, which loads and connects to nothing yet.

        `source` is a reward-model folder or the address of a server, with `#NAME` behind it for one of several models
        there; several sources are an ensemble. `settings` are fields of `ScorerConfig`, which replace `config` or some
        of its fields.

        Raises ConfigError for settings that cannot be used.
        """
        self.config = _settled(config, settings)
        sources = list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
        for one in sources:
            if not isinstance(one, str | Path):
                kind = type(one).__name__
                remark = ""
                if hasattr(one, "forward") or hasattr(one, "score"):
                    remark = (
                        " A model in memory does not tell how conversations are rendered for it: name its folder "
                        "(one of another project becomes such a folder by `rewardlab import`)."
                    )
                raise ConfigError(
                    f"a scorer needs a reward-model folder or the address of a server, got a {kind}.{remark}"
                )
        self._sources = sources
        if not sources or len(set(map(str, sources))) < len(sources):
            raise ConfigError(
                "a scorer needs a reward-model folder or the address of a server, or several, each named once; got "
                f"{len(sources)}."
            )
        if self.config.output != "raw" and len(sources) > 1:
            raise ConfigError(
                f"output={self.config.output!r}: an ensemble gives scores in standard deviations of its members, which "
                f"no calibration was fitted to. Leave it out, or name one model."
            )
        if self.config.output != "raw" and self.config.client.get("on_swap") == "follow":
            raise ConfigError(
                f"output={self.config.output!r} does not follow swaps (on_swap): another model has another "
                f"calibration. Leave one of them out."
            )
        if len(sources) > 1 and self.config.client.get("on_swap") == "follow":
            raise ConfigError(
                "an ensemble does not follow swaps (on_swap): its members are put on one scale by the calibrations "
                "that they had at first. Leave it out, so that a swap ends in an error."
            )
        if "artifact" in self.config.client and sum(map(is_address, sources)) > 1:
            raise ConfigError(
                "client: one artifact cannot be the folder of several served models, each with its own template and "
                "calibration. Leave it out: rewardlab's server tells both. Members on vLLM or SGLang tell neither; "
                "serve them with `rewardlab serve`, or name their folders as sources."
            )
        self._members = [member_of(one, self.config) for one in sources]
        self._about: list[About] | None = None
        self._once: OpenedOnce[list[About]] = OpenedOnce("scorer", otherwise="BlockingScorer")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as source and settings; there it loads or connects anew."""
        own = {"config", "_sources", "_members", "_about", "_once"}
        return remade, (RewardScorer, type(self), (self._sources, self.config), {}), added(self, own)

    async def __aenter__(self) -> RewardScorer:
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def score(self, rollouts: Iterable[Any]) -> list[float]:
        """Return one finite score for each rollout, in order. Raises as `details` does."""
        return [one.score for one in await self.details(rollouts)]

    async def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        """Return what is known about each rollout's score, in order.

        A rollout is a conversation (messages, the reply last), (prompt, reply), a `Rollout`, or whatever `render_fn`
        makes one of these.

        Raises RolloutError naming a rollout that has no finite score or is not a conversation, ConfigError for plain
        texts if `text_as` does not say how to read them, EndpointError for a server that fails, and ArtifactError for a
        folder that cannot be used.
        """
        about = await self._open()
        read = (await self.reading()).rollouts(rollouts)
        if not read:
            return []
        found_M = await _together([member.score(read) for member in self._members])
        raw_MR = np.array(
            [
                require_scores(found, read, who=member.name)
                for member, found in zip(self._members, found_M, strict=True)
            ],
            dtype=np.float64,
        )
        noise_MR = np.stack([self._noise_of(*one) for one in zip(about, found_M, raw_MR, strict=True)])
        if len(self._members) == 1:
            return _scored(*self._as_asked(about[0], raw_MR[0], noise_MR[0]), None, found_M)
        scales = [cast(Scale, one.scale) for one in about]
        mean_M1 = np.array([[scale.mean] for scale in scales])
        std_M1 = np.array([[scale.std] for scale in scales])
        scaled_MR, noise_MR = (raw_MR - mean_M1) / std_M1, noise_MR / std_M1
        how, penalty = self.config.combination, self.config.penalty
        score_R = combinations(scaled_MR, penalty=penalty)[how]
        return _scored(
            score_R, _combined_noise(noise_MR, how=how, penalty=penalty), scaled_MR.std(axis=0, ddof=1), found_M
        )

    def _as_asked(self, about: About, raw_R: FloatArray, noise_R: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return [R] scores of the `output` that was asked for, and how far they may move."""
        if self.config.output == "raw":
            return raw_R, noise_R
        assert about.affine is not None
        scale, shift = about.affine
        odds_R, noise_R = scale * raw_R + shift, scale * noise_R
        if self.config.output == "calibrated":
            return odds_R, noise_R
        low_R, middle_R, high_R = expit(odds_R - noise_R), expit(odds_R), expit(odds_R + noise_R)
        return middle_R, np.maximum(high_R - middle_R, middle_R - low_R)

    async def noise(self) -> Noise:
        """Return how far a raw score may be from its reference, by the artifact's tolerance for its arithmetic.

        For an ensemble it is that of the member with the largest tolerance; `Scored.noise` is that of the combination.
        Raises as `details` does.
        """
        return max((self._of(about) for about in await self._open()), key=lambda noise: noise.tolerance)

    async def reading(self) -> Reading:
        """Return how objects become rollouts for these models. Raises as `details` does."""
        return Reading(
            joins_texts=all(about.joins_texts for about in await self._open()),
            text_as=self.config.text_as,
            render_fn=self.config.render_fn,
        )

    async def aclose(self) -> None:
        """Close connections and release the models. A closed scorer cannot be used again."""
        if self._once.is_elsewhere:
            return
        await self._once.close()
        for member in self._members:
            await member.aclose()

    async def _open(self) -> list[About]:
        """Open all members, or wait until they are open.

        Raises ConfigError for an ensemble whose members cannot be put on one scale or read texts in different ways, and
        for a model whose noise is not known.
        """
        self._once.require_usable()
        about = self._about or await self._once.opened(self._opened)
        if self.config.client.get("on_swap") == "follow":
            # Another model may be there by now, with another arithmetic or template.
            about = self._about = [await member.open() for member in self._members]
        return about

    async def _opened(self) -> list[About]:
        about = [await member.open() for member in self._members]
        for member, one in zip(self._members, about, strict=True):
            if len(about) > 1 and one.scale is None:
                raise ConfigError(
                    f"{member.name}: it has no calibration, so its scores cannot be put on the scale of the others. "
                    f"Store one with `rewardlab calibrate FOLDER --dataset … --store`, on the same data for all "
                    f"members, and serve that folder by `rewardlab serve`; vLLM and SGLang tell no calibration."
                )
            if self.config.output != "raw" and one.affine is None:
                raise ConfigError(
                    f"{member.name}: output={self.config.output!r} needs a calibration, and it has none. Store one "
                    f"with `rewardlab calibrate FOLDER --dataset … --store` and serve that folder; for vLLM, SGLang "
                    f"and rewardlab's server before 0.2.0 name it too, client={{'artifact': FOLDER}}."
                )
            if one.tolerance is None and self.config.noise_tolerance is None:
                raise ConfigError(
                    f"{member.name}: it does not tell its arithmetic, so the noise in its scores is not known. "
                    f"Say it (client={{'precision': 'bfloat16'}}), or give noise_tolerance."
                )
        if len({one.joins_texts for one in about}) > 1 and self.config.text_as is None:
            raise ConfigError(
                "some members of the ensemble were trained with a template and some without. Give text_as, which says "
                "how plain texts are read, or messages alone."
            )
        self._about = about
        return about

    def _of(self, about: About, tolerance: float | None = None) -> Noise:
        """Return the noise of a model, or of the one with this tolerance that has taken its place."""
        measured = self.config.noise_tolerance
        if measured is not None:
            return Noise(tolerance=measured, source="as given (noise_tolerance)")
        known = about.tolerance if tolerance is None else tolerance
        assert known is not None
        return Noise(tolerance=known, source=f"{about.arithmetic}, by the artifact")

    def _noise_of(self, about: About, found: Sequence[Found], raw_R: FloatArray) -> FloatArray:
        """Return the noise [R] of one model's scores, of each by the model that gave it."""
        noise_R = np.empty_like(raw_R)
        told = [one.tolerance for one in found]
        for tolerance in set(told):
            own_R = np.array([one == tolerance for one in told])
            noise_R[own_R] = self._of(about, tolerance).between_scorings(raw_R[own_R])
        return noise_R


def _settled(config: ScorerConfig | None, settings: dict[str, Any]) -> ScorerConfig:
    """Return `config` with `settings` in place of its own. Raises ConfigError for an unknown setting."""
    require_known(settings, settings_of(ScorerConfig))
    if config is not None and not isinstance(config, ScorerConfig):
        raise ConfigError(
            f"config: got a {type(config).__name__}; wanted a ScorerConfig (rewardlab.rl.ScorerConfig), or its fields "
            f"by name, such as output='raw'."
        )
    return replace(config or ScorerConfig(), **settings)


async def _together(jobs: Sequence[Any]) -> list[list[Found]]:
    """Return the answers of all members. If one fails, end the others and raise its error."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _combined_noise(noise_MR: FloatArray, *, how: str, penalty: float) -> FloatArray:
    """Return a bound [R] on how far the combination moves if each member's score moves by its noise.

    A standard deviation over M members moves by at most the Euclidean length of the movement over √(M − 1).
    """
    if how == "minimum":
        return cast(FloatArray, noise_MR.max(axis=0))
    mean_R = noise_MR.mean(axis=0)
    if how == "mean":
        return cast(FloatArray, mean_R)
    return cast(FloatArray, mean_R + penalty * np.sqrt((noise_MR**2).sum(axis=0) / (len(noise_MR) - 1)))


def _scored(
    score_R: FloatArray, noise_R: FloatArray, spread_R: FloatArray | None, found_M: Sequence[Sequence[Found]]
) -> list[Scored]:
    rows = []
    for number, of_members in enumerate(zip(*found_M, strict=True)):
        digests = [one.digest for one in of_members]
        rows.append(
            Scored(
                score=float(score_R[number]),
                noise=float(noise_R[number]),
                spread=None if spread_R is None else float(spread_R[number]),
                digest=None if None in digests else AND.join(cast(list[str], digests)),
                num_tokens=_most([one.num_tokens for one in of_members]),
                truncated_tokens=_most([one.truncated_tokens for one in of_members]),
                truncated_reply_tokens=_most([one.truncated_reply_tokens for one in of_members]),
            )
        )
    return rows


def _most(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return max(known) if known else None
