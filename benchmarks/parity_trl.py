"""Step for step with TRL: the same weights, rows and order through TRL's RewardTrainer and through ours."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import logging
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig
from trl import RewardTrainer as TrlRewardTrainer

from harness.parity import LOSS_TOLERANCE, UPDATE_TOLERANCE, WEIGHT_TOLERANCE, Parity, Track, compare, table
from harness.results import RESULTS, new_path
from harness.tiny import TINY, write_tiny
from rewardlab.artifact.save import choose_pad
from rewardlab.core.files import write_json
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.groups import Datasets, weigh
from rewardlab.data.step_order import batch_of_step
from rewardlab.data.synthetic import generate
from rewardlab.data.templates import build_renderer
from rewardlab.data.token_report import tokenize
from rewardlab.model import lora
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout, load_reward_model, read_config
from rewardlab.model.reward import RewardModel, disk_name
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig

PAIRS_A_STEP = 16

SWITCHES: tuple[tuple[str, str, str, str], ...] = (
    ("rows", "tokenised by the trainer", "tokenised by the renderer", "TRL gets the renderer's tokens"),
    (
        "order",
        "shuffled by torch, from `seed`",
        "by numpy, from --seed and the epoch",
        "TRL goes through ours in order",
    ),
    ("head", "normal, the model's initializer_range", "normal, variance 1/(width + 1)", "TRL gets ours"),
    ("LoRA: head", "frozen unless task_type is SEQ_CLS", "always trained", "TRL gets SEQ_CLS"),
    ("LoRA: start", "drawn by PEFT", "drawn by PEFT from --seed", "TRL gets ours"),
    ("label smoothing", "none", "0.05", "ours off"),
    (
        *("learning rate", "1e-4, falling linearly to 0", "5e-6 or 5e-5 (LoRA), a cosine with 5 % warm-up"),
        "the same; a cosine with 10 % warm-up on both",
    ),
    ("weight decay", "0", "0.01", "0.1 on both, so that it shows; neither decays norms and biases"),
    ("batch", "8 pairs, micro-batches by rows", "16 pairs, micro-batches by tokens", "16; TRL in 2 micro-batches of 8"),
    ("precision", "bf16 autocast", "bf16 where the processor has it", "float32 on both"),
    ("gradient checkpointing", "on", "none", "off in TRL; it changes no number"),
    ("pad token", "the tokenizer's, or EOS", "never the last token of a rendering", "TRL gets ours"),
    ("embedding of the pad token", "gets no gradient (padding_idx)", "trains like any other", "cleared in TRL"),
    ("dropout", "nn.Dropout off, LoRA's too", "the model's off, LoRA's as asked", "none on both"),
)
"""Where the two differ of themselves: what, in TRL, in rewardlab, what was done about it here."""


def run_case(
    folder: str, *, name: str, use_lora: bool, num_steps: int, lr: float, max_tokens: int, work: Path
) -> Parity:
    """Train both from the model in `folder` on generated pairs of at most `max_tokens` tokens a reply."""
    config = RewardTrainerConfig.of(
        model=folder,
        dataset=("generated",),
        output_dir=work,
        batch_size=PAIRS_A_STEP,
        lr=lr,
        warmup_ratio=0.1,
        weight_decay=0.1,
        label_smoothing=0.0,
        max_seq_len=512,
        micro_token_budget=1024,
        precision="fp32",
        lora=use_lora,
        lora_rank=8,
        lora_alpha=16.0,
    )
    renderer = build_renderer(load_tokenizer(folder), config.data.rendering)
    groups = short_groups(renderer, count=PAIRS_A_STEP * max(1, num_steps // 2), max_tokens=max_tokens)
    model_config = read_config(folder)
    pad = choose_pad(renderer, model_config.get_text_config().vocab_size)
    layout = choose_layout(
        model_config, disk_class_of(model_config), config.model, max_length=512, share=True, log=lambda line: None
    )
    ours_model = load_reward_model(
        folder, config.model, seed=config.run.seed, layout=layout, device=torch.device("cpu"), log=lambda line: None
    )
    trl_trainer = build_trl(folder, config, ours_model, groups, num_steps=num_steps, pad=pad, work=work)
    ours = train_ours(config, ours_model, groups, num_steps=num_steps, work=work)
    del ours_model
    trl = train_trl(trl_trainer, num_steps=num_steps)
    return compare(name, "LoRA" if use_lora else "full", ours, trl, max_grad_norm=config.optimizer.max_grad_norm)


def short_groups(renderer: Any, *, count: int, max_tokens: int) -> list[TokenGroup]:
    """The first `count` generated pairs that fit."""
    preferences: list[Preference] = [pair.preference for pair in generate(count * 8, seed=0, topics="train")]
    groups, _ = tokenize(preferences, renderer, max_drop_fraction=1.0, name="generated")
    fitting = [group for group in groups if max(group.lengths) <= max_tokens]
    if len(fitting) < count:
        raise SystemExit(f"only {len(fitting)} of {len(groups)} pairs fit in --max-tokens {max_tokens}, wanted {count}")
    return fitting[:count]


def train_ours(
    config: RewardTrainerConfig, model: RewardModel, groups: Sequence[TokenGroup], *, num_steps: int, work: Path
) -> Track:
    """rewardlab's own trainer, step by step."""
    trainer = reward_trainer(
        config,
        model,
        Datasets(train=weigh(groups, by=config.loss.kwise_weight)),
        num_steps=num_steps,
        records=Records(work),
        save=lambda folder, step: None,
    )
    before, started, reports = trained_weights(model), time.perf_counter(), []
    while trainer.step < num_steps:
        reports.append(trainer.train_step(trainer.steps.plan(trainer.step, trainer.token_budget)))
        trainer.step += 1
    return Track(
        losses=[report.sums.mean_loss for report in reports],
        grad_norms=[report.grad_norm for report in reports],
        before=before,
        after=trained_weights(model),
        seconds=time.perf_counter() - started,
    )


def adapter_state(model: RewardModel) -> dict[str, Tensor]:
    """Adapters and head under PEFT's names, whole and on the CPU."""
    weights = {name: weight.whole(True) for name, weight in lora.adapter_weights(model).items()}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


def trained_weights(model: RewardModel) -> dict[str, Tensor]:
    """Copies under the names that TRL's model has for them."""
    if lora.has_adapters(model):
        state = adapter_state(model)
    else:
        state = {disk_name(name, model.disk_class): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class RecordingTrlTrainer(TrlRewardTrainer):
    """TRL's trainer with the loss of every micro-batch kept at full precision (its log rounds)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_losses: list[float] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.micro_losses.append(float(loss.detach()))
        return result

    def weights(self) -> dict[str, Tensor]:
        """Copies of what trains, under the names of the saved files."""
        lora_model = hasattr(self.model, "peft_config")
        state = get_peft_model_state_dict(self.model) if lora_model else self.model.state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def build_trl(
    folder: str,
    config: RewardTrainerConfig,
    ours: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    num_steps: int,
    pad: int,
    work: Path,
) -> RecordingTrlTrainer:
    """TRL's trainer with our starting weights, precision, and rows in our order, and SWITCHES as they say."""
    order = [
        index
        for step in range(num_steps)
        for index in batch_of_step(step, num_groups=len(groups), batch_size=config.run.batch_size, seed=config.run.seed)
    ]
    rows = [
        {"chosen_ids": groups[n].conversation(0).tolist(), "rejected_ids": groups[n].conversation(1).tolist()}
        for n in order
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(ours.head.weight)
    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    adapter = None
    if config.model.lora:
        names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in ours.state_dict() if ".lora_" in name}
        adapter = LoraConfig(
            task_type="SEQ_CLS",
            r=config.model.lora_rank,
            lora_alpha=config.model.lora_alpha,
            lora_dropout=0.0,
            target_modules=sorted(names),
        )
    with _quiet():
        trainer = RecordingTrlTrainer(
            model=model,
            args=RewardConfig(
                output_dir=str(work / "trl"),
                per_device_train_batch_size=config.run.batch_size // 2,
                gradient_accumulation_steps=2,
                max_steps=num_steps,
                learning_rate=config.learning_rate,
                lr_scheduler_type=config.schedule.lr_scheduler,
                warmup_steps=config.schedule.warmup_ratio or 0,
                weight_decay=config.optimizer.weight_decay,
                max_grad_norm=config.optimizer.max_grad_norm,
                train_sampling_strategy="sequential",
                max_length=None,
                bf16=config.model.precision == "bf16",
                gradient_checkpointing=False,
                use_cpu=True,
                dataloader_pin_memory=False,
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=adapter,
        )
    trainer.remove_callback(transformers.PrinterCallback)
    for module in trainer.model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    if adapter is not None:
        set_peft_model_state_dict(trainer.model, adapter_state(ours))
    return trainer


def train_trl(trainer: RecordingTrlTrainer, *, num_steps: int) -> Track:
    """TRL's own loop."""
    before, started = trainer.weights(), time.perf_counter()
    with _quiet():
        trainer.train()
    micro = trainer.micro_losses
    assert len(micro) == 2 * num_steps, f"{len(micro)} micro-batches for {num_steps} steps"
    return Track(
        losses=[(a + b) / 2 for a, b in zip(micro[::2], micro[1::2], strict=True)],
        grad_norms=[float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry],
        before=before,
        after=trainer.weights(),
        seconds=time.perf_counter() - started,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers about names that TRL itself uses
        yield


def switches() -> str:
    """SWITCHES in lines."""
    lines = [f"  {what}: TRL {trl}; rewardlab {ours}. Here: {here}." for what, trl, ours, here in SWITCHES]
    return "\n".join(["Where the two differ of themselves, and what was done:", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(TINY), help="tiny-llama, tiny-qwen2, a folder or a name")
    parser.add_argument("--kind", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=None, help="tokens of the longest reply with its prompt")
    parser.add_argument("--lr", type=float, default=None, help="by default 1e-3 for tiny models, 1e-5 or 1e-4 (LoRA)")
    parser.add_argument("--no-result", action="store_true", help="write nothing to benchmarks/results")
    options = parser.parse_args(arguments)
    logging.getLogger("rewardlab").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(switches() + "\n")
    found: list[Parity] = []
    for model in options.model:
        for kind in options.kind:
            with tempfile.TemporaryDirectory() as work:
                tiny = model in TINY
                folder = (
                    write_tiny(Path(work, "model"), model) if tiny else resolve_model_name(model, lambda line: None)
                )
                rate = 1e-3 if tiny else 1e-4 if kind == "lora" else 1e-5
                parity = run_case(
                    folder,
                    name=model if tiny else Path(model).name,
                    use_lora=kind == "lora",
                    num_steps=options.steps,
                    lr=options.lr or rate,
                    max_tokens=options.max_tokens or (160 if tiny else 64),
                    work=Path(work),
                )
            found.append(parity)
            print(table(parity), flush=True)
    failures = [text for parity in found for text in parity.failures]
    if not options.no_result:
        print(f"written: {write_result(found, failures, options)}")
    for text in failures:
        print(f"error: {text}", file=sys.stderr)
    print("the same, step for step" if not failures else f"{len(failures)} promises broken")
    return 1 if failures else 0


def write_result(found: Sequence[Parity], failures: Sequence[str], options: argparse.Namespace) -> Path:
    """The dated record in benchmarks/results."""
    now = datetime.datetime.now(datetime.UTC)
    names = "_".join(dict.fromkeys(parity.model for parity in found))
    packages = ("rewardlab", "torch", "transformers", "trl", "peft", "accelerate", "numpy")
    write_json(
        path := new_path(RESULTS, "parity_trl", names).with_suffix(".json"),
        {
            "benchmark": "parity_trl",
            "date": now.isoformat(timespec="seconds"),
            "options": {name: value for name, value in vars(options).items() if name != "model"},
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in packages},
            "threads": torch.get_num_threads(),
            "tolerances": {"loss": LOSS_TOLERANCE, "weights": WEIGHT_TOLERANCE, "updates": UPDATE_TOLERANCE},
            "switches": [dict(zip(("what", "trl", "rewardlab", "here"), row, strict=True)) for row in SWITCHES],
            "cases": [asdict(parity) for parity in found],
            "failures": list(failures),
        },
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
