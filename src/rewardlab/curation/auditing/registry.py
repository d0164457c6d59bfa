"""Every check of an audit: its name, its meaning, its score, its threshold, and how many rows it may flag.

Reports, the defaults of `--remove` and the docs follow this table; the functions that score are found by these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import short
from rewardlab.core.values import did_you_mean, require


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How many rows may be flagged before the audit fails."""

    number: float
    is_share: bool = False

    def __str__(self) -> str:
        return f"{100 * self.number:g}%" if self.is_share else f"{self.number:g}"

    def allows(self, flagged: int, rows: int) -> bool:
        """Return whether `flagged` of `rows` rows are within the limit."""
        return flagged <= (self.number * rows if self.is_share else self.number)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kind of defect. A row is flagged if its score reaches the threshold; scores of sound rows are low."""

    name: str
    meaning: str
    """The defect in one line."""
    score: str
    """What the score of a row counts."""
    threshold: float
    limit: Limit | None = None
    """The number of rows that may be flagged; None if the check never fails the audit."""
    is_removed: bool = False
    """Whether `--fix` removes its rows unless `--remove` says otherwise."""


NONE: Final = Limit(number=0)
OF_ROWS: Final = (
    Check(
        name="unusable-rows",
        meaning="reading drops the row",
        score="1 for a row that is dropped",
        threshold=1,
        limit=Limit(number=0.05, is_share=True),
        is_removed=True,
    ),
    Check(
        name="identical-replies",
        meaning="two replies to be compared are the same text",
        score="comparisons of equal replies, case and white space aside",
        threshold=1,
        limit=NONE,
    ),
    Check(name="empty-replies", meaning="a reply has no text", score="1 for a row with one", threshold=1, limit=NONE),
    Check(name="ties", meaning="a judgement prefers neither reply", score="such judgements of the row", threshold=1),
    Check(
        name="unequal-lengths",
        meaning="a judged reply is many times longer than the other",
        score="words of the longer reply to those of the shorter, the largest of the row",
        threshold=10,
    ),
    Check(
        name="overlong",
        meaning="a conversation is longer than --max-seq-len",
        score="tokens (without --model: words) that do not fit, of the longest conversation",
        threshold=1,
    ),
    Check(
        name="overlong-replies",
        meaning="a reply is left out and not cut, since what may be cut is not enough",
        score="tokens (without --model: words) of the reply that do not fit, of the longest one; at least 1",
        threshold=1,
    ),
    Check(
        name="template-refuses",
        meaning="the chat template of --model refuses the conversation",
        score="replies that cannot be rendered",
        threshold=1,
        limit=Limit(number=0.05, is_share=True),
    ),
    Check(
        name="template-residue",
        meaning="a reply has marks of a chat template: <|im_start|>, [INST], ### Response:, Human: at its end",
        score="marks in the replies",
        threshold=1,
        limit=NONE,
    ),
    Check(
        name="special-tokens",
        meaning="control tokens are typed in the prompt (with --model, that tokenizer's, in the replies too)",
        score="control tokens typed",
        threshold=1,
        limit=NONE,
    ),
    Check(
        name="refusals",
        meaning="a reply begins like a refusal, or speaks of itself as an AI language model",
        score="such replies",
        threshold=1,
    ),
    Check(
        name="truncated-endings",
        meaning="a reply stops in the middle of a sentence or of a block of code",
        score="such replies",
        threshold=1,
    ),
    Check(
        name="encoding-damage",
        meaning="a text was decoded wrongly: mojibake, U+FFFD, control characters, half a surrogate pair",
        score="damaged texts of the row (each turn is one)",
        threshold=1,
        limit=NONE,
    ),
    Check(
        name="repetition",
        meaning="a reply of 40 words or more repeats itself",
        score="share of a reply's runs of 4 words that stand in it before, the largest of the row",
        threshold=0.5,
    ),
    Check(
        name="prompt-repeated",
        meaning="a reply contains the last turn of its prompt (of 8 words or more)",
        score="such replies",
        threshold=1,
    ),
)
ACROSS: Final = (
    Check(
        name="duplicate-rows",
        meaning="an earlier row of the split has the same prompt, replies and judgements",
        score="earlier rows that are the same",
        threshold=1,
        limit=NONE,
        is_removed=True,
    ),
    Check(
        name="duplicate-pairs",
        meaning="an earlier row has judged the same two replies alike, in a row that is not the same",
        score="judgements of the row that an earlier one has made",
        threshold=1,
    ),
    Check(
        name="near-duplicates",
        meaning="an earlier row of the split judges similar replies, not equal ones, in the same way",
        score="different texts in its group of near duplicates, for all but the first",
        threshold=2,
        limit=Limit(number=0.01, is_share=True),
        is_removed=True,
    ),
    Check(
        name="near-contradictions",
        meaning="replies and prompts that are alike, but not all the same, are judged both ways",
        score="judgements of the row that another row contradicts so",
        threshold=1,
    ),
    Check(
        name="near-prompts",
        meaning="the prompt is alike to another one of the split, but not the same",
        score="different prompts in its group of near duplicates",
        threshold=2,
    ),
    Check(
        name="contradictions",
        meaning="the same two replies to a prompt are judged both ways",
        score="judgements of the row on such pairs",
        threshold=1,
        limit=NONE,
        is_removed=True,
    ),
    Check(
        name="cycles",
        meaning="the judgements of one prompt go round: A beats B, B beats C, C beats A",
        score="replies that the row's cycle has (a strongly connected component)",
        threshold=3,
        limit=NONE,
    ),
    Check(
        name="longer-always-wins",
        meaning="in every one of a prompt's judgements the longer reply wins (at least 5)",
        score="judgements of the prompt, if the longer reply wins all",
        threshold=5,
    ),
    Check(
        name="leaked-prompts",
        meaning="a later split has the same prompt",
        score="rows of later splits with this prompt",
        threshold=1,
    ),
    Check(
        name="leaked-conversations",
        meaning="a later split has rows of the same conversation: first turn, or a reply that is not a phrase",
        score="rows of later splits with this root",
        threshold=1,
    ),
    Check(
        name="leaked-near-prompts",
        meaning="a later split has a prompt that is alike",
        score="rows of later splits in the group of near duplicates of this prompt",
        threshold=1,
    ),
    Check(
        name="leaks",
        meaning="any of the three above (shares of all four: of the rows that have a later split)",
        score="ways in which the row leaks",
        threshold=1,
        limit=NONE,
        is_removed=True,
    ),
)
AGAINST: Final = (
    Check(
        name="overlap-prompts",
        meaning="the prompt is one of the data named by --against",
        score="1 for a prompt that is there",
        threshold=1,
        limit=NONE,
        is_removed=True,
    ),
    Check(
        name="overlap-13",
        meaning="the prompt shares a run of 13 words with a prompt of the data named by --against",
        score="runs of 13 words of the prompt that are there too",
        threshold=1,
        limit=NONE,
        is_removed=True,
    ),
    Check(
        name="overlap-8",
        meaning="most runs of 8 words of the prompt stand in prompts of the data named by --against",
        score="share of the prompt's runs of 8 words that are there too",
        threshold=0.5,
    ),
)
CHECKS: Final[Mapping[str, Check]] = MappingProxyType({check.name: check for check in (*OF_ROWS, *ACROSS, *AGAINST)})
"""Name -> check, in the order of reports."""
LEAKS: Final = ("leaked-prompts", "leaked-conversations", "leaked-near-prompts", "leaks")


def adjusted(thresholds: Sequence[str], limits: Sequence[str]) -> dict[str, Check]:
    """Return all checks with the thresholds and limits that were asked for, each as `check=number`.

    A limit is a number of rows, a share such as `1%`, or `none`. Raises ConfigError for anything else.
    """
    checks = dict(CHECKS)
    for entry in thresholds:
        name, text = _split(entry, "--threshold")
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        require(0 < number < float("inf"), f"--threshold {short(entry)}: the threshold must be a number above 0.")
        checks[name] = replace(checks[name], threshold=number)
    for entry in limits:
        name, text = _split(entry, "--fail-on")
        checks[name] = replace(checks[name], limit=_limit(text, entry))
    return checks


def require_checks(names: Sequence[str], flag: str) -> None:
    """Raise ConfigError for a name that is not one of a check."""
    for name in names:
        if name not in CHECKS:
            near = did_you_mean(name, CHECKS)
            raise ConfigError(f"{flag} {short(name)}: no such check.{near} Checks: {', '.join(CHECKS)}.")


def _split(entry: str, flag: str) -> tuple[str, str]:
    name, equals, text = entry.partition("=")
    require(bool(equals), f"{flag} {short(entry)}: write it as check=number, such as {flag} duplicate-rows=5.")
    require_checks([name], flag)
    return name, text


def _limit(text: str, entry: str) -> Limit | None:
    if text == "none":
        return None
    is_share = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    require(
        0 <= number < float("inf") and (is_share or number.is_integer()) and not (is_share and number > 100),
        f"--fail-on {short(entry)}: must be a number of rows, a share such as 1%, or none.",
    )
    return Limit(number=number / 100 if is_share else number, is_share=is_share)
