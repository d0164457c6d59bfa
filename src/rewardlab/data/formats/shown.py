"""A preference as text, for people who check that rows were read as they were meant."""

from __future__ import annotations

from rewardlab.core.terminal import visible
from rewardlab.core.types import Comparison, Conversation, Preference

MAX_CHARACTERS = 600
"""Characters shown of a turn; of a longer one the middle is left out."""
BRIEF_CHARACTERS = 160
BRIEF_LINES = 16
"""The same, and most lines, where a preference is shown in brief."""


def described(preference: Preference, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a preference as text: each turn under its role, then who was preferred, replies numbered from 0.

    Control characters are written out, so that no text can move the cursor of a terminal. The middle of a turn of more
    than `max_characters` is left out, and counted.
    """
    lines = [f"{visible(preference.id)} ({visible(preference.source)})", "  prompt:"]
    lines += _turns(preference.prompt, max_characters)
    for number, reply in enumerate(preference.replies):
        lines += [f"  reply {number}:", *_turns(reply, max_characters)]
    lines += [f"  {judged(comparison)}" for comparison in preference.comparisons]
    return "\n".join(lines)


def described_in_brief(preference: Preference) -> str:
    """Return the first lines of a preference as `described` gives it, and how many are left out."""
    lines = described(preference, max_characters=BRIEF_CHARACTERS).split("\n")
    more = [f"  … (lines left out: {len(lines) - BRIEF_LINES})"] if len(lines) > BRIEF_LINES else []
    return "\n".join([*lines[:BRIEF_LINES], *more])


def judged(comparison: Comparison) -> str:
    """Return a judgement in words: `reply 0 over reply 1, strength 3, by ann`."""
    first, second, label = comparison.first, comparison.second, comparison.label
    if label < 0.5:
        first, second, label = second, first, 1 - label
    words = [f"reply {first} and reply {second} tie" if label == 0.5 else f"reply {first} over reply {second}"]
    words += [f"with probability {label:g}"] if label not in (0.5, 1.0) else []
    words += [f"strength {comparison.strength:.4g}"] if comparison.strength is not None else []
    words += [f"margin {comparison.margin:.4g}"] if comparison.margin else []
    words += [f"weight {comparison.weight:.4g}"] if comparison.weight != 1 else []
    words += [f"by {visible(comparison.annotator)}"] if comparison.annotator is not None else []
    return ", ".join(words)


def _turns(turns: Conversation, max_characters: int) -> list[str]:
    lines = []
    for turn in turns:
        text = shortened(turn.content, max_characters)
        first, *rest = text.split("\n")
        lines += [f"    [{visible(turn.role)}] {visible(first)}".rstrip(), *(f"      {visible(line)}" for line in rest)]
    return lines


def shortened(text: str, max_characters: int) -> str:
    """Return a text with its middle left out if it is longer; the mark says how many characters are missing."""
    if len(text) <= max_characters:
        return text
    head, tail = max_characters - max_characters // 3, max_characters // 3
    return f"{text[:head]} […{len(text) - head - tail:,} characters…] {text[len(text) - tail :]}"
