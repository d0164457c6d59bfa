"""Trains a first reward model: generated preferences with known truth, a small real model, a few minutes.

With generated data the best possible numbers are known, so the result can be compared with them.
"""

from __future__ import annotations

import logging
import textwrap
import time
from pathlib import Path
from typing import Final

from rewardlab.analysis.metrics import Evaluation, evaluate
from rewardlab.core.files import write_text
from rewardlab.core.run_folder import only_writer
from rewardlab.core.terminal import visible
from rewardlab.core.types import ScoreRow
from rewardlab.data.synthetic import Ceiling, SyntheticPair, ceiling, generate, write_dataset
from rewardlab.report.run import command, comparison_table, precision_blocks, precision_line, warning_block
from rewardlab.report.tables import report_width
from rewardlab.training.run import TrainResult, train
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")

MODEL: Final = "smollm2-135m-instruct"
NUM_STEPS: Final = 50
"""Takes about five minutes on two slow CPU cores in float32."""
BATCH_SIZE: Final = 16
NUM_TEST_PAIRS: Final = 300
NUM_EVAL_PAIRS: Final = 60
FIRST_RUN: Final = f"train --model {MODEL} --dataset YOUR_PAIRS.jsonl --lora --output-dir runs/mine".split()


def run_quickstart(folder: Path, *, num_steps: int | None, seed: int, num_test: int = NUM_TEST_PAIRS) -> str:
    """Generate data, train, and return the closing report. Raises as `train` does."""
    started = time.perf_counter()
    steps = num_steps or NUM_STEPS
    data = folder / "preferences"
    earlier = (data / "train.jsonl").is_file()
    # A run of a few steps, as `make test` has, is not judged on more pairs than it trains on.
    num_train = steps * BATCH_SIZE + min(steps * BATCH_SIZE, NUM_EVAL_PAIRS)
    # Locked only while the data are written, since `train` takes the lock of the same folder itself.
    with only_writer(folder):
        write_dataset(data, num_train=num_train, num_test=num_test, seed=seed)
    logger.info("data: %d training and %d test pairs with known truth in %s", num_train, num_test, data)
    config = quickstart_config(folder, data, steps=steps, num_train=num_train, seed=seed, overwrite=earlier)
    result = train(config)
    pairs = generate(num_test, seed=seed, topics="test")
    report = closing_report(result, pairs, ceiling(pairs), minutes=(time.perf_counter() - started) / 60)
    write_text(folder / "report.txt", report.lstrip() + "\n")
    return report


def quickstart_config(
    folder: Path, data: Path, *, steps: int, num_train: int, seed: int, overwrite: bool
) -> RewardTrainerConfig:
    """Return the settings of the quickstart; `rewardlab train --config` with its config.json repeats it."""
    return RewardTrainerConfig.of(
        model=MODEL,
        dataset=(str(data),),
        test_dataset=(str(data),),
        eval_fraction=min(0.5, NUM_EVAL_PAIRS / num_train),
        output_dir=folder,
        overwrite=overwrite,
        steps=steps,
        batch_size=BATCH_SIZE,
        lr=3e-5,
        label_smoothing=0.0,
        max_seq_len=256,
        system_prompt="",
        eval_every=max(1, steps // 2),
        log_every=5 if steps >= 5 else 1,
        # A run of a few minutes is not worth checkpoints, which take three times the model on disk.
        checkpoints=False,
        seed=seed,
    )


def closing_report(result: TrainResult, pairs: tuple[SyntheticPair, ...], best: Ceiling, *, minutes: float) -> str:
    """Return the closing report: baselines, before and after on the same test pairs, beside the best possible."""
    judged = {name: evaluated.overall for name, evaluated in result.compared("test").items()}
    table = comparison_table({**judged, "ceiling": truth(pairs)}, first="model")
    return "\n".join(
        [
            "",
            table,
            *precision_line(result.computed_in, result.compared("test")),
            *(f"\n{block}\n" for block in precision_blocks(result.live, result.card)),
            "length only, bag of words: linear models fitted on the same training pairs.",
            f"ceiling: the true utilities; over other draws of the label noise, {best.bayes_accuracy:.3f} on average.",
            textwrap.fill(result.speed, width=report_width()),
            *warning_block(result.warnings),
            f"Training took {result.train_seconds / 60:.1f} minutes, everything {minutes:.1f}.",
            "",
            f"Run folder:    {visible(str(result.output_dir))}",
            f"Reward model:  {visible(str(result.model))} (of step {result.step})",
            "",
            "Next, on your own preferences (JSONL rows with prompt, chosen, rejected):",
            f"  {command(*FIRST_RUN)}",
        ]
    )


def truth(pairs: tuple[SyntheticPair, ...]) -> Evaluation:
    """Return the evaluation of a model that scores every reply with its true utility."""
    rows = [
        ScoreRow(
            preference_id=pair.preference.id,
            source=pair.preference.source,
            prompt_key=pair.preference.key,
            reply=reply,
            score=pair.utilities[reply],
            num_tokens=1,
            prompt_tokens=0,
            truncated_tokens=0,
            comparisons=pair.preference.comparisons if reply == 0 else (),
        )
        for pair in pairs
        for reply in range(2)
    ]
    return evaluate(rows, beta=1.0)
