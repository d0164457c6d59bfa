"""Results that need the texts of a sample of rows: baselines of words and lengths, languages, samples.

The rows are read a second time, so that the texts of the others are never in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis import stats
from rewardlab.analysis.inspection import Baselines, Sample, Tongues
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linear import PENALTIES, Matrix, compare, cross_validate, held_out_logits
from rewardlab.analysis.text_features import (
    WORD_PENALTIES,
    length_features,
    scale_of,
    scaled,
    vocabulary_of,
    word_features,
)
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.optional import import_optional
from rewardlab.core.terminal import visible
from rewardlab.core.types import Comparison, Conversation, Estimate, Preference
from rewardlab.curation.inspecting.columns import num_words
from rewardlab.curation.inspecting.measure import names_of
from rewardlab.data.chat import Renderer

BoolArray = npt.NDArray[np.bool_]

MAX_ROWS: Final = 10_000
"""Baselines are fitted on at most this many rows; more would cost minutes and change little."""
MAX_WORDS: Final = 20_000
"""The bag of words knows at most this many words, the most frequent ones, which bounds memory."""
MAX_CHARACTERS: Final = 20_000
"""The bag of words and the guess of a language look only at this many characters at the beginning of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row as the baselines use it."""

    prompt_key: str
    num_replies: int
    comparisons: tuple[Comparison, ...]


class Drawn:
    """The rows of the sample, added one after the other. Only their words are kept."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []
        self.lengths: list[int] = []
        self.bags: list[list[str]] = []
        self._words: dict[str, str] = {}

    def add(self, preference: Preference) -> None:
        """Keep the parts of a row that the baselines need."""
        comparisons = preference.comparisons
        self.judged.append(
            Judged(prompt_key=preference.key, num_replies=len(preference.replies), comparisons=comparisons)
        )
        for reply in preference.replies:
            self.lengths.append(num_words(reply))
            words = dict.fromkeys(_said(reply)[:MAX_CHARACTERS].casefold().split())
            # Each word is one object, however many replies have it.
            self.bags.append([self._words.setdefault(word, word) for word in words])

    def baselines(self, roots_G: npt.NDArray[np.int64], *, seed: int) -> Baselines:
        """Return how often length alone, and words alone, rank held-out pairs as labelled.

        `roots_G` has the root of each row. A fold consists of whole roots. The penalty is chosen by the loss on these
        folds too.
        """
        if len(np.unique(roots_G)) < 2 or not any(one.comparisons for one in self.judged):
            return Baselines(accuracy={}, rows=len(self.judged), missing="they need at least two conversations")
        lengths = length_features(np.array(self.lengths, dtype=np.float64))
        words = word_features(self.bags, vocabulary_of(self.bags, most=MAX_WORDS))
        accuracy, missing, by_strength = {}, "", tuple[tuple[str, Estimate], ...]()
        for name, features, penalties in (
            ("length only", lengths, PENALTIES),
            ("bag of words", words, WORD_PENALTIES),
        ):
            try:
                outcomes, names, decided = self._outcomes(features, penalties, roots_G, seed)
                accuracy[name] = stats.by_conversation(stats.proportion(outcomes, names))
            except DataError as error:
                missing = f"{name}: {error}"
            else:
                if name == "bag of words":
                    by_strength = self._by_strength(outcomes, names, decided)
        return Baselines(accuracy=accuracy, rows=len(self.judged), missing=missing, by_strength=by_strength)

    def _outcomes(
        self, features: Matrix, penalties: Sequence[float], roots_G: npt.NDArray[np.int64], seed: int
    ) -> tuple[FloatArray, Sequence[str], BoolArray]:
        """Return the outcomes of the decided comparisons, judged by a model that saw nothing of their conversations,
        the names of these, and which of all comparisons are decided."""
        scale = scale_of(compare(self.judged, features).differences)
        data = compare(self.judged, scaled(features, scale), roots_G)
        logits = held_out_logits(data, cross_validate(data, penalties=penalties, seed=seed))
        decided = data.labels != 0.5
        outcomes = np.heaviside(np.where(data.labels > 0.5, logits, -logits)[decided], 0.5)
        return outcomes, names_of(data.roots_C[decided]), decided

    def _by_strength(
        self, outcomes: FloatArray, names: Sequence[str], decided: BoolArray
    ) -> tuple[tuple[str, Estimate], ...]:
        """Return the accuracy on comparisons of low and of high strength, divided at their median."""
        strengths = np.array(
            [np.nan if one.strength is None else one.strength for row in self.judged for one in row.comparisons]
        )[decided]
        if not np.isfinite(strengths).any():
            return ()
        border = float(np.nanmax(strengths[strengths <= np.nanmedian(strengths)]))
        if not (strengths > border).any():  # most have the highest
            border = float(np.nanmax(strengths[strengths < border], initial=-np.inf))
        halves = {f"strength up to {border:g}": strengths <= border, f"strength above {border:g}": strengths > border}
        if not all(half.any() for half in halves.values()):
            return ()
        return tuple(
            (
                name,
                stats.by_conversation(
                    stats.proportion(outcomes[half], [names[n] for n in np.flatnonzero(half).tolist()])
                ),
            )
            for name, half in halves.items()
        )


def _said(turns: Conversation) -> str:
    return "\n".join(turn.content for turn in turns)


class Guesser:
    """Guesses the language of replies, if the package for it is installed."""

    def __init__(self) -> None:
        self._classify: Any = None
        self.missing = ""
        self._found: list[tuple[str, str]] = []
        try:
            self._classify = import_optional("py3langid", "guessing languages").classify
        except DataError:
            self.missing = 'languages are guessed only with py3langid: pip install "rewardlab[data]"'

    def add(self, reply: Conversation, prompt_key: str) -> None:
        """Guess the language of a reply."""
        if self._classify is not None:
            language, _ = self._classify(_said(reply)[:MAX_CHARACTERS])
            self._found.append((str(language), prompt_key))

    def tongues(self, scripts: Mapping[str, int]) -> Tongues:
        """Return the share of each script and language."""
        letters = sum(scripts.values())
        counts = Counter(language for language, _ in self._found)
        keys = [key for _, key in self._found]
        return Tongues(
            letters=letters,
            scripts={name: count / letters for name, count in Counter(scripts).most_common()},
            languages={
                language: stats.proportion([float(own == language) for own, _ in self._found], keys)
                for language, _ in counts.most_common()
            },
            sampled=len(self._found),
            missing=self.missing,
        )


def sample_of(preference: Preference, renderer: Renderer | None) -> Sample:
    """Return a row as text, and as the model sees it."""
    return Sample(
        place=preference.id,
        prompt=_turns(preference.prompt),
        replies=tuple(_turns(reply) for reply in preference.replies),
        judged="; ".join(map(_in_words, preference.comparisons)),
        rendered=()
        if renderer is None
        else tuple(_rendered(preference, reply, renderer) for reply in preference.replies),
    )


def _turns(turns: Conversation) -> tuple[tuple[str, str], ...]:
    return tuple((turn.role, turn.content) for turn in turns)


def _in_words(one: Comparison) -> str:
    """Return a judgement in words; replies are counted from 0, as in the rows and in `rewardlab data show`."""
    if one.label == 0.5:
        said = f"replies {one.first} and {one.second} are tied"
    else:
        better, other = (one.first, one.second) if one.label > 0.5 else (one.second, one.first)
        sure = "" if one.label in (0.0, 1.0) else f" with probability {max(one.label, 1 - one.label):g}"
        said = f"reply {better} is better than {other}{sure}"
    strength = "" if one.strength is None else f", strength {one.strength:g}"
    return said + strength + ("" if one.annotator is None else f", by {visible(one.annotator)}")


def _rendered(preference: Preference, reply: Conversation, renderer: Renderer) -> str:
    """Return a conversation as the tokens that the model reads, decoded one by one, with the border of the reply."""
    try:
        found = renderer.render(preference.prompt, reply)
    except RenderError as error:
        return f"not rendered: {error}"
    pieces = [renderer.tokenizer.decode([int(token)]) for token in found.token_ids]
    border = found.prompt_tokens
    cut = f" ({found.truncated_tokens} tokens of the prompt are cut)" if found.truncated_tokens else ""
    return f"{len(pieces)} tokens{cut}: {'|'.join(pieces[:border])}⟦reply⟧{'|'.join(pieces[border:])}⟦score read here⟧"
