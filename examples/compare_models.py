"""Is one reward model better than another? Both on the same pairs, and their difference with its 95 % interval.

    python examples/compare_models.py runs/a/best runs/b/best test-pairs.jsonl --output-dir runs/compared

The intervals of two accuracies may overlap although the models differ: most pairs are easy or hard for both. The paired
difference leaves that out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import rewardlab
from rewardlab.analysis.metrics import oriented
from rewardlab.analysis.stats import mean_share
from rewardlab.core.types import join_comparisons


def paired_difference(first: Sequence[rewardlab.ScoreRow], second: Sequence[rewardlab.ScoreRow]) -> rewardlab.Estimate:
    """Accuracy of the second minus that of the first, by prompt where prompts repeat; rows of the same replies."""
    one, other = (oriented(join_comparisons(rows)).decided for rows in (first, second))
    assert len(one.label) == len(other.label), "one of the models gave a score that is no number"
    # An outcome is 0, ½ or 1, so a difference lies between −1 and 1; moved to a share it has a score interval.
    share = mean_share((1 + other.outcome - one.outcome) / 2, one.prompt_keys)
    value, low, high = (2 * number - 1 for number in (share.value, share.low, share.high))
    return replace(share, value=value, low=low, high=high)


def main(arguments: Sequence[str] | None = None) -> rewardlab.Estimate:
    """Judge both, say both accuracies and the difference, and return that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", help="a reward-model folder")
    parser.add_argument("second", help="another one")
    parser.add_argument("dataset", help="preferences on which neither was trained or chosen")
    parser.add_argument("--output-dir", default="runs/compared", help="score rows and metrics of both, replaced")
    asked = parser.parse_args(arguments)

    rows: list[Sequence[rewardlab.ScoreRow]] = []
    for name in ("first", "second"):
        folder = Path(asked.output_dir, name)
        evaluation, _, _ = rewardlab.evaluate_folder(
            rewardlab.EvalConfig.of(
                model=getattr(asked, name), dataset=asked.dataset, output_dir=folder, overwrite=True
            )
        )
        found = evaluation.overall.estimates["eval_accuracy"]
        print(f"{name + ':':12}{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]  {getattr(asked, name)}")
        rows.append(evaluation.rows)

    change = paired_difference(*rows)
    print(f"difference: {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}] on {change.n} prompts, paired")
    return change


if __name__ == "__main__":
    main()
