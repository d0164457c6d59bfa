"""Gold scores by a language model as judge: every pair of replies to a prompt, in both orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewardlab.core.bars import bar
from rewardlab.gold.chat_api import ChatApi, RequestRefusedError
from rewardlab.gold.engine import DEFAULT_ENGINE
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.judging.judge import EQUAL, Judge, Opinion, Question, Verdict, questions
from rewardlab.gold.judging.labelling import pairs_of, settled
from rewardlab.gold.judging.tally import Tally
from rewardlab.gold.kept_results import Kept, key_of
from rewardlab.gold.pool import Finished
from rewardlab.gold.scoring import ScoringConfig
from rewardlab.gold.workers import Accept, anyone, team_of


class ServedJudge:
    """One server as a source of opinions; a part is one question."""

    def __init__(self, url: str, scoring: ScoringConfig, config: JudgeConfig) -> None:
        """Raise ConfigError for an address, a token or a prompt that is unusable."""
        from rewardlab.client.config import token_in

        self.name = url
        self.places = scoring.concurrency
        self._api = ChatApi(
            url,
            model=scoring.served_model_name,
            token=token_in(scoring.token_env, flag="--token-env"),
            concurrency=scoring.concurrency,
            timeout_s=scoring.timeout_s,
            attempts=scoring.attempts,
        )
        self._judge = Judge(self._api.complete, config, lost={RequestRefusedError: "refused"})

    @property
    def identity(self) -> dict[str, Any]:
        """What decides an opinion, the model and how it is asked; whole once the source is open."""
        return {**self._api.identity, **self._judge.decides()}

    async def open(self) -> None:
        """Find the model. Raises EndpointError, ConfigError."""
        await self._api.open()

    async def ask(self, items: Sequence[Question]) -> Sequence[Opinion]:
        """Return the opinions. Raises PassingError, EndpointError as `ChatApi.complete`."""
        return [await self._judge.ask(item) for item in items]

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


def judges_of(scoring: ScoringConfig, config: JudgeConfig) -> list[ServedJudge]:
    """Return the servers that settings name, none of them open. Raises ConfigError."""
    return [ServedJudge(url, scoring, config) for url in scoring.url]


@dataclass(kw_only=True)
class Judged:
    """Where the verdicts on rows are found, once all were asked for."""

    identity: Mapping[str, Any]
    kept: Kept
    tally: Tally = field(default_factory=Tally)
    lost: dict[str, Opinion] = field(default_factory=dict)
    """Key -> an opinion without a verdict, worth asking for again: no answer came, or the server refused."""
    cut: int = 0
    num_tokens: int = 0
    """Tokens of the questions and answers of this call, as far as the server tells."""

    def row(self, row: GoldRow) -> GoldRow:
        """Return a row with its scores and what was said of its pairs, and count it."""
        verdicts = {}
        for first, second in pairs_of(row):
            texts = row.responses[first], row.responses[second]
            verdicts[first, second] = self._verdict(row, *map(str, texts))
        self.tally.see(row.key, verdicts.values())
        return settled(row, verdicts)

    def _verdict(self, row: GoldRow, first: str, second: str) -> Verdict:
        if first.strip() == second.strip():
            return EQUAL
        keys = [question_key(one, self.identity) for one in questions(row.prompt, first, second)]
        nothing = Opinion(share=None, cause="failed")
        return Verdict(
            orders=tuple(
                self.lost.get(key, nothing) if found is None else Opinion(**found)
                for key, found in zip(keys, self.kept.each(keys), strict=True)
            )
        )


def question_key(question: Question, identity: Mapping[str, Any]) -> str:
    """Return the name of an opinion: by prompt, replies in their order, model, and text of the question."""
    prompt = [[turn.role, turn.content] for turn in question.prompt]
    return key_of(prompt=prompt, first=question.first, second=question.second, judge=dict(identity))


def judge_all(
    rows: Callable[[], Iterable[GoldRow]], judges: Sequence[ServedJudge], kept: Kept, *, accept: Accept = anyone
) -> Judged:
    """Have every pair of replies judged that is not kept yet. Raises what a judge raises; what was said is kept.

    `accept` is called with the identity of the judges before anything is asked, and may raise.
    """
    return asyncio.run(_judge_all(rows, judges, kept, accept))


async def _judge_all(
    rows: Callable[[], Iterable[GoldRow]], judges: Sequence[ServedJudge], kept: Kept, accept: Accept
) -> Judged:
    # Rows that cannot be read are refused before a server is asked.
    total = sum(2 * len(pairs_of(row)) for row in rows())
    async with team_of(lambda: judges, DEFAULT_ENGINE) as team:
        accept(team.identity)
        judged = Judged(identity=team.identity, kept=kept)
        with bar(title="judging", unit=" questions", total=total) as shown:

            def keep(finished: Finished[Question, Opinion]) -> None:
                _keep(judged, finished)
                shown.update(len(finished))
                shown.set_postfix_str(f"{judged.num_tokens:,} tokens", refresh=False)

            await team.run(_missing(rows(), judged, shown.update), keep)
        return judged


def _keep(judged: Judged, finished: Finished[Question, Opinion]) -> None:
    results = []
    for asked, found in finished:
        for number, question in enumerate(asked):
            opinion = Opinion(share=None, cause="failed", detail=found) if isinstance(found, str) else found[number]
            key = question_key(question, judged.identity)
            judged.num_tokens += (opinion.prompt_tokens or 0) + (opinion.tokens or 0)
            if opinion.cause in ("failed", "refused") and opinion.tokens is None:
                judged.lost[key] = opinion
            else:
                results.append((key, opinion.as_dict()))
    if results:
        judged.kept.add(results)


def _missing(rows: Iterable[GoldRow], judged: Judged, update: Callable[[int], object]) -> Iterator[list[Question]]:
    """Yield the questions that are not answered, each a part of its own; equal questions of a row are asked once."""
    asked: set[str] = set()
    for row in rows:
        for first, second in pairs_of(row):
            texts = str(row.responses[first]), str(row.responses[second])
            for question in () if texts[0].strip() == texts[1].strip() else questions(row.prompt, *texts):
                key = question_key(question, judged.identity)
                if key in judged.kept or key in asked:
                    update(1)
                    continue
                asked.add(key)
                yield [question]
        asked.clear()
