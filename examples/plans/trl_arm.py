"""TRL's RewardTrainer as an arm of a plan: the comparator of examples/plans/against_trl.yaml (pip install trl).

    python examples/plans/trl_arm.py SETTINGS OUTPUT_DIR

SETTINGS is the file of a run's settings that `rewardlab plan run` writes. Data, template, length and cuts are those of
`rewardlab train`: TRL is given the same tokens. Model, steps, batch, rate, schedule, weight decay and the limit of
gradients are those of the settings; the order of rows, the first weights of the head, micro-batches by rows and what
the loss does not say are TRL's own. The model becomes a reward-model folder, and is judged on the same rows.

It does not go on where it ended: a run that was interrupted begins anew.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, set_seed
from trl import RewardConfig, RewardTrainer

from rewardlab.artifact.base import settle_length
from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.save import choose_pad
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import provenance, read_json, write_json, write_summed_json
from rewardlab.core.types import TokenGroup
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.prepare import load_data
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import judge, write_evaluation
from rewardlab.evaluation.saved import SavedModel
from rewardlab.model.builtin import resolve_model_name
from rewardlab.serve.folders.import_model import import_model
from rewardlab.training.loop.schedule import warmup_steps
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import to_groups

OTHERWISE: Final[Mapping[str, Any]] = {
    "label_smoothing": 0.0,
    "score_regularization_lambda": 0.0,
    "regularization_lambda": 0.0,
    "lora": False,
    "train_head_only": False,
}
"""Settings that this arm cannot follow -> the value at which there is nothing to follow."""


def require_the_same(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that TRL would not train with: the arms would differ in more than the trainer."""
    for name, wanted in OTHERWISE.items():
        if settings.get(name, wanted) != wanted:
            raise ConfigError(
                f"{name}: {settings[name]} is not done by this arm. Set it to {wanted} in the plan's base."
            )
    if not settings.get("steps"):
        raise ConfigError("steps: name the number of steps in the plan's base, so that both arms have the same.")


def micro_batch(batch_size: int, longest: int, budget: int) -> int:
    """Return pairs a micro-batch: the most that divide the batch and fit the budget, each padded to the longest."""
    fitting = [count for count in range(1, batch_size + 1) if batch_size % count == 0 and 2 * count * longest <= budget]
    return max(fitting, default=1)


def pairs_of(groups: Iterable[TokenGroup]) -> list[dict[str, list[int]]]:
    """Return the token ids of every comparison with a preference, as TRL reads them."""
    rows = []
    for group in groups:
        for one in group.comparisons:
            if one.label == 0.5:
                continue
            chosen, other = (one.first, one.second) if one.label > 0.5 else (one.second, one.first)
            ids = (group.conversation(chosen).tolist(), group.conversation(other).tolist())
            rows.append({"chosen_ids": ids[0], "rejected_ids": ids[1]})
    return rows


def trl_arguments(config: RewardTrainerConfig, folder: Path, longest: int) -> RewardConfig:
    """Return the settings of a run under TRL's names."""
    run, schedule = config.run, config.schedule
    budget = run.micro_token_budget if isinstance(run.micro_token_budget, int) else 8192
    count = micro_batch(run.batch_size, longest, budget)
    least = {"min_lr_rate": schedule.min_lr_ratio} if schedule.lr_scheduler == "cosine_with_min_lr" else None
    is_half = config.model.precision == "bf16" or (config.model.precision == "auto" and torch.cuda.is_available())
    assert run.steps is not None
    return RewardConfig(
        output_dir=str(folder),
        per_device_train_batch_size=count,
        gradient_accumulation_steps=run.batch_size // count,
        max_steps=run.steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=schedule.lr_scheduler,
        lr_scheduler_kwargs=least,
        warmup_steps=warmup_steps(schedule, run.steps),
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
        max_length=None,
        bf16=is_half,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=max(1, run.steps // 100),
        report_to="none",
        disable_tqdm=True,
        seed=run.seed,
    )


def write_metrics(folder: Path, history: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Write what TRL logged as metrics.csv; the last row has the seconds of the run."""
    rows = [{"step": entry["step"], "train_loss": entry["loss"]} for entry in history if "loss" in entry]
    last = max((entry["step"] for entry in history), default=0)
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["step", "train_loss", "seconds"], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, {"step": last, "seconds": seconds}])


def main(arguments: Sequence[str]) -> None:
    """Train with the settings in a file, and leave what a run leaves: the model, its scores and its settings."""
    settings, output = read_json(Path(arguments[0])), Path(arguments[1])
    require_the_same(settings)
    config = from_mapping(RewardTrainerConfig, settings, where=arguments[0])
    config = config.replace(max_seq_len=settle_length(config.model, config.data.rendering))
    output.mkdir(parents=True, exist_ok=True)
    base = resolve_model_name(config.model.model, print)
    tokenizer = load_tokenizer(base)
    renderer = build_renderer(tokenizer, config.data.rendering)
    prepared = load_data(config.data, renderer, seed=config.run.seed, kwise_loss=config.loss.kwise_loss)
    data, test, _ = to_groups(config, prepared, renderer)
    rows = pairs_of(data.train)

    set_seed(config.run.seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    pad = choose_pad(renderer, model.config.get_text_config().vocab_size)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    model.config.pad_token_id = pad
    longest = max(len(ids) for row in rows for ids in row.values())
    trained = output / "trl"
    trainer = RewardTrainer(
        model=model,
        args=trl_arguments(config, trained, longest),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())]
    began = time.perf_counter()
    trainer.train()
    write_metrics(output, trainer.state.log_history, time.perf_counter() - began)
    trainer.save_model(str(trained))
    tokenizer.save_pretrained(trained)
    del trainer, model

    rendering = config.data.rendering
    how = ImportConfig(
        layout="trl",
        chat_template=rendering.chat_template,
        system_prompt=rendering.system_prompt,
        max_seq_len=rendering.length_limit,
        beta=config.loss.beta,
    )
    import_model(trained, output / "best", how, overwrite=True)
    write_json(output / "config.json", settings)
    numbers = {"trainable": counts[0], "total": counts[1]}
    write_summed_json(output / "manifest.json", {"parameters": numbers, "provenance": provenance()})
    saved = SavedModel(EvalConfig.of(model=str(output / "best"), dataset=("the run's own",), reuse=False))
    for name, groups in (("selection", data.eval), ("test", test)):
        if len(groups):
            result = judge(saved.score(groups, progress=name), beta=saved.beta)
            write_evaluation(output / "evals", name, result)
            accuracy = result.overall.estimates["eval_accuracy"]
            if math.isfinite(accuracy.value):
                print(f"{name}: accuracy {accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]")


if __name__ == "__main__":
    main(sys.argv[1:])
