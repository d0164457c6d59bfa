"""The reward model whose scores are compared: trained for a few steps by the command, exported, and its references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness import workload
from harness.command import BATCH, PAIRS, rewardlab
from harness.conversations import Case, cases, write_evaluation_data
from rewardlab.artifact.canaries import score_tokens
from rewardlab.artifact.load import load
from rewardlab.core.files import read_jsonl
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.data.chat import Renderer, to_messages
from rewardlab.data.synthetic import write_dataset
from rewardlab.score import Scorer

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}
FLOAT32_TOLERANCE: Final = 2e-4
"""How far a score in float32 may be from that of `rewardlab.load`, in units of max(1, |score|)."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A reward model and what its scores have to be."""

    precision: str
    base: str
    folder: Path
    """What engines are given: in the dtype of the arithmetic."""
    adapter: Path | None
    cases: Sequence[Case]
    left_out: Sequence[str]
    """Conversations above the model's length limit."""
    evaluated: Sequence[float]
    """What the run's own evaluation gave, by the model as it was in memory."""
    token_ids: Sequence[Sequence[int]]
    texts: Sequence[str]
    """Rendered by the tokenizer of the folder, as an engine does that is given messages."""
    reference: Sequence[float]
    """By `rewardlab.load` from the folder, in the same precision."""
    obeyed: Sequence[float]
    """The same for the tokens that a tokenizer makes of `texts`: control tokens typed in a reply are obeyed."""
    tolerance: float
    """In units of max(1, |score|)."""

    @property
    def dtype(self) -> str:
        """The dtype of the arithmetic."""
        return DTYPES[self.precision]


def make(
    model: str,
    work: Path,
    *,
    precision: str,
    steps: int,
    max_seq_len: int,
    say: Callable[[str], None],
) -> Made:
    """Train and save (LoRA in float32, all weights in bf16), export if need be, and compute the references."""
    base = workload.model_folder(model, work, layers=None)
    run, data = work / "run", work / "data"
    write_dataset(data, num_train=PAIRS, num_test=2, seed=0)
    write_evaluation_data(data / "conversations.jsonl")
    if not (run / f"step_{steps}" / "reward_spec.json").is_file():
        say(f"{precision}: training {steps} steps")
        rewardlab(
            *("train", "--model", base, "--dataset", str(data / "train.jsonl")),
            *("--eval-dataset", str(data / "conversations.jsonl"), "--output-dir", str(run), "--overwrite"),
            *("--steps", str(steps), "--batch-size", str(BATCH), "--precision", precision),
            *("--max-seq-len", str(max_seq_len), "--overlong", "drop", "--max-drop-fraction", "1"),
            *("--no-baselines", "--no-checkpoints", "--report-to", "none"),
            *(("--lora", "--lr", "1e-3") if precision == "fp32" else ("--lr", "2e-5")),
        )
    trained = folder = run / f"step_{steps}"
    if precision == "bf16":
        folder = work / "exported"
        if not folder.is_dir():
            rewardlab("export", str(trained), "--dtype", "bfloat16", "--output-dir", str(folder))
    evaluated: list[Any] = [row for _, row in read_jsonl(run / "evals" / f"step_{steps}.scores.jsonl")]
    # A preference of a file is called by its name and line.
    rows = {
        (int(row["preference_id"].rpartition(":")[2]) - 1, int(row["reply"])): float(row["score"]) for row in evaluated
    }
    there = [case for case in cases() if (case.row, case.reply) in rows]
    scorer = load(folder, precision=precision)
    texts = _texts(scorer.renderer, there)
    return Made(
        precision=precision,
        base=base,
        folder=folder,
        adapter=folder / "adapter" if (folder / "adapter").is_dir() else None,
        cases=there,
        left_out=[case.name for case in cases() if case not in there],
        evaluated=[rows[case.row, case.reply] for case in there],
        token_ids=[_token_ids(scorer.renderer, case) for case in there],
        texts=texts,
        reference=scorer.score([case.messages for case in there]),
        obeyed=_obeyed(scorer, texts),
        tolerance=FLOAT32_TOLERANCE if precision == "fp32" else SCORE_TOLERANCE[DTYPES[precision]],
    )


def _texts(renderer: Renderer, there: Sequence[Case]) -> list[str]:
    return [str(renderer.tokenizer.apply_chat_template(case.messages, tokenize=False)) for case in there]


def _token_ids(renderer: Renderer, case: Case) -> list[int]:
    turns = to_messages(case.messages)
    found: list[int] = renderer.render(turns[:-1], turns[-1:]).token_ids.tolist()
    return found


def _obeyed(scorer: Scorer, texts: Sequence[str]) -> list[float]:
    """The scores of what the tokenizer makes of rendered texts, control tokens typed in them and all."""
    tokenizer: Any = scorer.renderer.tokenizer
    encoded = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]
    return score_tokens(scorer.model, encoded)
