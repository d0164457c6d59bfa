"""The nouns of the system, in the order in which data flows (see docs/design.md).

Legend: K replies of one preference, S shared tokens. Nothing here knows about torch.
"""

from __future__ import annotations

import hashlib
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError

IntArray = npt.NDArray[np.int32]
Log = Callable[[str], None]
"""Takes a line for the log."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as in chat APIs."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return the mapping that chat templates expect."""
        return {"role": self.role, "content": self.content}


Conversation = tuple[Message, ...]
UNLISTED: Final = (str, bytes, Mapping, Set, Message)
"""What is not a list though Python goes through it: by characters, by bytes, by keys, or in an order of its own; and a
turn."""


def folded(text: str) -> str:
    """Return a text in one case and one spelling of its accented letters (Unicode's composed form, NFC)."""
    # Folding may take a letter apart again: that of "ΐ" has three characters, that of its capital two.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def prompt_key(prompt: Sequence[Message]) -> str:
    """Return a short hash that is equal for prompts that differ only in case, white space and the spelling of accented
    letters (one character or two).

    Splits, checks for leaks and clustered intervals identify prompts by this key.
    """
    # The separators are control characters, so that a text cannot imitate the border between two turns.
    normal = "\x1e".join(f"{turn.role}\x1f{' '.join(folded(turn.content).split())}" for turn in prompt)
    return hashlib.sha256(normal.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One judgement: reply `first` against reply `second` of the same preference, by their indices."""

    first: int
    second: int
    label: float = 1.0
    """Probability that `first` is preferred; 0.5 is a tie."""
    weight: float = 1.0
    """Weight in the loss, at least 0."""
    margin: float = 0.0
    """Additive margin in logits, at least 0, in favour of the preferred reply."""
    strength: float | None = None
    """How strongly the judge preferred it, in the unit of the data; `--strength-as` says how it is used."""
    annotator: str | None = None
    """Who judged, where a row holds several judgements of the same replies. Tokens and scores do not keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One prompt, K ≥ 2 replies and the judgements about them."""

    id: str
    """Where the row came from: `file:line` or `dataset[split]:row`."""
    source: str
    """Name of the dataset, for metrics by source."""
    prompt: Conversation
    replies: tuple[Conversation, ...]
    """Each reply is one or more turns that follow the prompt, the last by the assistant."""
    comparisons: tuple[Comparison, ...]
    ranking: tuple[int, ...] | None = None
    """Reply indices from best to worst, strict; set where the data ranks all replies."""

    @property
    def key(self) -> str:
        """`prompt_key` of the prompt."""
        return prompt_key(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroup:
    """A preference as tokens: the tokens that all replies share once, then one suffix a reply.

    ``shared + suffixes[k]`` is exactly the rendered (and, where needed, truncated) conversation k. The shared length
    only says how tokens are laid out for computing: replies may share their first tokens too. ``prompt_tokens`` says
    where the content of each reply begins.
    """

    preference_id: str
    source: str
    prompt_key: str
    shared: IntArray
    """[S], possibly empty."""
    suffixes: tuple[IntArray, ...]
    """K arrays of at least one token."""
    prompt_tokens: tuple[int, ...]
    """For each reply, the number of tokens before its content."""
    truncated_tokens: tuple[int, ...]
    """For each reply, the number of prompt tokens that were cut to fit the limit."""
    comparisons: tuple[Comparison, ...]
    ranking: tuple[int, ...] | None = None
    num_typed: int = 0
    """Replies in whose conversation a message contains a control token as text."""
    truncated_reply_tokens: tuple[int, ...] = ()
    """For each reply, the number of its own tokens that were cut from its middle; zeros where none is given."""
    numbers: tuple[int, ...] = ()
    """For each reply, its number in the row of the data, which its score is filed under; 0 to K − 1 where none is
    given. Replies that do not fit the limit of length have no place here, and their numbers are left out. Comparisons
    and ranking count the replies that are here."""

    def __post_init__(self) -> None:
        if not self.truncated_reply_tokens:
            object.__setattr__(self, "truncated_reply_tokens", (0,) * len(self.suffixes))
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.suffixes))))

    @property
    def num_replies(self) -> int:
        """K."""
        return len(self.suffixes)

    @property
    def num_tokens(self) -> int:
        """Tokens computed when the shared part is computed once."""
        return len(self.shared) + sum(len(suffix) for suffix in self.suffixes)

    @property
    def num_unshared_tokens(self) -> int:
        """Tokens computed when every reply has its own copy of the shared part."""
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """[K] tokens of each whole conversation."""
        return tuple(len(self.shared) + len(suffix) for suffix in self.suffixes)

    def conversation(self, reply: int) -> IntArray:
        """Return all tokens of one rendered conversation."""
        return np.concatenate([self.shared, self.suffixes[reply]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Numerators and counts over comparisons; means are taken once, at the end, over everything.

    Adding the sums of any parts gives the sums of the whole, so no mean of means can arise.
    """

    loss: float = 0.0
    """Σ w·ℓ of the optimised loss: smoothing, margins and regularisers included."""
    weight: float = 0.0
    """Σ w, the divisor of the loss."""
    nll: float = 0.0
    """Σ −[y log p + (1−y) log(1−p)] with raw labels and p = σ(β d), over finite comparisons."""
    correct: float = 0.0
    """Comparisons ranked as labelled; a tie of scores counts one half; label ties are left out."""
    margin: float = 0.0
    """Σ of score differences, preferred minus other; label ties are left out."""
    comparisons: int = 0
    decided: int = 0
    """Finite comparisons whose label is not a tie: the divisor of accuracy and margin."""
    score_ties: int = 0
    label_ties: int = 0
    non_finite: int = 0
    """Comparisons with a NaN or infinite score. They are counted here and left out of everything else."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in _SUM_FIELDS})

    @property
    def mean_loss(self) -> float:
        """Mean of the optimised loss."""
        return _ratio(self.loss, self.weight)

    @property
    def mean_nll(self) -> float:
        """Negative log-likelihood of the raw labels."""
        return _ratio(self.nll, self.comparisons - self.non_finite)

    @property
    def accuracy(self) -> float:
        """Share ranked as labelled, ties one half."""
        return _ratio(self.correct, self.decided)

    @property
    def mean_margin(self) -> float:
        """Mean score difference, preferred minus other."""
        return _ratio(self.margin, self.decided)


_SUM_FIELDS = tuple(field.name for field in fields(Sums))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its error bar; tables are built from these, never from a bare float."""

    value: float
    low: float
    high: float
    n: int
    """Number of independent observations: comparisons, or prompts where these repeat."""
    method: str
    """The method of the interval, short enough for the foot of a table."""
    level: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One scored reply, with what is needed to recompute every metric without the model."""

    preference_id: str
    source: str
    prompt_key: str
    reply: int
    score: float
    num_tokens: int
    """Tokens of the whole conversation as scored."""
    prompt_tokens: int
    truncated_tokens: int
    comparisons: tuple[Comparison, ...]
    """The judgements in which this reply is `first`."""
    truncated_reply_tokens: int = 0
    """Tokens that were cut from the middle of the reply."""

    @property
    def is_cut(self) -> bool:
        """Return whether something was cut from the prompt or the reply."""
        return self.truncated_tokens > 0 or self.truncated_reply_tokens > 0

    def as_dict(self) -> dict[str, object]:
        """Return a JSON row. A score of NaN or infinity becomes a text, so that the file stays valid JSON.

        `truncated_reply_tokens` is in it only where it is not 0: rows of all other models stay, byte for byte, what
        they were, and versions that do not know the column can read them.
        """
        row: dict[str, object] = {name: getattr(self, name) for name in _ROW_FIELDS}
        if not self.truncated_reply_tokens:
            del row["truncated_reply_tokens"]
        row["score"] = self.score if np.isfinite(self.score) else str(self.score)
        row["comparisons"] = [
            {name: getattr(comparison, name) for name in _COMPARISON_FIELDS} for comparison in self.comparisons
        ]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> ScoreRow:
        """Inverse of `as_dict`."""
        values = dict(row)
        values["score"] = float(values["score"])  # "nan" and "inf" parse
        values["comparisons"] = tuple(Comparison(**entry) for entry in values["comparisons"])
        # Other replies, and other models' scores of the same data, have the same names: each is held once.
        values |= {name: sys.intern(text) for name in _ROW_NAMES if type(text := values.get(name)) is str}
        return cls(**values)


_ROW_FIELDS = tuple(field.name for field in fields(ScoreRow))
_ROW_NAMES = ("preference_id", "source", "prompt_key")
_COMPARISON_FIELDS = tuple(field.name for field in fields(Comparison) if field.name != "annotator")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredComparison:
    """A comparison with the score rows of its two replies."""

    preference_id: str
    source: str
    prompt_key: str
    first: ScoreRow
    second: ScoreRow
    comparison: Comparison


def join_comparisons(rows: Sequence[ScoreRow]) -> Iterator[ScoredComparison]:
    """Yield every comparison that the score rows record, with the rows of its two replies.

    Raises DataError if a row names a reply that is not among the rows, and if a reply has two rows.
    """
    by_reply = {(row.source, row.preference_id, row.reply): row for row in rows}
    if len(by_reply) < len(rows):
        raise DataError("the score rows hold a reply twice. Rows of several files need ids that differ.")
    for row in rows:
        for comparison in row.comparisons:
            second = by_reply.get((row.source, row.preference_id, comparison.second))
            if second is None:
                raise DataError(
                    f"{row.preference_id} of {row.source}: reply {row.reply} is compared with reply "
                    f"{comparison.second}, which has no score row. Give the rows of all replies."
                )
            yield ScoredComparison(
                preference_id=row.preference_id,
                source=row.source,
                prompt_key=row.prompt_key,
                first=row,
                second=second,
                comparison=comparison,
            )


def is_readable(*texts: str) -> bool:
    """Return whether no text has half of a surrogate pair, which no tokenizer reads and no request can hold."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True
