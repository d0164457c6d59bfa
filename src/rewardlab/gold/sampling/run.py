"""Sample replies to every prompt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import at_home
from rewardlab.curation.rewriting import files_of
from rewardlab.data.finding import Source as DataSource
from rewardlab.data.finding import find_sources
from rewardlab.data.hub import hub_facts
from rewardlab.data.judgements import seeded_generator
from rewardlab.gold.files.inputs import digests_of
from rewardlab.gold.files.layouts import write_responses, write_rows
from rewardlab.gold.files.parts import Shard, shard_of
from rewardlab.gold.files.prompts import Prompt, read_prompts
from rewardlab.gold.files.rows import GoldRow, read_gold_rows
from rewardlab.gold.kept_results import Kept
from rewardlab.gold.pool import Finished, Source
from rewardlab.gold.sampling.asks import Ask, asks_of
from rewardlab.gold.sampling.config import TEMPLATE_ARGUMENTS, DrawConfig, SampleConfig
from rewardlab.gold.sampling.servers import Reply, ServedSampler
from rewardlab.gold.stage import (
    Asked,
    Place,
    State,
    claimed,
    earlier,
    read_manifest,
    require_few_errors,
    require_own,
    require_same_source,
    write_manifest,
    writing,
)
from rewardlab.gold.workers import team_of

logger = logging.getLogger("rewardlab")
FACTS: Final = ("stop", "tokens", "prompt_tokens", "logprob")
"""Facts about how a reply was sampled that are kept, beside its seed."""
REPEATS: Final = {"auto": None, "keep": True, "once": False}
THOUGHTS: Final = ("<think>", "</think>")
"""Marks between which models write what is not part of their answer; some templates write the first of them."""
AT_A_TIME: Final = 1_000
"""Replies of an earlier output that are taken over together."""


Sampler = Source[Ask, Reply]
"""Whatever draws replies."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was written."""

    place: Place
    counts: Mapping[str, Any]
    """`prompts`, `replies`, `errors`, `cut`, `identical` (replies that equal an earlier one to the same prompt),
    `thoughts` (replies with a mark of `THOUGHTS`), `tokens`."""
    examples: tuple[str, ...] = ()
    """Why replies are missing, a few of them."""
    was_complete: bool = False
    """Whether it had all been done before."""
    tokens_per_s: float | None = None
    """Tokens a second of the replies that were drawn now; None if none were."""


@dataclass(kw_only=True)
class _Work:
    """The work on an output."""

    config: SampleConfig
    kept: Kept
    decides: Mapping[str, Any] = field(default_factory=dict)
    """What decides a reply besides its seed, once the sampler is known."""
    has_taken_over: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    tokens: int = 0


def sample(config: SampleConfig) -> Sampled:
    """Sample the replies. The same call goes on from what an interrupted one left, and then writes the same files.

    Raises ConfigError if the output is of something else, DataError for prompts that cannot be read, EndpointError if
    no server is left, ModelError for a model that cannot be loaded, and DataError after the output is written if too
    many replies are missing.
    """
    shard = shard_of(config.shard)
    place = Place.of(config.output if shard is None else shard.path(config.output))
    asked = _asked(config, shard)
    state = _state(config, place, asked)
    if not config.restart and state == "complete":
        logger.info("%s: is complete", place.rows)
        return _before(place)
    prompts = _prompts(config, shard)
    with claimed(place, restart=config.restart) as kept:
        work = _Work(config=config, kept=kept)
        began = time.monotonic()
        identity = asyncio.run(_draw(work, prompts, place))
        spent = time.monotonic() - began
        with writing(place, asked):
            sampled = _write(work, prompts, place, work.tokens / spent if work.tokens else None)
            write_manifest(place, asked, decided={"identity": identity}, counts=sampled.counts)
    errors = sampled.counts["errors"]
    require_few_errors(
        place,
        errors=errors,
        replies=errors + sampled.counts["replies"],
        most=config.max_error_fraction,
        examples=sampled.examples,
    )
    return sampled


def _asked(config: SampleConfig, shard: Shard | None) -> Asked:
    settings = {
        "model": config.model or config.sampler.served_model_name,
        "backend": config.sampler.backend,
        "precision": config.sampler.precision,
        "num_responses": config.draw.num_responses,
        "seed": config.draw.seed,
        **config.draw.decides(),
        "system": config.system,
        "limit": config.limit,
        "repeats": config.repeats,
        "split": config.hf_split,
        "shard": None if shard is None else f"{shard.number + 1}/{shard.count}",
    }
    return Asked(stage="sample", settings=settings, inputs={**digests_of(_files(config)), **_commits(config)})


def _commits(config: SampleConfig) -> dict[str, str]:
    """Return name -> commit of data sets of the hub with prompts, as far as commits are known."""
    if at_home(config.prompts).is_file():
        return {}
    on_hub = [one for one in _sources(config) if one.is_on_hub]
    facts = {one.label: hub_facts(one.name, one.split, streaming=False, shuffle_buffer=None) for one in on_hub}
    return {name: str(told["commit"]) for name, told in facts.items() if told["commit"]}


def _state(config: SampleConfig, place: Place, asked: Asked) -> State:
    """Return the state of the output. Raises as `require_own`, and ConfigError if the files of the model changed."""
    state = require_own(place, asked, read=_files(config), overwrite=config.overwrite)
    folder = Path(config.model)
    if state not in ("complete", "has errors") or not config.model or not folder.is_dir():
        return state
    from rewardlab.gold.sampling.local import digest_of

    manifest = read_manifest(place)
    assert manifest is not None
    if manifest["decided"]["identity"].get("model") == digest_of(folder):
        return state
    if config.overwrite:
        return "other"
    raise ConfigError(
        f"--model {folder}: is not the model that {place.rows} was drawn from; its files have changed. Name another "
        f"--output, or draw again with --overwrite."
    )


def _files(config: SampleConfig) -> list[Path]:
    """Return the files with the prompts; none for data of the hub."""
    path = at_home(config.prompts)
    if path.is_file():
        return [path]
    return [file for source in _sources(config) for file in files_of(source)]


def _sources(config: SampleConfig) -> Sequence[DataSource]:
    """Return where the prompts are. Raises DataError as `find_sources`, in the words of --prompts."""
    try:
        return find_sources([config.prompts], config.hf_split)
    except DataError as error:
        raise DataError(str(error).replace(f"dataset {config.prompts!r}", f"--prompts {config.prompts}", 1)) from error


def _prompts(config: SampleConfig, shard: Shard | None) -> list[Prompt]:
    """Return the prompts that are replied to. Raises DataError as `read_prompts`, ConfigError for an empty part."""
    how: dict[str, Any] = {"split": config.hf_split, "system": config.system, "repeats": REPEATS[config.repeats]}
    read = partial(read_prompts, config.prompts, **how)
    if shard is None:
        found = list(read())
        return [found[place] for place in _drawn(config, len(found))]
    # The prompts are read twice, so that only this part is in memory.
    drawn = _drawn(config, sum(1 for _ in read()))
    own = shard.some_rows(len(drawn))
    wanted = set(drawn[own.start : own.stop])
    return [prompt for place, prompt in enumerate(read()) if place in wanted]


def _drawn(config: SampleConfig, count: int) -> Sequence[int]:
    """Return the places, in order, of the prompts that are drawn, over all parts."""
    if config.limit is None or config.limit >= count:
        return range(count)
    order = seeded_generator(config.draw.seed, "prompts").permutation(count)[: config.limit]
    drawn: list[int] = sorted(order.tolist())
    return drawn


def samplers_of(config: SampleConfig) -> list[Sampler]:
    """Return the sources of replies, none of them open. Raises ConfigError for an unusable address or token."""
    if config.sampler.backend == "http":
        return [ServedSampler(url, config.draw, config.sampler) for url in config.sampler.url]
    from rewardlab.gold.sampling.local import LocalSampler

    return [LocalSampler(config.model, config.draw, config.sampler)]


async def _draw(work: _Work, prompts: Sequence[Prompt], place: Place) -> Mapping[str, Any]:
    """Draw all replies that are not kept, and return what drew them."""
    make = partial(samplers_of, work.config)
    async with team_of(make, work.config.workers) as team:
        identity = team.identity
        work.decides = {**work.config.draw.decides(), **identity}
        require_same_source(place, identity, overwrite=work.config.overwrite or work.config.restart)
        if not work.config.restart:
            _take_over(work, place)
        total = len(prompts) * work.config.draw.num_responses
        with bar(title="sampling", unit=" replies", total=total) as shown:

            def keep(finished: Finished[Ask, Reply]) -> None:
                _keep(work, finished)
                shown.update(sum(len(items) for items, _ in finished))
                shown.set_postfix_str(f"{work.tokens:,} tokens", refresh=False)

            await team.run(_parts(work, prompts, work.config.items_per_part, shown.update), keep)
        return identity


def _parts(work: _Work, prompts: Sequence[Prompt], size: int, update: Any) -> Iterator[list[Ask]]:
    """Yield what is to be drawn in parts whose borders depend on the prompts alone.

    A part of which something is missing is drawn as a whole, so that a resumed run computes the same batches as an
    uninterrupted one; but replies that were taken over from an earlier output are not drawn again.
    """
    asks = (ask for _, several in _asks(work, prompts) for ask in several)
    while part := list(islice(asks, size)):
        missing = [ask for ask in part if ask.key(work.decides) not in work.kept]
        if missing and not work.has_taken_over:
            missing = part
        update(len(part) - len(missing))
        if missing:
            yield missing


def _asks(work: _Work, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, list[Ask]]]:
    return asks_of(prompts, work.config.draw.num_responses, work.config.draw.seed)


def _keep(work: _Work, finished: Finished[Ask, Reply]) -> None:
    results: list[tuple[str, Reply]] = []
    for asks, replies in finished:
        for number, ask in enumerate(asks):
            reply: Reply = {"error": replies} if isinstance(replies, str) else replies[number]
            key = ask.key(work.decides)
            if "error" in reply:
                work.errors[key] = str(reply["error"])
            else:
                results.append((key, reply))
                work.tokens += reply.get("tokens") or 0
    if results:
        work.kept.add(results)


def _take_over(work: _Work, place: Place) -> None:
    """Take over the replies of an earlier output that the same settings would draw."""
    manifest = earlier(place)
    if manifest is None or manifest["decided"].get("identity") is None:
        return
    settings = manifest["asked"]["settings"]
    before = {name: settings[name] for name in (*DrawConfig().decides(), TEMPLATE_ARGUMENTS) if name in settings}
    decides = {**before, **manifest["decided"]["identity"]}
    if decides != work.decides:
        return
    waiting: list[tuple[str, Reply]] = []
    for row in read_gold_rows(place.rows):
        for index, (text, facts) in enumerate(zip(row.responses, row.samples, strict=True)):
            if text is None:
                continue
            key = Ask(prompt=row.prompt, index=index, seed=int(facts["seed"])).key(decides)
            if key not in work.kept:
                waiting.append((key, {"text": text, **{name: facts[name] for name in FACTS if name in facts}}))
        if len(waiting) >= AT_A_TIME:
            work.kept.add(waiting)
            waiting = []
    if waiting:
        work.kept.add(waiting)
    work.has_taken_over = True


def _write(work: _Work, prompts: Sequence[Prompt], place: Place, tokens_per_s: float | None) -> Sampled:
    counts: Counter[str] = Counter(prompts=0, replies=0, errors=0, cut=0, identical=0, thoughts=0, tokens=0)
    examples: dict[str, None] = {}

    def done() -> Iterator[GoldRow]:
        for prompt, asks in _asks(work, prompts):
            keys = [ask.key(work.decides) for ask in asks]
            replies = list(work.kept.each(keys))
            facts: list[dict[str, Any]] = []
            for ask, key, reply in zip(asks, keys, replies, strict=True):
                why = work.errors.get(key, "it was not drawn")
                facts.append({"seed": ask.seed})
                facts[-1] |= {"error": why} if reply is None else {name: reply[name] for name in FACTS if name in reply}
                if reply is None and len(examples) < 3:
                    examples.setdefault(why)
            texts = [None if reply is None else str(reply["text"]) for reply in replies]
            there = [text for text in texts if text is not None]
            counts["prompts"] += 1
            counts["replies"] += len(there)
            counts["errors"] += len(texts) - len(there)
            counts["identical"] += len(there) - len(set(there))
            counts["thoughts"] += sum(any(mark in text for mark in THOUGHTS) for text in there)
            counts["cut"] += sum(one.get("stop") == "length" for one in facts)
            counts["tokens"] += sum(one.get("tokens") or 0 for one in facts)
            yield GoldRow(
                id=prompt.id, prompt=prompt.prompt, responses=tuple(texts), samples=tuple(facts), extra=prompt.extra
            )

    write_rows(place.rows, (row.as_json() for row in done()))
    write_responses(place.twin, read_gold_rows(place.rows))
    return Sampled(place=place, counts=dict(counts), examples=tuple(examples), tokens_per_s=tokens_per_s)


def _before(place: Place) -> Sampled:
    manifest = read_manifest(place)
    assert manifest is not None
    return Sampled(place=place, counts=manifest["counts"], was_complete=True)
