"""Sentences for runs whose data were changed on purpose: that the model is a control, and what it should show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

EXPECTS: Final[Mapping[str, str]] = {
    "label_shuffle": "0.5 on the true labels: judgements that were swapped at random teach nothing. More means that "
    "the true labels reach the model in another way; clearly less, that they reach it the wrong way round.",
    "prompt_only": "exactly 0.5: replies that are the same text have the same score, and ties count one half. "
    "Anything else means that something beside the reply's text says which one is preferred.",
    "response_only": "less than with the prompt: what is left needs no prompt, so it is in the replies alone.",
    "random_negatives": "high on pairs with replies to other prompts, and near 0.5 on the original ones: to see that "
    "a reply belongs to its prompt is not to see which reply is better.",
    "length_matched": "what equally many pairs drawn at random give: a model that needs no length loses nothing where "
    "there is none.",
    "length_only": "far less than the model: what it reaches is there from the number of tokens alone.",
    "bag_of_words": "less than the model: what it reaches is there from which words a reply has.",
}
"""Control -> what it should show, and why."""


def notice(mode: str, splits: Sequence[str]) -> str:
    """Return the sentence about a run with this control of the data for these purposes."""
    return f"THIS IS A CONTROL, NOT A MODEL TO USE ({mode} of the {', '.join(splits)} data)"


def notice_of(recorded: object) -> str | None:
    """Return the sentence from a manifest's data (`data.control`) or from a saved model; None if there is none."""
    if not isinstance(recorded, Mapping):
        return None
    mode, splits = recorded.get("mode"), recorded.get("splits")
    if not isinstance(mode, str) or not isinstance(splits, Sequence) or isinstance(splits, str):
        return None
    return notice(mode, [str(split) for split in splits])


def expectation_of(recorded: object) -> str | None:
    """Return what the control of a manifest's data is expected to show; None if there is none or it is unknown."""
    mode = recorded.get("mode") if isinstance(recorded, Mapping) else None
    return EXPECTS.get(mode) if isinstance(mode, str) else None


def judges_by_true_labels(recorded: object) -> bool:
    """Return whether labels were shuffled for training, and a checkpoint was chosen by labels as they are."""
    if not isinstance(recorded, Mapping) or recorded.get("mode") != "label_shuffle":
        return False
    splits = recorded.get("splits")
    return isinstance(splits, Sequence) and "train" in splits and "eval" not in splits
