"""Test rows whose prompts are trained on, or chosen by, in other files: what only the runs would tell otherwise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from rewardlab.core.errors import RewardlabError
from rewardlab.experiments.costs import own_prompts
from rewardlab.experiments.pitfalls import Problem
from rewardlab.experiments.plan import Run

READ_AS: Final = {
    "train": ("limit", "trained on (dataset)"),
    "eval": ("eval_limit", "chosen by (eval_dataset)"),
}
"""Purpose of other data -> the setting that takes a part of them, and what is done with them."""
SETS: Final = ("dataset", "test_dataset", "eval_dataset", "hf_split", "test_split", "eval_split")
DECIDING: Final = (*SETS, "limit", "eval_limit")
"""Settings that say which rows are read."""
MOST_ROWS: Final = 1_000_000
"""Rows of each dataset that are looked at."""


def about_shared_rows(runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield a warning for test rows with the prompt of a row that is trained on or chosen by, where all are on this
    machine. Each choice of data is looked at once.

    Rows without a prompt of their own are left out, and so are data of which `limit` draws a part: what is shared there
    only the runs can tell.
    """
    testing = [run for run in runs if run.reads_test]
    chosen = {json.dumps([run.settings.get(name) for name in DECIDING], default=str): run for run in testing}
    texts = (text for run in chosen.values() for text in _shared(run.settings))
    for text in dict.fromkeys(texts):
        yield Problem(level="warning", text=text)


def _shared(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("eval_limit") is not None:
        return
    tested: Counter[str] | None = None
    for purpose, (limit, what) in READ_AS.items():
        if settings.get(limit) is not None or not settings.get("dataset" if purpose == "train" else "eval_dataset"):
            continue
        try:
            tested = tested or Counter(islice(own_prompts(settings, "test"), MOST_ROWS))
            seen = tested.keys() & set(islice(own_prompts(settings, purpose), MOST_ROWS))
        except (RewardlabError, OSError):
            continue  # Data that are missing, or cannot be read, are reported elsewhere.
        if rows := sum(tested[prompt] for prompt in seen):
            yield (
                f"{rows:,} of {tested.total():,} test rows have the prompt of a row that is {what}, so numbers on them "
                f"would flatter the arms. `rewardlab data audit DATASET --against TEST_DATASET` shows them"
            )
