"""Where scores of rollouts come from: a saved model in this process, or a server."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from rewardlab.analysis.ensembles import Scale
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.core.terminal import number_of
from rewardlab.rl.config import ScorerConfig, at_address, is_address
from rewardlab.rl.rollouts import Rollout, RolloutError

if TYPE_CHECKING:
    from rewardlab.client.asynchronous import AsyncRewardClient
    from rewardlab.client.endpoint import EndpointSpec
    from rewardlab.client.rows import Answered
    from rewardlab.serve.engine.api import Scored as Answer
    from rewardlab.serve.engine.local import LocalEngine

NEEDED: Final = ("httpx2", "pydantic", "stamina")
"""Packages of the extra `rl` that scoring needs."""
ROWS: Final = 256
"""Most conversations in a request to a model in this process, replies to one prompt apart from that."""
UNLIMITED: Final = 1 << 40
CLOSED: Final = "the scorer was closed while it was waited for. Make a new one."


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a model that have to be known before its scores can be used."""

    joins_texts: bool
    """Whether it takes texts without a template."""
    tolerance: float | None
    """How far a score may be from its reference, in units of max(1, |score|); None if the arithmetic is not known."""
    arithmetic: str
    """The model's dtype, or `unknown`."""
    scale: Scale | None
    """Mean and standard deviation of its scores, from the calibration stored with it; None if there is none."""
    affine: tuple[float, float] | None = None
    """(scale, shift) of its calibration, by which raw scores become log odds; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model's answer about one rollout: a score, or why there is none."""

    score: float | None
    error: str | None = None
    digest: str | None = None
    num_tokens: int | None = None
    truncated_tokens: int | None = None
    truncated_reply_tokens: int | None = None
    tolerance: float | None = None
    """That of the model that gave the score, where another may have been opened; None for that of `About`."""


@runtime_checkable
class Member(Protocol):
    """A reward model that can be asked."""

    name: str
    """Name in messages: its folder or address."""

    async def open(self) -> About:
        """Load the model or connect to it, and return what is known about it. Raises RewardlabError if that fails."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Found]:
        """Return the model's answer about each rollout, in order. One model scores all replies to one prompt.

        Raises RewardlabError for a failure that concerns all rollouts.
        """

    async def aclose(self) -> None:
        """Close connections and release the model."""


def member_of(source: str | Path, config: ScorerConfig) -> Member:
    """Return a member that is not open yet. Raises ConfigError for settings that cannot be used."""
    try:
        return ServedMember(str(source), config) if is_address(source) else LocalMember(Path(source), config)
    except ModuleNotFoundError as error:
        raise _missing(error) from error


def _missing(error: ModuleNotFoundError) -> Exception:
    if error.name in NEEDED:
        return ConfigError(f'scoring rollouts needs the package {error.name}: pip install "rewardlab[rl]"')
    return error


class _Wanted:
    """A request to an engine, which is taken out of the queue once nobody wants its answer any more.

    That may happen while a thread still renders it, and a thread cannot be stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: Future[Answer] | None = None
        self._dropped = False

    def keep(self, queued: Future[Answer]) -> Future[Answer]:
        """Take note of the request, once it is in the queue, and return it."""
        with self._lock:
            self._queued = queued
            dropped = self._dropped
        if dropped:
            queued.cancel()
        return queued

    def drop(self) -> None:
        """Take the request out of the queue, now or as soon as it is there."""
        with self._lock:
            self._dropped = True
            queued = self._queued
        if queued is not None:
            queued.cancel()


class LocalMember:
    """A saved model that computes in this process, with the server's engine: one queue, and each prompt once."""

    def __init__(self, folder: Path, config: ScorerConfig) -> None:
        self.name = str(folder)
        self._folder = folder
        self._config = config
        self._engine: LocalEngine | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def open(self) -> About:
        """Load the model and check its canaries. Raises ArtifactError for a folder that cannot be used."""
        spec = read_spec(self._folder)
        try:
            # This is imported here, since a program that asks only servers does not need torch.
            from rewardlab.serve.engine.local import LocalEngine
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        (served,) = (await asyncio.to_thread(self._loaded, LocalEngine)).served()
        return About(
            joins_texts=spec.renderer.joins_texts,
            tolerance=served.tolerance,
            arithmetic=served.dtype,
            affine=served.affine,
            scale=_scale(served.reward_mean, served.reward_std),
        )

    def _loaded(self, engines: type[LocalEngine]) -> LocalEngine:
        """Load the model.

        A thread that is loading cannot be stopped. So if this was closed in the meantime, the model is released as soon
        as it is there. Raises ConfigError then.
        """
        engine = engines.load(
            {"model": self._folder},
            precision=self._config.precision,
            device=_device(self._config),
            token_budget=self._config.token_budget,
            max_waiting_tokens=UNLIMITED,
        )
        with self._lock:
            if not self._closed:
                self._engine = engine
                # A scorer that is dropped without being closed lets its model go too.
                weakref.finalize(self, engine.let_go).atexit = False
                return engine
        engine.close()
        raise ConfigError(CLOSED)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Found]:
        """Return the model's answers, as `Member.score` says."""
        assert self._engine is not None, "open it first"
        found: list[Found | None] = [None] * len(rollouts)
        parts = _parts(rollouts)
        jobs = [asyncio.ensure_future(self._answers([rollouts[number] for number in part])) for part in parts]
        try:
            for part, answers in zip(parts, await asyncio.gather(*jobs), strict=True):
                for number, answer in zip(part, answers, strict=True):
                    found[number] = answer
        finally:
            for job in jobs:
                job.cancel()
        return [one for one in found if one is not None]

    async def _answers(self, rollouts: Sequence[Rollout]) -> list[Found]:
        """Return the answers to one request. The request is taken out of the queue if nobody waits for it any more."""
        from rewardlab.serve.engine.api import TooLongError

        engine, request = self._engine, _Wanted()
        assert engine is not None
        try:
            queued = await asyncio.to_thread(lambda: request.keep(self._submit(engine, rollouts)))
            scored = await asyncio.wrap_future(queued)
        except TooLongError as error:
            # A rendered text of so many characters is refused before it is split, and with it the whole request.
            if len(rollouts) > 1:
                return [found for one in rollouts for found in await self._answers([one])]
            return [Found(score=None, error=str(error))]
        except BaseException:
            request.drop()
            raise
        return [
            Found(
                score=group.scores[0],
                error=group.errors.get(0),
                digest=scored.digest,
                num_tokens=group.num_tokens[0],
                truncated_tokens=group.truncated_tokens[0],
                truncated_reply_tokens=group.truncated_reply_tokens[0] if group.truncated_reply_tokens else None,
            )
            for group in scored.groups
        ]

    def _submit(self, engine: LocalEngine, rollouts: Sequence[Rollout]) -> Future[Answer]:
        from rewardlab.client.protocol import ScoreRequest

        common: dict[str, Any] = {"truncate": self._config.truncate, "on_error": "null"}
        if rollouts[0].rendered is None:
            turns = [[message.as_dict() for message in rollout.conversation] for rollout in rollouts]
            request = ScoreRequest.model_validate(common | {"conversations": turns})
        else:
            request = ScoreRequest.model_validate(common | {"token_ids": self._token_ids(engine, rollouts)})
        return engine.submit(engine.prepare(request))

    def _token_ids(self, engine: LocalEngine, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Return the tokens of rendered rollouts. The model's tokenizer splits texts, and adds no special tokens."""
        texts = [rollout.rendered for rollout in rollouts if isinstance(rollout.rendered, str)]
        encoded = iter(engine.tokenise(texts, None)[1] if texts else ())
        return [
            list(next(encoded)) if isinstance(rollout.rendered, str) else list(rollout.rendered or ())
            for rollout in rollouts
        ]

    async def aclose(self) -> None:
        """End the engine's thread and free the model."""
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            closing = asyncio.get_running_loop().run_in_executor(None, engine.close)
        except RuntimeError:
            # The process ends, and begins no more work in other threads.
            engine.close()
        else:
            await closing


def _device(config: ScorerConfig) -> Any:
    """Return the device for a model in this process; None for the usual one.

    Of several processes on a machine each takes its own GPU. A new thread begins with the first one, whatever the
    trainer's thread has chosen, so all of them would meet there.
    """
    if config.device is not None or "LOCAL_RANK" not in os.environ:
        return config.device
    from rewardlab.distributed.sharding import device_of_rank

    return device_of_rank()


class ServedMember:
    """A model behind an address: rewardlab's server, vLLM or SGLang. `#NAME` at its end names one of several."""

    def __init__(self, url: str, config: ScorerConfig) -> None:
        from rewardlab.client.asynchronous import AsyncRewardClient

        self.name = url
        self._config = config
        address, settings = at_address(url, config.client)
        self._client: AsyncRewardClient = AsyncRewardClient(address, **{**settings, "truncate": config.truncate})
        self._tokenizer: Any = None

    async def open(self) -> About:
        """Connect, and check the canaries. Raises EndpointError, ConfigError or ArtifactError."""
        endpoint = await self._client.spec()
        artifact = self._client.config.artifact
        spec = None if artifact is None else read_spec(Path(artifact))
        served = endpoint.served
        joins_texts = bool(served.joins_texts) if served is not None else bool(spec and spec.renderer.joins_texts)
        affine = None if spec is None else spec.affine
        if served is not None:
            # A server of an earlier version has a calibration but does not tell it.
            affine = served.affine or affine
            scale = _scale(served.reward_mean, served.reward_std)
        else:
            stored = None if spec is None else spec.calibration
            scale = None if stored is None else _scale(stored.reward_mean, stored.reward_std)
        return About(
            joins_texts=joins_texts,
            tolerance=_tolerance(endpoint),
            arithmetic=endpoint.precision or "unknown",
            affine=affine,
            scale=scale,
        )

    async def score(self, rollouts: Sequence[Rollout]) -> list[Found]:
        """Return the model's answers, as `Member.score` says. Raises EndpointError, noting which rollouts waited."""
        found: dict[int, Found] = {}
        turns = [number for number, rollout in enumerate(rollouts) if rollout.rendered is None]
        rendered = [number for number, rollout in enumerate(rollouts) if rollout.rendered is not None]
        try:
            if turns:
                answers = await self._client.answers([rollouts[number].conversation for number in turns])
                found |= zip(turns, map(self._found, answers), strict=True)
            if rendered:
                tokens = [self._tokens(rollouts[number]) for number in rendered]
                answers = await self._client.answer_token_ids(tokens)
                found |= zip(rendered, map(self._found, answers), strict=True)
        except EndpointError as error:
            error.add_note(_waiting(rollouts))
            raise
        return [found[number] for number in range(len(rollouts))]

    def _found(self, answer: Answered) -> Found:
        endpoint = self._client.checked(answer.digest)
        return Found(
            score=answer.score,
            error=answer.error,
            digest=answer.digest,
            num_tokens=answer.num_tokens,
            truncated_tokens=answer.truncated_tokens,
            truncated_reply_tokens=answer.truncated_reply_tokens,
            tolerance=None if endpoint is None else _tolerance(endpoint),
        )

    def _tokens(self, rollout: Rollout) -> Sequence[int]:
        """Return the tokens of a rendered rollout. Raises ConfigError for a text if there is no tokenizer for it."""
        if not isinstance(rollout.rendered, str):
            return rollout.rendered or ()
        artifact = self._client.config.artifact
        if artifact is None:
            raise ConfigError(
                f"{self.name}: a server is sent token ids, and {rollout.name} is rendered text. Give "
                f"client={{'artifact': FOLDER}}, the reward-model folder that is served, whose tokenizer splits it; or "
                f"give messages, or token ids."
            )
        if self._tokenizer is None:
            from rewardlab.data.chat import load_tokenizer

            self._tokenizer = load_tokenizer(str(artifact))
        ids: list[int] = self._tokenizer(rollout.rendered, add_special_tokens=False)["input_ids"]
        return ids

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _tolerance(endpoint: EndpointSpec) -> float | None:
    if endpoint.served is not None:
        return endpoint.served.tolerance
    return None if endpoint.precision is None else SCORE_TOLERANCE[endpoint.precision]


def _scale(mean: float | None, std: float | None) -> Scale | None:
    return None if mean is None or std is None or std <= 0 else Scale(mean=mean, std=std)


def _parts(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return, for each request, the numbers of its rollouts.

    A request holds either only rendered rollouts or only conversations, since these are sent in different fields.
    Replies to one prompt are in the same request, so that the engine computes the prompt once.
    """
    groups: dict[tuple[bool, object], list[int]] = {}
    for number, rollout in enumerate(rollouts):
        is_rendered = rollout.rendered is not None
        key = number // ROWS if is_rendered else rollout.conversation[:-1]
        groups.setdefault((is_rendered, key), []).append(number)
    parts: list[list[int]] = []
    kinds: list[bool] = []
    for (is_rendered, _), numbers in groups.items():
        if not parts or kinds[-1] != is_rendered or len(parts[-1]) + len(numbers) > ROWS:
            parts.append([])
            kinds.append(is_rendered)
        parts[-1] += numbers
    return parts


def _waiting(rollouts: Sequence[Rollout]) -> str:
    more = f" to {rollouts[-1].name}" if len(rollouts) > 1 else ""
    return f"{rollouts[0].name}{more} waited for these scores; none of them is used."


def require_scores(found: Sequence[Found], rollouts: Sequence[Rollout], *, who: str) -> list[float]:
    """Return the scores. Raises RolloutError naming the rollouts that have none, or one that is not finite."""
    if len(found) != len(rollouts):
        raise RolloutError(f"{who}: {number_of(len(found), 'score')} for {number_of(len(rollouts), 'rollout')}.")
    lacking = {number: one for number, one in enumerate(found) if not _is_finite(one.score)}
    if lacking:
        first = next(iter(lacking))
        cause = lacking[first].error or f"the score is {lacking[first].score!r}, which is not a finite number"
        more = f" {len(lacking) - 1} more have no score either." if len(lacking) > 1 else ""
        raise RolloutError(
            f"{rollouts[first].name} has no score by {who}: {cause.rstrip('.')}.{more}", rollouts=tuple(lacking)
        )
    return [float(one.score) for one in found if one.score is not None]


def _is_finite(score: float | None) -> bool:
    return score is not None and math.isfinite(score)
