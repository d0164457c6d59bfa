"""Measures a chunk of rows: what an audit keeps of each. Runs in worker processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from rewardlab.core.errors import RenderError
from rewardlab.core.spec import STOP
from rewardlab.core.types import Conversation, Preference
from rewardlab.curation.auditing import texts as of_text
from rewardlab.curation.auditing.facts import CUTS, REPLY_HASHES, ROW_CHECKS, Facts
from rewardlab.curation.auditing.overlaps import Others, text_of_prompt
from rewardlab.curation.near import SHINGLE_WORDS, least_hashes
from rewardlab.curation.rows import ReadRow
from rewardlab.curation.shingles import Hashes, WordHashes, shingles_of, words_of
from rewardlab.data.bulk import render_replies
from rewardlab.data.chat import Renderer, ReplyTooLong
from rewardlab.data.layout import Rendered, build_group
from rewardlab.data.markers import Markers
from rewardlab.data.rows import FILTERS
from rewardlab.data.splits import Texts

RUN_WORDS: Final = 4
"""Length in words of the runs whose repetition in a reply is counted."""
REPEATING_WORDS: Final = 40
"""Shortest reply that is looked at for repetition."""
PROMPT_WORDS: Final = 8
"""Shortest last turn of a prompt that is looked for in the replies."""
BY_CAUSE: Final = {
    "identical_replies": "identical-replies",
    "empty_reply": "empty-replies",
    "bad_unicode": "encoding-damage",
    "no_comparison": "ties",
    "tied_ranking": "ties",
}
"""Cause for which reading drops a row, which fails `unusable-rows` too, or leaves out a reply -> the check."""
_KNOWN: Final = WordHashes()
"""Hashes of the words of earlier chunks, kept because most words occur again."""
COLUMN: Final = {name: number for number, name in enumerate(ROW_CHECKS)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How rows are measured, the same for all rows of a dataset."""

    source: int
    part: int
    """Indices of the dataset and of its split."""
    limit: int | None
    """Longest conversation that fits."""
    renderer: Renderer | None
    """Counts tokens, without a length limit; None to count words."""
    cutting: Renderer | None
    """The same renderer with the limit and the truncation rule of training; None without a limit in tokens."""
    others: Others | None
    """The other data with which the prompts are compared."""


@dataclass(frozen=True, kw_only=True)
class _Words:
    """Hashes of the words of a preference."""

    prompt: list[int]
    last_turn: str
    """The last turn of the prompt, in folded case, one space between words."""
    replies: list[list[int]]
    folded: list[str]
    """The replies, like the last turn."""
    system: list[int]
    """The words of the system turns."""


def measure(plan: Plan, rows: Sequence[ReadRow]) -> Facts:
    """Return the facts about a chunk of rows."""
    kept = [row.preference for row in rows if row.preference is not None]
    of_P = [number for number, row in enumerate(rows) if row.preference is not None]
    found = _Found(len(rows))
    known = _KNOWN.bounded()
    words = [_words(preference, known) for preference in kept]
    texts = Texts.of(kept)
    keys = _reply_keys(texts, len(kept))
    _score_dropped(rows, found)
    find_damage, _ = of_text.damage_finder()
    markers = None if plan.renderer is None else plan.renderer.markers
    for place, (number, preference, own) in enumerate(zip(of_P, kept, words, strict=True)):
        _score_prompt(number, preference, own, markers, found)
        _score_replies(number, preference, own, found)
        _score_damage(number, preference, find_damage, found)
        _score_judgements(number, rows[number], own, keys[place], found)
    _score_repetition(of_P, words, found)
    if plan.renderer is not None:
        _score_tokens(of_P, kept, render_replies(kept, plan.renderer), plan.cutting, found)
    elif plan.limit is not None:
        _score_words(of_P, words, plan.limit, found)
    if plan.others is not None:
        plan.others.score(of_P, texts.prompts_P, [own.prompt for own in words], found.note)
    return _facts(plan, rows, kept, words, keys, texts, found, known)


class _Found:
    """Collects scores, and details of what was found."""

    def __init__(self, num_rows: int) -> None:
        self.scores_UC = np.zeros((num_rows, len(ROW_CHECKS)), dtype=np.float32)
        self.cuts_UX = np.zeros((num_rows, len(CUTS)), dtype=np.int64)
        self.details: dict[str, dict[int, str]] = {}

    def note(self, check: str, row: int, score: float, detail: str = "") -> None:
        """Keep the score of a row and what was found in it, unless the row has a higher score already."""
        if score > self.scores_UC[row, COLUMN[check]]:
            self.scores_UC[row, COLUMN[check]] = score
            if detail:
                self.details.setdefault(check, {})[row] = detail


def _text_of(turns: Conversation) -> str:
    return "\n".join(turn.content for turn in turns)


def _words(preference: Preference, known: WordHashes) -> _Words:
    prompt = [known[word] for word in words_of(text_of_prompt(preference.prompt))]
    replies = [words_of(_text_of(reply)) for reply in preference.replies]
    system = [known[word] for turn in preference.prompt if turn.role == "system" for word in words_of(turn.content)]
    last = next((turn.content for turn in reversed(preference.prompt) if turn.role == "user"), "")
    return _Words(
        prompt=prompt,
        last_turn=" ".join(words_of(last)),
        replies=[[known[word] for word in reply] for reply in replies],
        folded=[" ".join(reply) for reply in replies],
        system=system,
    )


def _score_dropped(rows: Sequence[ReadRow], found: _Found) -> None:
    for number, row in enumerate(rows):
        # A row that a filter of the settings drops has no defect.
        if row.cause is not None and row.cause not in FILTERS:
            detail = f"{row.cause}: {row.detail}"
            found.note("unusable-rows", number, 1, detail)
            if row.cause in BY_CAUSE:
                found.note(BY_CAUSE[row.cause], number, 1, detail)
        # A row without such a reply is used, and has it all the same.
        for cause, detail in () if row.parsed is None else row.parsed.left_out:
            if cause in BY_CAUSE:
                found.note(BY_CAUSE[cause], number, 1, f"{cause}: {detail}")


def _score_prompt(number: int, preference: Preference, own: _Words, markers: Markers | None, found: _Found) -> None:
    """Score typed control tokens, and prompts that are repeated in a reply."""
    typed = [token for turn in preference.prompt for token in of_text.control_tokens(turn.content)]
    num_typed = len(typed)
    if markers is not None:
        turns = [*preference.prompt, *(turn for reply in preference.replies for turn in reply)]
        num_typed = max(num_typed, markers.count(turns))
    found.note("special-tokens", number, num_typed, typed[0] if typed else "a control token of the model")
    if own.last_turn.count(" ") >= PROMPT_WORDS - 1:
        found.note("prompt-repeated", number, sum(own.last_turn in folded for folded in own.folded))


def _score_replies(number: int, preference: Preference, own: _Words, found: _Found) -> None:
    """Score the texts of replies: marks of templates, refusals, replies that stop in the middle."""
    marks: list[str] = []
    refusals: list[str] = []
    endings: list[str] = []
    for reply in preference.replies:
        marks += [mark for turn in reply for mark in of_text.residue(turn.content)]
        if (words := of_text.refusal(reply[0].content)) is not None:
            refusals.append(words)
        if of_text.is_cut_off(reply[-1].content):
            endings.append(f"… {reply[-1].content.rstrip()[-30:]}")
    for check, texts in (("template-residue", marks), ("refusals", refusals), ("truncated-endings", endings)):
        if texts:
            found.note(check, number, len(texts), texts[0])


def _score_damage(number: int, preference: Preference, find_damage: Callable[[str], str | None], found: _Found) -> None:
    turns = chain(preference.prompt, *preference.replies)
    if damaged := [what for turn in turns if (what := find_damage(turn.content)) is not None]:
        found.note("encoding-damage", number, len(damaged), damaged[0])


def _score_judgements(number: int, row: ReadRow, own: _Words, keys: Sequence[int], found: _Found) -> None:
    """Score the judgements: ties, equal replies, replies of very different length."""
    assert row.preference is not None
    judged = row.preference.comparisons
    found.note("ties", number, (row.parsed.skipped_ties if row.parsed else 0) + sum(one.label == 0.5 for one in judged))
    skipped = row.parsed.skipped_identical if row.parsed else 0
    found.note("identical-replies", number, skipped + sum(keys[one.first] == keys[one.second] for one in judged))
    lengths = [max(len(reply), 1) for reply in own.replies]
    for one in judged:
        longer, shorter = sorted((lengths[one.first], lengths[one.second]), reverse=True)
        found.note("unequal-lengths", number, longer / shorter, f"{longer} words against {shorter}")


def _score_repetition(of_P: Sequence[int], words: Sequence[_Words], found: _Found) -> None:
    """Score each row by the largest share of a reply's runs of words that occur earlier in that reply."""
    replies = [reply for own in words for reply in own.replies]
    owners = np.repeat(np.array(of_P, dtype=np.int64), [len(own.replies) for own in words])
    hashes, offsets = shingles_of(replies, RUN_WORDS)
    counts = np.diff(offsets)
    # The upper bits hold the reply, the lower ones the run: after sorting, equal runs of a reply are neighbours.
    keys = np.repeat(np.arange(len(replies), dtype=np.uint64) << np.uint64(40), counts) | (hashes >> np.uint64(24))
    keys.sort()
    again = np.bincount((keys[1:][keys[1:] == keys[:-1]] >> np.uint64(40)).astype(np.int64), minlength=len(replies))
    for reply in np.flatnonzero((counts >= REPEATING_WORDS - RUN_WORDS + 1) & (again > 0)).tolist():
        found.note("repetition", int(owners[reply]), again[reply] / counts[reply])


def _score_words(of_P: Sequence[int], words: Sequence[_Words], limit: int, found: _Found) -> None:
    """Score how many words the longest conversation, and the longest reply, have above a limit."""
    for number, own in zip(of_P, words, strict=True):
        for reply in own.replies:
            length = len(own.system) + len(own.prompt) + len(reply)
            if length > limit:
                found.note("overlong", number, length - limit, f"{length:,} words")
                found.note("overlong-replies", number, len(reply) - limit, f"a reply of {len(reply):,} words")


def _score_tokens(
    of_P: Sequence[int],
    kept: Sequence[Preference],
    rendered_P: Sequence[Sequence[Rendered | RenderError]],
    cutting: Renderer | None,
    found: _Found,
) -> None:
    """Score how many tokens do not fit a limit, and how many replies cannot be rendered."""
    for number, preference, rendered in zip(of_P, kept, rendered_P, strict=True):
        whole = {place: one for place, one in enumerate(rendered) if isinstance(one, Rendered)}
        refused = [one for one in rendered if isinstance(one, RenderError)]
        if refused:
            found.note("template-refuses", number, len(refused), str(refused[0]))
        if cutting is not None and any(len(one.token_ids) > cutting.spec.max_length for one in whole.values()):
            cuts = _score_cuts(number, preference, whole, cutting, found)
            # Training leaves out a row of which the template leaves nothing to compare, whatever its length, so it cuts
            # nothing of it.
            found.cuts_UX[number] = 0 if refused and isinstance(build_group(preference, whole), str) else cuts


def _score_cuts(
    number: int, preference: Preference, whole: Mapping[int, Rendered], cutting: Renderer, found: _Found
) -> list[int]:
    """Score conversations above the limit; return the effects of the truncation rule on the row, in the order of
    `CUTS`."""
    limit = cutting.spec.max_length
    fitting: dict[int, Rendered] = {}
    too_long = 0
    for place, one in whole.items():
        length = len(one.token_ids)
        if length <= limit:
            fitting[place] = one
            continue
        reply = preference.replies[place]
        own = length - one.prompt_tokens
        try:
            cut = fitting[place] = cutting.render_cut(preference.prompt, reply, full_length=length)
            told = f"{max(cut.truncated_tokens, cut.truncated_reply_tokens):,} of them are cut"
        except ReplyTooLong:
            too_long, told = too_long + 1, "the reply is left out"
            found.note("overlong-replies", number, max(own - limit, 1), f"a reply of {own:,} tokens")
        except RenderError:
            told = "training ends at this row" if cutting.spec.truncation == STOP else "the row is left out"
            found.note("overlong-replies", number, own - limit, f"a reply of {own:,} tokens")
        found.note("overlong", number, length - limit, f"{length:,} tokens; {told}")
    refused = len(fitting) + too_long < len(whole)
    left_out = refused or isinstance(build_group(preference, fitting), str)
    kept = [] if left_out else list(fitting.values())
    return [
        sum(one.truncated_tokens for one in kept),
        sum(one.truncated_reply_tokens > 0 for one in kept),
        sum(one.truncated_reply_tokens for one in kept),
        0 if refused else too_long,
        int(left_out),
    ]


def _facts(
    plan: Plan,
    rows: Sequence[ReadRow],
    kept: Sequence[Preference],
    words: Sequence[_Words],
    keys: Sequence[Sequence[int]],
    texts: Texts,
    found: _Found,
    known: WordHashes,
) -> Facts:
    parts = [part for own in words for part in (own.prompt, *own.replies)]
    least = least_hashes(*shingles_of(parts, SHINGLE_WORDS))
    starts = np.cumsum([0, *(1 + len(own.replies) for own in words)])[:-1]
    whole = np.minimum.reduceat(least, starts) if len(starts) else least
    is_reply = np.ones(len(parts), dtype=bool)
    is_reply[starts] = False
    judged = [(p, one) for p, preference in enumerate(kept) for one in preference.comparisons]
    lengths = [[len(reply) for reply in own.replies] for own in words]
    return Facts(
        numbers_U=np.array([row.number for row in rows], dtype=np.int64),
        sources_U=np.full(len(rows), plan.source, dtype=np.int32),
        parts_U=np.full(len(rows), plan.part, dtype=np.int32),
        kept_U=np.array([row.preference is not None for row in rows], dtype=bool),
        scores_UC=found.scores_UC,
        cuts_UX=found.cuts_UX,
        texts=texts,
        rows_P=_hashed([_canonical(preference, own, known) for preference, own in zip(kept, keys, strict=True)], texts),
        whole_P=_hashed([tuple(sorted(own)) for own in keys], texts),
        prompt_signatures_PH=least[starts].astype(np.uint16),
        whole_signatures_PH=whole.astype(np.uint16),
        reply_signatures_RH=least[is_reply, :REPLY_HASHES].astype(np.uint16),
        systems_P=np.array([hash(tuple(own.system)) & (2**64 - 1) for own in words], dtype=np.uint64),
        owners_J=np.array([p for p, _ in judged], dtype=np.int64),
        first_J=np.array([keys[p][one.first] for p, one in judged], dtype=np.uint64),
        second_J=np.array([keys[p][one.second] for p, one in judged], dtype=np.uint64),
        label_J=np.array([one.label for _, one in judged], dtype=np.float32),
        longer_J=np.array(
            [np.sign(lengths[p][one.first] - lengths[p][one.second]) for p, one in judged], dtype=np.int8
        ),
        has_annotator_J=np.array([one.annotator is not None for _, one in judged], dtype=bool),
        causes=Counter(row.cause for row in rows if row.cause is not None),
        unused=Counter(cause for row in rows if row.parsed is not None for cause, _ in row.parsed.left_out),
        example=next(
            (f"{row.place}: {row.parsed.left_out[0][1]}" for row in rows if row.parsed and row.parsed.left_out), ""
        ),
        details=found.details,
    )


def _reply_keys(texts: Texts, num_preferences: int) -> list[list[int]]:
    """Return the hashes of each preference's replies, which stand one after the other."""
    keys: list[list[int]] = [[] for _ in range(num_preferences)]
    for owner, key in zip(texts.owners_R.tolist(), texts.replies_R.tolist(), strict=True):
        keys[owner].append(key)
    return keys


def _canonical(preference: Preference, keys: Sequence[int], known: WordHashes) -> tuple[object, ...]:
    """Return replies and judgements sorted by the replies' hashes.

    So two rows with the same pair are equal even if they list its replies in a different order.
    """
    judgements = []
    for one in preference.comparisons:
        first, second, label = keys[one.first], keys[one.second], one.label
        if first > second:
            first, second, label = second, first, 1 - label
        by = 0 if one.annotator is None else known[one.annotator]
        strength = -1.0 if one.strength is None else one.strength
        judgements.append((first, second, round(label, 6), by, strength, one.weight, one.margin))
    return tuple(sorted(keys)), tuple(sorted(judgements))


def _hashed(values: Sequence[tuple[object, ...]], texts: Texts) -> Hashes:
    """Return [P] a hash of each preference's prompt together with its entry of `values`: numbers and tuples of them.

    Python's `hash` can be used, since its hashes of numbers and of tuples of numbers, unlike those of texts, are the
    same in every process.
    """
    prompts = texts.prompts_P.tolist()
    hashes = [hash((prompt, *value)) & (2**64 - 1) for prompt, value in zip(prompts, values, strict=True)]
    return np.array(hashes, dtype=np.uint64)
