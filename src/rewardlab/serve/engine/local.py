"""The engine in the server's process: saved reward models, a queue, one thread that computes, a cache of prompts."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rewardlab.client.protocol import ScoreRequest, ServedModel
from rewardlab.core.values import require
from rewardlab.data.pack import part_of, plan_replies
from rewardlab.serve.engine.answers import PreparedRequest, answer_of
from rewardlab.serve.engine.api import (
    DrainingError,
    EngineStats,
    NoCalibrationError,
    Scored,
    TooLongError,
    UnknownModelError,
    WrongDigestError,
)
from rewardlab.serve.engine.batching import RETRY_S, Batcher, finish
from rewardlab.serve.engine.prefix_cache import PrefixCache
from rewardlab.serve.engine.queued import Work, num_tokens
from rewardlab.serve.engine.request_tokens import Unit, request_tokens
from rewardlab.serve.engine.slots import AdapterFamily, EngineConfig, Slot, open_model

logger = logging.getLogger("rewardlab")
CHARACTERS_PER_TOKEN: Final = 16
"""A request may have so many characters, each reply with its own prompt, for every token that may wait."""


class LocalEngine:
    """Reward models of this process, on one device. Every method may be called from any thread."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        *,
        cache: PrefixCache,
        config: EngineConfig,
        family: AdapterFamily | None = None,
    ) -> None:
        """Start to compute for these models, which share the cache; `family` holds the adapters among them."""
        self._slots = dict(slots)
        self._cache = cache
        self._config = config
        self._family = family
        self._batcher = Batcher(
            token_budget=config.token_budget,
            max_waiting_tokens=config.max_waiting_tokens,
            max_batch_wait_ms=config.max_batch_wait_ms,
        )
        self._changing = threading.Lock()
        """Held while a model is swapped."""
        self._num_swaps = 0
        for slot in slots.values():
            self._free_in_time(slot)

    @classmethod
    def load(
        cls,
        models: Mapping[str, Path],
        *,
        adapters: Mapping[str, Path] | None = None,
        **settings: Any,
    ) -> LocalEngine:
        """Load and check the models, the first of which is the default, and start to compute.

        `adapters` are folders trained with LoRA from one base, which is in memory once; they come after the models.
        `settings` are the fields of EngineConfig.

        Raises ArtifactError if a folder fails its checks or an adapter belongs to another base model; ConfigError for
        impossible limits or kernels, or if a name is given twice.
        """
        adapters = adapters or {}
        require(bool(models or adapters), "no model is given. Name at least one folder that `rewardlab train` wrote.")
        for name in adapters:
            require(name not in models, f"{name}: a model and an adapter have this name. Rename one of them.")
        config = EngineConfig(**settings)
        cache = PrefixCache(config.cache_tokens)
        slots = {name: open_model(name, Path(folder), cache, config) for name, folder in models.items()}
        family = None
        if adapters:
            family = AdapterFamily(Path(next(iter(adapters.values()))), cache, config)
            for name, folder in adapters.items():
                slots[name] = family.install(name, *family.check(Path(folder)))
        return cls(slots, cache=cache, config=config, family=family)

    def served(self) -> Sequence[ServedModel]:
        """Return the models, the default one first."""
        return [slot.served for slot in self._slots.values()]

    def tokenise(self, texts: Sequence[str], name: str | None) -> tuple[str, Sequence[Sequence[int]]]:
        """Return (digest, tokens of each text) for texts that are rendered already, with nothing added.

        Raises UnknownModelError, and TooLongError before a text is split of which no tokens within the limit could be
        the whole: millions of characters would take the tokenizer from all others for many seconds.
        """
        slot = self._slot(name)
        renderer = slot.scorer.renderer
        for number, text in enumerate(texts):
            if renderer.most_characters is not None and len(text) > renderer.most_characters:
                raise TooLongError(
                    f"it has {len(text)} characters, too many for the model's limit of {renderer.spec.max_length} "
                    f"tokens. Shorten it; what is rendered already is never cut.",
                    param=f"token_ids.{number}",
                )
        encoded = []
        for text in texts:
            with slot.rendering:
                encoded.append(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
        return slot.served.digest, [list(map(int, ids)) for ids in encoded]

    def prepare(self, request: ScoreRequest) -> PreparedRequest:
        """Render and tokenise a request, by the one renderer of its model.

        Raises UnknownModelError, WrongDigestError, TooLongError, UnscorableError, or NoCalibrationError for an
        output that the model does not have, each with its `param`.
        """
        slot = self._slot(request.model)
        served = slot.served
        if request.digest is not None and request.digest != served.digest:
            raise WrongDigestError(
                f"the model {served.name!r} has the digest {served.digest}, not {request.digest:.80}.", param="digest"
            )
        if request.output not in served.outputs:
            raise NoCalibrationError(
                f"the model {served.name!r} holds no calibration, so it answers raw scores only.", param="output"
            )
        most = self._batcher.max_waiting_tokens
        tokens = request_tokens(
            request,
            slot.scorer.renderer,
            vocabulary=slot.scorer.model.config.vocab_size,
            turns=slot.rendering,
            max_characters=CHARACTERS_PER_TOKEN * most,
        )
        units = tuple(part for unit in tokens.units for part in self._parts(unit, slot))
        size = num_tokens(units)
        if size > most:
            raise TooLongError(f"the request has {size} tokens, and at most {most} may wait. Split it.")
        return PreparedRequest(
            slot=slot, tokens=replace(tokens, units=units), output=request.output, on_error=request.on_error
        )

    def submit(self, prepared: PreparedRequest) -> Future[Scored]:
        """Queue a prepared request and return the future of its answer.

        A cancelled future takes its request out of the queue. Raises QueueFullError or DrainingError.
        """
        work = Work(
            model=prepared.slot.model,
            units=prepared.tokens.units,
            num_replies=len(prepared.tokens.replies),
            finish=lambda work: answer_of(prepared, work),
        )
        if work.units:
            self._batcher.submit(work)
        else:
            finish(work)
        return work.future

    def swap(self, name: str, folder: Path) -> ServedModel:
        """Replace the model or adapter called `name` by the one in `folder`, and return it.

        The new model is loaded and checked in the caller's thread while the old one goes on, so for a time memory
        holds two. Requests prepared before are scored by the old one, which is freed after the last of them.

        Raises UnknownModelError, DrainingError, or ArtifactError if the folder fails its checks; in each case the
        old one stays.
        """
        self._slot(name)
        with self._changing:
            if not self.healthy():
                raise DrainingError("the engine is closed.", retry_after_s=RETRY_S[0])
            slot = self._open(name, Path(folder))
            self._free_in_time(slot)
            old, self._slots = self._slots[name], self._slots | {name: slot}
            self._num_swaps += 1
        logger.info("model %s: %s in place of %s", name, slot.served.digest, old.served.digest)
        self._later(old.model.forget)
        return slot.served

    def stats(self) -> EngineStats:
        """Return counts of what was done and what waits."""
        requests, tokens = self._batcher.waiting
        counts = self._batcher.counts
        return EngineStats(
            waiting_requests=requests,
            waiting_tokens=tokens,
            max_waiting_tokens=self._batcher.max_waiting_tokens,
            batches=counts.batches,
            computed_tokens=counts.computed_tokens,
            cached_tokens=counts.cached_tokens,
            prompt_tokens=counts.prompt_tokens,
            cache_tokens=self._cache.num_tokens,
            max_cache_tokens=self._cache.max_tokens,
            cache_off={name: slot.model.cache_off for name, slot in self._slots.items() if slot.model.cache_off},
            swaps=self._num_swaps,
            busy_s=counts.busy_s,
        )

    def healthy(self) -> bool:
        """Return whether the thread that computes is alive."""
        return self._batcher.alive()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that were taken; return whether none is left."""
        return self._batcher.drain(timeout_s)

    def close(self) -> None:
        """End the engine's thread and free its models; what still waits fails with DrainingError."""
        self._batcher.close()
        self._slots = {}
        self._cache.clear()

    def let_go(self) -> None:
        """Begin to do what `close` does, and wait for nothing.

        For garbage collection, which may run in a thread that the engine's one waits for.
        """
        self._slots = {}
        self._batcher.begin_end()

    def _open(self, name: str, folder: Path) -> Slot:
        """Load and check the model or adapter that takes over a name."""
        family = self._family
        if self._slots[name].adapted is None or family is None:
            return open_model(name, folder, self._cache, self._config)
        adapter, digest = family.check(folder)
        # This holds up the thread that computes only for a moment: adapters are small, and the files were read and
        # compared before.
        slot: Slot = self._batcher.call(lambda: family.install(name, adapter, digest)).result()
        return slot

    def _free_in_time(self, slot: Slot) -> None:
        """Take a slot's adapter off the backbone once no request needs the slot any more."""
        if slot.adapted is not None:
            weakref.finalize(slot, self._later, slot.adapted.remove).atexit = False

    def _later(self, job: Callable[[], Any]) -> None:
        """Do something in the thread that computes, if that has not ended."""
        with suppress(DrainingError):
            self._batcher.call(job)

    def _slot(self, name: str | None) -> Slot:
        slots = self._slots
        if not slots:
            raise DrainingError("the engine is closed.", retry_after_s=RETRY_S[0])
        if name is None:
            return next(iter(slots.values()))
        if name not in slots:
            raise UnknownModelError(f"there is no model {name[:80]!r}. Served are: {', '.join(slots)}.", param="model")
        return slots[name]

    def _parts(self, unit: Unit, slot: Slot) -> list[Unit]:
        """Return a unit in parts that fit into the token budget, as far as single conversations do."""
        pieces = sorted(
            itertools.chain.from_iterable(
                plan_replies([unit.group], self._batcher.token_budget, layout=slot.scorer.model.layout)
            )
        )
        return [
            Unit(group=part_of(unit.group, piece), places=unit.places[piece.first : piece.stop]) for piece in pieces
        ]
