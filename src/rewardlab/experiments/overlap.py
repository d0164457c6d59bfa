"""Test rows whose prompts are trained on, or chosen by, in other files: what only the runs would tell otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from rewardlab.core.errors import RewardlabError
from rewardlab.experiments.costs import prompts_of
from rewardlab.experiments.data_files import distinct
from rewardlab.experiments.pitfalls import Problem
from rewardlab.experiments.plan import Run

READ_AS: Final = {"train": "trained on (dataset)", "eval": "chosen by (eval_dataset)"}
"""Purpose of other data -> what is done with them."""
MOST_ROWS: Final = 1_000_000
"""Rows of each dataset that are looked at."""


def about_shared_rows(runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield a warning for test rows with the prompt of a row that is trained on or chosen by, where all are on this
    machine. Each choice of data is looked at once."""
    texts = (text for run in distinct([one for one in runs if one.reads_test]) for text in _shared(run.settings))
    for text in dict.fromkeys(texts):
        yield Problem(level="warning", text=text)


def _shared(settings: Mapping[str, Any]) -> Iterator[str]:
    for purpose, what in READ_AS.items():
        try:
            tested = Counter(islice(prompts_of(settings, "test"), MOST_ROWS))
            seen = tested.keys() & set(islice(prompts_of(settings, purpose), MOST_ROWS))
        except (RewardlabError, OSError):
            continue  # Data that are missing, or cannot be read, are reported elsewhere.
        if rows := sum(tested[prompt] for prompt in seen):
            yield (
                f"{rows:,} of {tested.total():,} test rows have the prompt of a row that is {what}, so numbers on them "
                f"would flatter the arms. `rewardlab data audit TRAIN TEST` shows them; with --fix it takes them out"
            )
