"""A preference as text says what was read, and no text can pretend to be something else."""

from __future__ import annotations

from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.data.formats.shown import described, judged, shortened

ROW = Preference(
    id="rows.jsonl:7",
    source="rows",
    prompt=(Message("system", ""), Message("user", "Why?\nTell me.")),
    replies=((Message("assistant", "Because."),), (Message("assistant", "No.\x1b[2J"),)),
    comparisons=(
        Comparison(first=0, second=1, strength=3, weight=0.5, annotator="ann"),
        Comparison(first=0, second=1, label=0.25, margin=1.5),
        Comparison(first=0, second=1, label=0.5),
    ),
)


def test_a_preference_is_shown_turn_by_turn_with_its_judgements() -> None:
    assert described(ROW) == "\n".join(
        [
            "rows.jsonl:7 (rows)",
            "  prompt:",
            "    [system]",
            "    [user] Why?",
            "      Tell me.",
            "  reply 0:",
            "    [assistant] Because.",
            "  reply 1:",
            r"    [assistant] No.\x1b[2J",
            "  reply 0 over reply 1, strength 3, weight 0.5, by ann",
            "  reply 1 over reply 0, with probability 0.75, margin 1.5",
            "  reply 0 and reply 1 tie",
        ]
    )


def test_a_label_of_0_is_told_as_what_it_prefers() -> None:
    assert judged(Comparison(first=0, second=1, label=0.0)) == "reply 1 over reply 0"


def test_long_turns_lose_their_middle_and_say_how_much() -> None:
    text = "a" * 500 + "b" * 600 + "c" * 400
    shown = shortened(text, 900)
    assert shown == "a" * 500 + "b" * 100 + " […600 characters…] " + "c" * 300
    assert shortened(text, 1500) == text
