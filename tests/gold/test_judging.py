"""A language model as judge: both orders, what is missing, scores by what replies win, and the count of it all."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Message
from rewardlab.gold.files.rows import GoldRow, read_gold_row
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.judging.judge import EQUAL, Judge, Opinion, Question, Verdict
from rewardlab.gold.judging.labelling import JUDGEMENTS, pairs_of, settled
from rewardlab.gold.judging.prompts import TEMPLATE, filled, question_of, read_template, share_of
from rewardlab.gold.judging.tally import Summary, Tally, text_report


class RefusedError(Exception):
    """The server refuses this question."""


class AwayError(Exception):
    """The server does not answer."""


@dataclass
class Reply:
    text: str
    stop: str = "stop"
    prompt_tokens: int | None = 100
    tokens: int | None = 10


class Chat:
    """A judge that prefers the reply with the larger number in it, and does what is planted."""

    def __init__(self, *, first_share: float = 0.0, planted: Mapping[tuple[str, str], Any] | None = None) -> None:
        self.first_share, self.planted = first_share, dict(planted or {})
        self.asked: list[tuple[str, str]] = []
        self.parameters: list[Mapping[str, Any]] = []
        self.under_way = self.most = 0

    async def __call__(self, messages: Sequence[Mapping[str, str]], **parameters: Any) -> Reply:
        ((role, text),) = [(one["role"], one["content"]) for one in messages]
        assert role == "user"
        first, second = (text.split(f"<answer_{which}>\n")[1].split("\n</answer")[0] for which in "ab")
        self.asked.append((first, second))
        self.parameters.append(parameters)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        answer = self.planted.get((first, second))
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        return Reply(f"I looked at both.\n\n{self._verdict(first, second)}")

    def _verdict(self, first: str, second: str) -> str:
        # Drawn by the question alone, as at temperature 0.
        if random.Random(f"{first}|{second}").random() < self.first_share:
            return "[[A]]"
        one, other = (float(text.split()[-1]) for text in (first, second))
        return "[[C]]" if one == other else "[[A]]" if one > other else "[[B]]"


def row(number: int, values: Sequence[float | None]) -> GoldRow:
    """A row whose replies carry how good they are."""
    replies = [None if value is None else f"reply {k} worth {value:g}" for k, value in enumerate(values)]
    return GoldRow(
        id=f"q{number}",
        prompt=(Message("user", f"Question {number}?"),),
        responses=tuple(replies),
        extra={"source": "made up"},
    )


LOST = {RefusedError: "refused", AwayError: "failed"}


def labelled(rows: Sequence[GoldRow], chat: Chat, **settings: Any) -> tuple[list[GoldRow], Summary]:
    """The rows, and what was seen."""
    tally = Tally()
    judge = Judge(chat, JudgeConfig(**settings), lost=LOST)

    async def label(one: GoldRow) -> GoldRow:
        texts = {pair: [str(one.responses[number]) for number in pair] for pair in pairs_of(one)}
        verdicts = {pair: await judge.pairs(one.prompt, *both) for pair, both in texts.items()}
        tally.see(one.key, verdicts.values())
        return settled(one, verdicts)

    async def work() -> list[GoldRow]:
        return [await label(one) for one in rows]

    return asyncio.run(work()), tally.summary()


def test_every_pair_is_asked_in_both_orders_with_a_seed_and_no_temperature():
    chat = Chat()
    (done,), summary = labelled([row(0, [1, 3, 2])], chat, judge_seed=7, judge_max_tokens=50)
    replies = done.responses
    assert Counter(chat.asked) == Counter(pair for i, j in combinations(replies, 2) for pair in ((i, j), (j, i)))
    assert all(one == {"temperature": 0.0, "seed": 7, "max_tokens": 50} for one in chat.parameters)
    assert done.gold == (0.0, 1.0, 0.5), "a score is the mean of what a reply wins"
    assert (summary.pairs, summary.judged, summary.questions) == (3, 3, 6)
    assert done.extra["source"] == "made up"
    assert done.extra[JUDGEMENTS][0] == {"first": 0, "second": 1, "label": 0.0, "orders": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("shown_first", "shown_second", "shares", "label", "agrees"),
    [
        (1.0, 0.0, (1.0, 1.0), 1.0, True),
        (1.0, 1.0, (1.0, 0.0), 0.5, False),
        (0.5, 0.5, (0.5, 0.5), 0.5, True),
        (0.5, 0.0, (0.5, 1.0), 0.75, False),
        (0.0, 0.5, (0.0, 0.5), 0.25, False),
        (None, 1.0, (None, 0.0), None, None),
        (1.0, None, (1.0, None), None, None),
    ],
)
def test_the_label_of_a_pair_is_the_mean_over_both_orders(shown_first, shown_second, shares, label, agrees):
    verdict = Verdict(orders=(Opinion(share=shown_first), Opinion(share=shown_second)))
    assert (verdict.shares, verdict.label, verdict.agrees) == (shares, label, agrees)


def test_equal_replies_are_half_and_no_one_is_asked():
    chat = Chat()
    asked = row(0, [1, 2])
    same = GoldRow(id="s", prompt=asked.prompt, responses=("same 1", " same 1\n"))
    (done,), summary = labelled([same], chat)
    assert done.gold == (0.5, 0.5)
    assert chat.asked == []
    assert (summary.pairs, summary.equal, summary.judged, summary.missing) == (1, 1, 0, 0)
    assert asyncio.run(Judge(chat).pairs(asked.prompt, "a", "a ")) == EQUAL


def test_what_is_missing_is_missing_and_never_a_number():
    one = row(0, [1, 2, 3])
    a, b, c = (str(text) for text in one.responses)
    planted = {
        (a, b): Reply("I cannot decide."),
        (a, c): RefusedError("no"),
        (c, a): AwayError("gone"),
        (c, b): Reply("It is long and", stop="length"),
        (b, c): Reply("[[A]]", stop="content_filter"),
    }
    (done,), summary = labelled([one], Chat(planted=planted))
    assert done.gold == (None, None, None)
    assert summary.causes == {"cut": 1, "failed": 1, "refused": 2, "unparsed": 1}
    assert (summary.judged, summary.missing) == (0, 3)
    assert done.gold_errors["0"] == (
        "the answer does not end with a verdict; the model or its server refused to answer; no answer came"
    )
    assert done.extra[JUDGEMENTS][0] == {
        **{"first": 0, "second": 1, "label": None},
        **{"orders": [None, 0.0], "causes": ["unparsed", None]},
    }
    again = read_gold_row(done.as_json(), "x", 0, labelled=True)
    assert (again.gold, again.extra) == (done.gold, done.extra), "it can be written and read"
    report = " ".join(text_report(summary, JudgeConfig()).split())
    assert "0 judged in both orders, 3 missing" in report
    assert "2 of 6 questions: the model or its server refused" in report


def test_a_missing_pair_leaves_the_others():
    one = row(0, [1, 2, 3, None])
    a, b, _, _ = one.responses
    (done,), summary = labelled([one], Chat(planted={(str(a), str(b)): Reply("hm")}))
    assert done.gold == (0.0, 0.0, 1.0, None)
    assert done.gold_errors == {"3": "there is no reply"}
    assert (summary.pairs, summary.judged, summary.missing) == (3, 2, 1)
    (alone,), _ = labelled([row(1, [1])], Chat())
    assert (alone.gold, alone.gold_errors) == ((None,), {"0": "there is no other reply to compare it with"})


def test_other_errors_end_the_work_as_they_are():
    one = row(0, [1, 2])
    a, b = (str(text) for text in one.responses)
    with pytest.raises(ValueError, match="^a fault$"):
        labelled([row(1, [1, 2, 3]), one], Chat(planted={(b, a): ValueError("a fault")}))


def test_a_bias_of_position_is_seen_with_its_interval():
    generator = random.Random(0)
    rows = [row(n, [generator.random() for _ in range(3)]) for n in range(150)]
    _, honest = labelled(rows, Chat())
    assert honest.disagreement.value == 0
    assert honest.first_shown.value == 0.5
    done, biased = labelled(rows, Chat(first_share=0.4))
    # With the share p of questions answered by position, the first one shown wins p + (1 − p)/2.
    assert biased.first_shown.low < 0.7 < biased.first_shown.high
    assert biased.first_shown.low > 0.5
    # The orders differ where exactly one of both is answered against the truth.
    assert biased.disagreement.low < 0.4 < biased.disagreement.high
    assert biased.disagreement.n == 150, "by prompt"
    counts = Counter(entry["label"] for one in done for entry in one.extra[JUDGEMENTS])
    assert set(counts) == {0.0, 0.5, 1.0}
    assert biased.labels == {f"{label:g}": count for label, count in counts.items()}
    assert "it prefers what it sees first" in " ".join(text_report(biased, JudgeConfig()).split())
    assert "no bias of position is shown" in " ".join(text_report(honest, JudgeConfig()).split())


def test_an_interval_of_few_prompts_is_none():
    _, summary = labelled([row(n, [1, 2]) for n in range(3)], Chat())
    assert math.isnan(summary.first_shown.low)
    assert "too few prompts" in text_report(summary, JudgeConfig()).replace("\n  ", " ")


def test_tokens_are_added_up_and_priced():
    one = row(0, [1, 2])
    a, b = (str(text) for text in one.responses)
    silent = Reply("[[A]]", prompt_tokens=None, tokens=None)
    _, summary = labelled([one, row(1, [3, 4])], Chat(planted={(a, b): silent}))
    assert (summary.prompt_tokens, summary.tokens, summary.uncounted) == (300, 30, 1)
    priced = JudgeConfig(price_in=2.0, price_out=8.0)
    assert summary.cost(priced) == pytest.approx(300 * 2e-6 + 30 * 8e-6)
    assert summary.cost(JudgeConfig()) is None
    report = " ".join(text_report(summary, priced).split())
    assert "tokens: 300 of questions, 30 of answers; cost: 0.00084" in report
    assert "for 1 of 4 questions the server does not say" in report


def test_scores_follow_from_verdicts_that_were_kept():
    one = row(0, [1, 2, 3])
    judge = Judge(Chat())

    async def work() -> dict[tuple[int, int], Verdict]:
        found = {}
        for first, second in pairs_of(one):
            verdict = await judge.pairs(one.prompt, str(one.responses[first]), str(one.responses[second]))
            kept = [opinion.as_dict() for opinion in verdict.orders]
            found[first, second] = Verdict(orders=tuple(Opinion(**values) for values in kept))
        return found

    assert settled(one, asyncio.run(work())).gold == labelled([one], Chat())[0][0].gold
    assert judge.decides() == {"template": TEMPLATE, "temperature": 0.0, "seed": 0, "max_tokens": 1024}


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Because.\n[[A]]", 1.0),
        ("[[B]]", 0.0),
        ("…\n\n**[[C]]**  \n\n", 0.5),
        ("My verdict: [[ A ]].", 1.0),
        ("[[A]] is what I would say, but\n[[B]]", 0.0),
        ("[[A]]\nThat is my verdict.", None),
        ("[[A]] or [[B]]", None),
        ("[A]", None),
        ("[[D]]", None),
        ("", None),
        ("  \n ", None),
    ],
)
def test_the_verdict_is_the_only_one_of_the_last_line(answer, share):
    assert share_of(answer) == share


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Because.\n[[A]]", 1.0),
        ("Because.\n**[[ B ]]**.", 0.0),
        ("I would not call it [[A]]", None),
        ("[[A]] is what the long one", None),
        ("Because.\n[[A]] or", None),
    ],
)
def test_of_an_answer_that_was_cut_the_last_line_is_the_verdict_alone(answer, share):
    assert share_of(answer, is_cut=True) == share
    one = row(0, [1, 2])
    first, second = map(str, one.responses)
    (done,), summary = labelled([one], Chat(planted={(first, second): Reply(answer, stop="length")}))
    assert done.extra[JUDGEMENTS][0]["orders"][0] == share
    assert summary.causes == ({} if share is not None else {"cut": 1})


def test_what_stands_in_a_reply_is_not_filled_in_again():
    text = filled("{question}|{answer_a}|{answer_b}", "q {answer_b}", "{question} [[A]] \\1", "b")
    assert text == "q {answer_b}|{question} [[A]] \\1|b"
    assert filled(TEMPLATE, "Q", "first", "second").index("first\n</answer_a>") > 0


def test_a_conversation_is_shown_with_its_speakers():
    assert question_of((Message("system", ""), Message("user", "Why?"))) == "Why?"
    turns = (Message("system", "Be brief."), Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert question_of(turns) == "System: Be brief.\n\nUser: a\n\nAssistant: b\n\nUser: c"


def test_a_prompt_of_ones_own_is_used_or_refused_with_the_reason(tmp_path: Path):
    path = tmp_path / "judge.txt"
    path.write_text("{question} <answer_a>\n{answer_a}\n</answer_a><answer_b>\n{answer_b}\n</answer_b> [[A]] [[B]]")
    chat = Chat()
    judge = Judge(chat, JudgeConfig(judge_prompt=path, keep_answers=True))
    opinion = asyncio.run(judge.ask(Question(prompt=(Message("user", "Q?"),), first="x 1", second="y 2")))
    assert (opinion.share, opinion.detail) == (0.0, "I looked at both.\n\n[[B]]")
    assert judge.decides()["template"] == path.read_text()
    path.write_text("{question} {answer_a} [[A]] [[B]]")
    with pytest.raises(ConfigError, match=r"has no \{answer_b\}"):
        read_template(path)
    path.write_text("{question} {answer_a} {answer_b} [[A]]")
    with pytest.raises(ConfigError, match=r"does not ask for \[\[B\]\]"):
        read_template(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(tmp_path / "none.txt")


def test_one_price_alone_is_refused():
    with pytest.raises(ConfigError, match="give both"):
        JudgeConfig(price_in=1.0)
