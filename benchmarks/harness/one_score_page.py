"""The table of one_score: how far every way to a score is from the reference, and the scores themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from harness import results
from harness.conversations import cases
from harness.one_score_columns import OUR_CLIENT, OUR_SCORER, VLLM_CLIENT, Column, Proof
from harness.one_score_model import Made

LEFT_OUT: Final = {
    "SGLang": "no build of it for processors was found; what the client sends it is tested against a stand-in",
    "verl": "its reward models run on GPUs; `rewardlab verify --as verl` sends vLLM what verl would send it",
    "OpenRLHF": "it needs a GPU; what rewardlab hands it is tested without it",
    "slime": "it needs GPUs; what rewardlab hands it is tested without it",
}
"""Engine or framework that scores, and was not run here -> why."""


ON_THE_PAGE: Final = {
    "the run's own evaluation, by the model in its memory": r"training evaluation",
    "`load`, one at a time, and in another order": r"load, .*",
    "`rewardlab score`": r"rewardlab score",
    "`rewardlab score --backend http`, `--backend vllm`": r"rewardlab score --backend .*",
    "`rewardlab serve`: `/v1/score` in four forms, `/classify`, `/pooling`": r"rewardlab serve, .*",
    "`rewardlab.client` of `rewardlab serve`": rf"{re.escape(OUR_CLIENT)}, .*",
    "`rewardlab.client` of vLLM": rf"{re.escape(VLLM_CLIENT)}, .*",
    "`rewardlab.rl`, of the folder, of `rewardlab serve` and of vLLM": rf"{re.escape(OUR_SCORER)} → .*",
    "vLLM `/classify` and `/pooling`: rendered texts, token ids, messages": r"vLLM /.*",
    "vLLM with the base model and the run's adapter": r"vLLM --enable-lora, .*",
    "vLLM with the two folders of `export --adapter --with-base`": r"vLLM on base/ .*",
    "transformers, all of it in this dtype: messages in padded batches, token ids": r"transformers, .*",
    "TRL's GRPOTrainer, with the folder as reward function": r"TRL .*",
}
"""Rows of the tables on docs/in-vllm.md -> the columns of a record that they sum up."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Every column of one precision."""

    made: Made
    columns: Sequence[Column]
    proofs: Sequence[Proof] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, scores included."""
        made = self.made
        return {
            "precision": made.precision,
            "tolerance": made.tolerance,
            "conversations": [case.name for case in made.cases],
            "left_out": list(made.left_out),
            "num_tokens": [len(ids) for ids in made.token_ids],
            "reference": list(made.reference),
            "reference_with_typed_tokens_obeyed": list(made.obeyed),
            "columns": [
                {
                    "name": column.name,
                    "scores": None if column.scores is None else list(column.scores),
                    "largest_distance": distance(column, made),
                    "reads_text": column.reads_text,
                    "reason": column.reason,
                    "engine": dict(column.facts or {}),
                }
                for column in self.columns
            ],
            "verified": [asdict(proof) for proof in self.proofs],
        }


def wanted(column: Column, made: Made) -> list[float]:
    """What a column has to be: an engine that tokenises whole texts obeys control tokens that are typed in them."""
    return [
        made.obeyed[n] if column.reads_text and case.typed else made.reference[n] for n, case in enumerate(made.cases)
    ]


def distances(column: Column, made: Made) -> list[float]:
    """How far every score is from what it has to be, in units of max(1, |score|); infinity if it is not finite."""
    pairs = zip(wanted(column, made), column.scores or (), strict=True)
    return [abs(a - b) / max(1.0, abs(a)) if math.isfinite(b) else math.inf for a, b in pairs]


def distance(column: Column, made: Made) -> float | None:
    """The largest of the distances; None if the column was not run."""
    return None if column.scores is None else max(distances(column, made))


def right(column: Column, made: Made) -> bool:
    """Whether a column that was run is within the tolerance."""
    found = distance(column, made)
    return found is None or found <= made.tolerance


def line(column: Column | Proof, made: Made) -> str:
    """A column, or what `rewardlab verify` said, in words, for the terminal."""
    if isinstance(column, Proof):
        return column.said
    found = distance(column, made)
    if found is None:
        return f"not run: {column.reason}"
    return f"at most {found:.1e} off{'' if right(column, made) else f', allowed {made.tolerance}'}"


def page(tables: Sequence[Table], *, model: str, versions: Mapping[str, str]) -> list[str]:
    """The page, tables first."""
    compared = sum(column.scores is not None for table in tables for column in table.columns)
    outside = sum(not right(column, table.made) for table in tables for column in table.columns)
    engine = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"# One score by every way: {model}",
        "",
        f"**{compared - outside} of {compared}** ways that were run give the scores of `rewardlab.load` within the "
        f"tolerance of their arithmetic.",
        "",
    ]
    for table in tables:
        lines += _section(table)
    lines += [
        "*Largest*, *mean*: distances from `rewardlab.load` of the same folder in the same precision, in units of "
        "max(1, abs(score)). Engines that are given whole texts, or render messages themselves, read control tokens "
        "that are typed in a reply as control tokens; there the score that they have to give is that of these tokens, "
        "as rewardlab computes it. With token ids, no engine does.",
        "",
    ]
    lines += ["Left out, whatever the flags:", "", *(f"- {name}: {why}." for name, why in LEFT_OUT.items()), ""]
    return [*lines, *([f"Environment of vLLM: {engine}.", ""] if engine else [])]


def _section(table: Table) -> list[str]:
    made = table.made
    scores = np.array(made.reference)
    typed = [n for n, case in enumerate(made.cases) if case.typed]
    lines = [
        f"## {made.dtype}",
        "",
        f"{len(made.cases)} conversations of {min(map(len, made.token_ids))} to {max(map(len, made.token_ids)):,} "
        f"tokens; scores from {scores.min():.2f} to {scores.max():.2f}, standard deviation {scores.std():.2f}. "
        f"Allowed: {made.tolerance:g}.",
        "",
        results.table(
            ["scored by", "largest", "mean", "within"],
            [_row(column, made) for column in table.columns if column.scores is not None],
        ),
        *_not_run(table.columns),
        *_verified(table.proofs),
    ]
    if made.left_out:
        lines += [f"Left out, as longer than the model may read: {', '.join(made.left_out)}.", ""]
    for n in typed:
        lines += [
            f"`{made.cases[n].name}`, a reply that types the end of its turn and a user who praises it: "
            f"{made.reference[n]:.3f} as the letters that they are, {made.obeyed[n]:.3f} where they are obeyed.",
            "",
        ]
    commands = {column.facts["command"] for column in table.columns if column.facts}
    return [*lines, *(f"- `{command}`" for command in sorted(commands)), ""]


def _not_run(columns: Sequence[Column]) -> list[str]:
    """What was not run, by reason."""
    reasons: dict[str, list[str]] = {}
    for column in columns:
        if column.scores is None:
            reasons.setdefault(column.reason, []).append(f"`{column.name}`")
    lines = [f"- Not run: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return [*lines, ""] if lines else []


def _verified(proofs: Sequence[Proof]) -> list[str]:
    """What the command that verifies endpoints said of them."""
    if not proofs:
        return []
    rows = [
        [
            f"`{proof.name}`",
            "–" if proof.largest_distance is None else f"{proof.largest_distance:.1e}",
            proof.forms,
            proof.said if proof.right else f"**{'not run' if proof.right is None else 'wrong'}**: {proof.said}",
        ]
        for proof in proofs
    ]
    return [results.table(["command", "largest distance of a canary", "forms", "it says"], rows)]


def _row(column: Column, made: Made) -> list[str]:
    """A column that was run."""
    apart = distances(column, made)
    return [column.name, f"{max(apart):.1e}", f"{np.mean(apart):.1e}", "yes" if right(column, made) else "**no**"]


def rows_on_page(table: Mapping[str, Any]) -> list[str]:
    """The rows that docs/in-vllm.md has of one table of a record: largest and mean distance of several columns.

    Raises ValueError for a column that has no row.
    """
    typed = {case.name for case in cases() if case.typed}
    obeyed, literal = table["reference_with_typed_tokens_obeyed"], table["reference"]
    apart: dict[str, list[float]] = {}
    for column in table["columns"]:
        label = next((name for name, one in ON_THE_PAGE.items() if re.fullmatch(one, column["name"])), None)
        if label is None:
            raise ValueError(f"{column['name']}: no row of the page has it.")
        for n, (name, score) in enumerate(zip(table["conversations"], column["scores"] or (), strict=False)):
            right = obeyed[n] if column["reads_text"] and name in typed else literal[n]
            apart.setdefault(label, []).append(abs(score - right) / max(1.0, abs(right)))

    def shown(value: float) -> str:
        return "0" if value == 0 else f"{value:.3f}" if value >= 1e-3 else f"{value:.1e}"

    def largest(values: Sequence[float]) -> str:
        return f"**{shown(max(values))}**" if max(values) > table["tolerance"] else shown(max(values))

    return [
        f"| {label} | {largest(apart[label])} | {shown(float(np.mean(apart[label])))} |"
        for label in ON_THE_PAGE
        if label in apart
    ]


def verdict(tables: Sequence[Table], *, require_all: bool, say: Callable[[str], None]) -> int:
    """The exit status, with what is wrong in words."""
    status = 0
    for table in tables:
        for column in table.columns:
            if not right(column, table.made) or (require_all and column.scores is None):
                say(f"{table.made.precision} {column.name}: {line(column, table.made)}")
                status = 1
        for proof in table.proofs:
            if not proof.right and (require_all or proof.right is not None):
                say(f"{table.made.precision} {proof.name}: {proof.said}")
                status = 1
    return status
