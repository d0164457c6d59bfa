"""No timing: counts how many tokens an evaluation computes if rows of one prompt are computed together.

    scripts/bench tokens_of_prompts
    scripts/bench tokens_of_prompts --data a.jsonl b.jsonl

For each file: every reply with a prompt of its own, each row's prompt once, and each prompt of the file once, as
scoring does it within its token budget.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from harness import machine, ours, results, workload
from rewardlab.data.merging import Limits, MergedGroups
from rewardlab.score import SPREAD

FILES = (
    *("hh_helpful.test", "webgpt.test", "alpaca_eval_balanced.test", "gsm8k.test", "truthfulqa.test"),
    *("pandalm.test", "qa_feedback.test", "ukp_args_balanced.test", "ukp_args.test"),
)


def count_of(name: str, folder: str, options: argparse.Namespace) -> dict[str, object]:
    """Rows, prompts, replies and tokens of a file."""
    path = next(path for end in workload.EXTENSIONS if (path := options.data_folder / f"{name}{end}").is_file())
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = sum(1 for _ in file)
    rows = workload.read_rows(name, lines, folder=options.data_folder)
    groups = workload.to_groups(rows, folder, max_seq_len=options.max_seq_len)
    together = MergedGroups(groups, Limits(tokens=options.token_budget, spread=SPREAD))
    return {
        "file": name,
        "fixed_by": rows.fixed_by,
        "rows": len(groups),
        "prompts": len({group.prompt_key for group in groups}),
        "replies": sum(group.num_replies for group in groups),
        "replies_computed": int(together.num_replies().sum()),
        "unshared": sum(group.num_unshared_tokens for group in groups),
        "by_row": sum(group.num_tokens for group in groups),
        "together": int(together.num_tokens().sum()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer counts")
    parser.add_argument("--data", nargs="+", default=list(FILES))
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--token-budget", type=int, default=8192)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=None)
        counts = [count_of(name, folder, options) for name in options.data]
    head = ["file", "rows", "prompts", "replies, computed", "unshared", "by row", "together", "by row over together"]
    results.write(
        "tokens_of_prompts",
        Path(options.model).name,
        page=[
            "# Tokens of an evaluation",
            "",
            f"Counted with the tokenizer of {Path(options.model).name}, at most {options.max_seq_len} tokens a "
            f"conversation and {options.token_budget} computed at a time.",
            "",
            results.table(
                head,
                [
                    [
                        f"{one['file']}, {one['fixed_by']}",
                        *(one["rows"], one["prompts"], f"{one['replies']}, {one['replies_computed']}"),
                        *(one["unshared"], one["by_row"], one["together"]),
                        f"**{float(str(one['by_row'])) / float(str(one['together'])):.2f}**",
                    ]
                    for one in counts
                ],
            ),
        ],
        data={"files": counts},
        options=options,
        device=torch.device("cpu"),
        load=(machine.load_average(), machine.load_average()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
