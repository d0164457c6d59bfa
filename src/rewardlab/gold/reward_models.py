"""Reward models as sources of scores: a folder in this process or in several, our server, vLLM or SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.files import read_json
from rewardlab.core.spec import REFUSING, SPEC_FILE, read_spec
from rewardlab.gold.engine import DEFAULT_ENGINE
from rewardlab.gold.files.rows import HALF, GoldRow, is_encodable
from rewardlab.gold.foreign import find_model
from rewardlab.gold.kept_results import Kept, key_of
from rewardlab.gold.pool import Finished, PassingError
from rewardlab.gold.scoring import ScoringConfig
from rewardlab.gold.servers import may_pass
from rewardlab.gold.workers import Accept, Team, anyone, team_of
from rewardlab.model.config import BUILTIN_NAMES
from rewardlab.serve.file_scoring.backends import Backend, LocalBackend, LocalModel, Scores
from rewardlab.serve.file_scoring.rows import Asked

TRUNCATE: Final = {"auto": None, "cut": True, "refuse": False}
"""`--overlong` -> whether a client lets conversations be cut; None by the rule of the model."""
LANGUAGE_MODELS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the names of architectures that write text."""
REPLIES_AT_A_TIME: Final = 256
"""Replies after which no further row joins a part: few, so that little is lost if it stops, but enough to fill
micro-batches."""
CHARACTERS_AT_A_TIME: Final = 500_000
"""Characters of replies and prompts after which no further row joins a part, so that long rows are kept sooner."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """What a source says about the replies to one prompt."""

    scores: Scores
    num_tokens: int
    """Tokens of the conversations, as far as they are known."""


class RewardModel:
    """A source of scores. Its items are prompts with replies."""

    def __init__(self, name: str, backend: Backend, *, asked: Mapping[str, Any]) -> None:
        """Score by `backend`. `asked` holds the settings that decide a score."""
        self.name = name
        self.places = backend.num_parts
        self.asked = asked
        self.identity: dict[str, Any] = {}
        """What decides a score, once it is open."""
        self._backend = backend

    async def open(self) -> None:
        """Load or connect, and check the canaries. Raises RewardlabError."""
        decided = await self._backend.start({})
        # The digest of a server's model decides a score; kernels are left out, as they move it by less than tolerance.
        told = {name: decided[name] for name in ("digest", "precision") if name in decided}
        self.identity = {**self.asked, **told}

    async def ask(self, items: Sequence[Asked]) -> Sequence[RowScores]:
        """Return the scores of the replies to each prompt. Raises as `Source.ask` does."""
        try:
            answer = await self._backend.score_rows(items)
            return [*map(RowScores, answer.scores, answer.num_tokens or [0] * len(items))]
        except EndpointError as error:
            if may_pass(error):
                raise PassingError(str(error)) from error
            raise

    async def close(self) -> None:
        """Let the model go."""
        await self._backend.close()


def reward_models(model: str, config: ScoringConfig, *, flag: str = "--model") -> list[RewardModel]:
    """Return the sources that settings name, none of them open.

    A model of another project is imported first, as `find_model` says; `flag` is what names it in messages.

    Raises ConfigError for a model that is missing or gives no scores, ArtifactError for a folder that cannot be used.
    """
    if config.backend == "local":
        if not model:
            raise ConfigError("--model is missing: name the folder of the gold reward model, or its hub name.")
        _require_reward_model(model, flag)
        found = find_model(model, flag=flag)
        backend = _local(str(found.folder), config)
        asked = {name: value for name, value in backend.identity.items() if name != "backend"}
        # The spec of an import holds the time when it was made, so its hash differs from machine to machine.
        asked |= {"overlong": backend.model.overlong} | ({} if found.source is None else {"model": found.source})
        return [RewardModel(found.name, backend, asked=asked)]
    if config.backend == "chat":
        raise ConfigError("--backend chat: a language model as judge gives no scores to compare. Name a reward model.")
    folder = str(find_model(model, flag=flag).folder) if model else ""
    return [_remote(url, folder, config) for url in config.url]


def _require_reward_model(model: str, flag: str) -> None:
    """Raise ConfigError for a language model, which gives no scores."""
    folder = Path(model)
    if (folder / SPEC_FILE).is_file():
        return
    facts = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    kinds = [str(one) for one in facts.get("architectures") or ()] if isinstance(facts, dict) else []
    if model.lower() in BUILTIN_NAMES or any(kind.endswith(LANGUAGE_MODELS) for kind in kinds):
        raise ConfigError(
            f"{flag} {model}: is a language model, and gives no scores. Name a reward model, as `rewardlab train` and "
            f"`rewardlab import` write; a language model can be a judge behind a server (--backend chat)."
        )


def _local(model: str, config: ScoringConfig) -> Any:
    overlong = config.overlong
    if overlong == "auto":
        overlong = "refuse" if read_spec(Path(model)).renderer.truncation in REFUSING else "cut"
    local = LocalModel(
        folder=model,
        precision=config.precision,
        token_budget=config.micro_token_budget,
        compute=config.compute,
        overlong=overlong,
        max_length=config.max_length,
    )
    if config.processes == 1:
        return LocalBackend(local)
    from rewardlab.serve.file_scoring.processes import ProcessBackend

    return ProcessBackend(local, config.processes)


def _remote(url: str, model: str, config: ScoringConfig) -> RewardModel:
    from rewardlab.client import AsyncRewardClient
    from rewardlab.client.config import token_in
    from rewardlab.serve.file_scoring.remote import RemoteBackend

    client = AsyncRewardClient(
        url,
        model=config.served_model_name,
        token=token_in(config.token_env, flag="--token-env"),
        artifact=model or None,
        max_concurrency=config.concurrency,
        timeout_s=config.timeout_s,
        attempts=config.attempts,
        truncate=TRUNCATE[config.overlong],
    )
    bare = read_spec(Path(model)).renderer.joins_texts if model else None
    backend = RemoteBackend(client, config.backend, model=config.served_model_name, bare=bare)
    return RewardModel(url, backend, asked={"served model": config.served_model_name, "overlong": config.overlong})


# --- scoring --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Scored:
    """Where the scores of rows are found, once all of them were asked for."""

    identity: Mapping[str, Any]
    kept: Kept
    errors: dict[str, str] = field(default_factory=dict)
    """Key -> why there is no score."""
    cut: int = 0
    """Replies of the rows so far of which something was cut before they were scored."""
    num_tokens: int = 0
    """Tokens of the conversations that were scored by this call, as far as they are known."""

    def row(self, row: GoldRow) -> GoldRow:
        """Return a row with its scores."""
        scores, errors = self.of(row)
        return replace(row, gold=scores, gold_errors=errors)

    def of(self, row: GoldRow) -> tuple[tuple[float | None, ...], dict[str, str]]:
        """Return the score of each reply of a row, and index of a reply -> why it has none."""
        keys = [None if text is None else reply_key(row, text, self.identity) for text in row.responses]
        found = iter(self.kept.each([key for key in keys if key is not None]))
        entries = [None if key is None else next(found) for key in keys]
        self.cut += sum("cut" in entry for entry in entries if entry is not None)
        scores = tuple(None if entry is None else float(entry["score"]) for entry in entries)
        errors = {
            str(place): "no reply was sampled" if key is None else self.errors.get(key, "it was not scored")
            for place, (key, entry) in enumerate(zip(keys, entries, strict=True))
            if entry is None
        }
        return scores, errors


def reply_key(row: GoldRow, reply: str, identity: Mapping[str, Any]) -> str:
    """Return the name of the score of a reply: by prompt, reply, model and arithmetic."""
    return key_of(prompt=[[turn.role, turn.content] for turn in row.prompt], reply=reply, model=dict(identity))


def score_all(
    rows: Callable[[], Iterable[GoldRow]], sources: Sequence[RewardModel], kept: Kept, *, title: str = "scoring"
) -> Scored:
    """Score the replies of rows that are not kept yet. `rows` gives all rows each time that it is called.

    Raises what a source raises; what was scored is kept.
    """
    return score_by(rows, team_of(lambda: sources, DEFAULT_ENGINE), kept, title=title)


def score_by(
    rows: Callable[[], Iterable[GoldRow]],
    team: AbstractAsyncContextManager[Team[Asked, RowScores]],
    kept: Kept,
    *,
    title: str,
    accept: Accept = anyone,
) -> Scored:
    """Score as `score_all` does, by the workers of `team`.

    `accept` is called with what decides the scores before anything is scored, and may raise.
    """
    return asyncio.run(_score_by(rows, team, kept, title, accept))


async def _score_by(
    rows: Callable[[], Iterable[GoldRow]],
    team: AbstractAsyncContextManager[Team[Asked, RowScores]],
    kept: Kept,
    title: str,
    accept: Accept,
) -> Scored:
    # Rows that cannot be read are refused before a model is loaded.
    total = sum(len(row.responses) for row in rows())
    async with team as workers:
        accept(workers.identity)
        scored = Scored(identity=workers.identity, kept=kept)
        with bar(title=title, unit=" replies", total=total) as shown:
            collector = _Collector(scored, shown)
            await workers.run(_parts(rows(), scored, shown.update), collector.keep)
        return scored


class _Collector:
    """Keeps the scores that are finished."""

    def __init__(self, scored: Scored, shown: Any) -> None:
        """Keep into `scored`; `shown` is a progress bar."""
        self._scored = scored
        self._shown = shown

    def keep(self, finished: Finished[Asked, RowScores]) -> None:
        """Keep scores, and note why a reply has none."""
        results: list[tuple[str, Mapping[str, Any]]] = []
        for asked, found in finished:
            for number, one in enumerate(asked):
                told = RowScores([found] * len(one.replies), 0) if isinstance(found, str) else found[number]
                self._scored.num_tokens += told.num_tokens
                for reply, entry in zip(one.replies, told.scores, strict=True):
                    key = reply_key(GoldRow(id="", prompt=_turns(one), responses=()), reply, self._scored.identity)
                    if isinstance(entry, str):
                        self._scored.errors[key] = entry
                        continue
                    score, *cut = entry if isinstance(entry, list) else [entry]
                    results.append((key, {"score": score, **({"cut": cut} if cut else {})}))
                self._shown.update(len(one.replies))
        if self._scored.num_tokens:
            self._shown.set_postfix_str(f"{self._scored.num_tokens:,} tokens", refresh=False)
        if results:
            self._scored.kept.add(results)


def _is_missing(row: GoldRow, text: str, scored: Scored) -> bool:
    """Return whether a reply is to be scored; for one that no model can read, note the cause at once."""
    key = reply_key(row, text, scored.identity)
    for what, several in (("prompt", [turn.content for turn in row.prompt]), ("reply", [text])):
        if not all(map(is_encodable, several)):
            scored.errors[key] = f"the {what} {HALF}"
            return False
    return key not in scored.kept


def _turns(asked: Asked) -> Any:
    assert not isinstance(asked.prompt, str), "rows hold their prompts as turns"
    return asked.prompt


def _parts(rows: Iterable[GoldRow], scored: Scored, update: Callable[[int], object]) -> Iterator[list[Asked]]:
    """Yield what is to be scored in parts; replies of one prompt stay together, and equal ones are scored once."""
    part: list[Asked] = []
    replies = characters = 0
    for row in rows:
        texts = dict.fromkeys(text for text in row.responses if text is not None)
        missing = tuple(text for text in texts if _is_missing(row, text, scored))
        update(len(row.responses) - len(missing))
        if not missing:
            continue
        part.append(Asked(row.prompt, missing))
        replies += len(missing)
        characters += part[-1].num_characters()
        if replies >= REPLIES_AT_A_TIME or characters >= CHARACTERS_AT_A_TIME:
            yield part
            part, replies, characters = [], 0, 0
    if part:
        yield part
