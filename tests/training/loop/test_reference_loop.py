"""A run equals a plain loop: transformers' padded sequence classifier, its loss written out, torch's AdamW.

Nothing of the training room is used on the other side: not its plan, weights, losses, clipping or optimiser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from common import CONFIGS, arithmetic, make_groups, make_model, make_tokenizer, write_pairs
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets, weigh
from rewardlab.model.reward import RewardModel, disk_name
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

Judgement = tuple[int, int, float, float, float]
"""(row of one reply, row of the other, label, weight, margin)"""
PAD = 0
LR, DECAY, MAX_NORM, SMOOTHING, BETA = 1e-2, 0.3, 0.2, 0.05, 0.7


def reference_loss(scores_R: Tensor, prompts: Sequence[Sequence[Judgement]]) -> Tensor:
    """Every prompt counts once: its comparisons share its weight."""
    total, weights = scores_R.new_zeros(()), 0.0
    for judgements in prompts:
        for one, other, label, weight, margin in judgements:
            if label < 0.5:
                one, other, label = other, one, 1 - label
            logit = BETA * (scores_R[one] - scores_R[other]) - (margin if label > 0.5 else 0.0)
            wanted = label * (1 - SMOOTHING) + (1 - label) * SMOOTHING
            share = weight / len(judgements)
            total = total - share * (wanted * F.logsigmoid(logit) + (1 - wanted) * F.logsigmoid(-logit))
            weights += share
    return total / weights


def run_reference(
    classifier: Any, batches: Sequence[tuple[list[list[int]], list[list[Judgement]]]]
) -> tuple[list[float], list[float], list[float]]:
    """(loss, norm of all gradients, norm of the head's) of every step; the classifier's weights move."""
    classifier.config.get_text_config().pad_token_id = PAD
    classifier.eval()
    named = list(classifier.named_parameters())
    spared = [parameter for name, parameter in named if "norm" in name or name.endswith("bias")]
    decayed = [parameter for name, parameter in named if not ("norm" in name or name.endswith("bias"))]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": spared, "weight_decay": 0.0}], lr=LR, foreach=False
    )
    losses, norms, of_head = [], [], []
    for rows, prompts in batches:
        longest = max(map(len, rows))
        ids_RL = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        real_RL = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        loss = reference_loss(classifier(input_ids=ids_RL, attention_mask=real_RL).logits[:, 0], prompts)
        optimizer.zero_grad()
        loss.backward()
        norm = sum(float(p.grad.square().sum()) for _, p in named if p.grad is not None) ** 0.5
        of_head.append(float(classifier.score.weight.grad.norm()))
        for _, parameter in named:
            if parameter.grad is not None and norm > MAX_NORM:
                parameter.grad.mul_(MAX_NORM / (norm + 1e-6))
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(norm)
    return losses, norms, of_head


def reference_rows(groups: Sequence[TokenGroup]) -> tuple[list[list[int]], list[list[Judgement]]]:
    rows: list[list[int]] = []
    prompts: list[list[Judgement]] = []
    for group in groups:
        start = len(rows)
        rows += [group.conversation(reply).tolist() for reply in range(group.num_replies)]
        prompts.append([(start + c.first, start + c.second, c.label, c.weight, c.margin) for c in group.comparisons])
    return rows, prompts


def settings(**changes: object) -> dict[str, Any]:
    return {
        "model": "x",
        "dataset": ("y",),
        "beta": BETA,
        "label_smoothing": SMOOTHING,
        "lr": LR,
        "lr_scheduler": "constant",
        "weight_decay": DECAY,
        "max_grad_norm": MAX_NORM,
        **changes,
    }


Track = tuple[list[float], list[float], dict[str, Tensor]]
"""The loss of every step, the norms of all gradients and then of the head's, and the weights afterwards by their names
on the disk."""


def on_disk(model):
    """The weights under the names that they have on disk."""
    return {disk_name(name, model.disk_class): tensor for name, tensor in model.state_dict().items()}


def five_steps(
    family: str, dtype: torch.dtype, folder: Path | None, seed: int = 0
) -> tuple[Track | None, Track, dict[str, Tensor]]:
    """(ours, the plain loop's, the weights before) over the same uneven K-wise groups; ours where it has a folder."""
    groups = make_groups(18, replies=4, seed=seed)
    model = make_model(family, dtype=dtype).train()
    config = CONFIGS[family]()
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config).to(dtype)
    before = {name: tensor.clone() for name, tensor in on_disk(model).items()}
    classifier.load_state_dict(before)
    batches = [
        reference_rows([groups[n] for n in order])
        for order in np.array_split(np.random.default_rng((3, 0)).permutation(18), [4, 8, 12, 16])
    ]
    with arithmetic(dtype):
        ours = None if folder is None else our_steps(model, groups, folder)
        losses, norms, of_head = run_reference(classifier, batches)
    assert min(norms) > MAX_NORM, "clipping acts"
    return ours, (losses, norms + of_head, classifier.state_dict()), before


def our_steps(model: RewardModel, groups: Sequence[TokenGroup], folder: Path) -> Track:
    """What five steps of the trainer give."""
    trainer = reward_trainer(
        RewardTrainerConfig.of(**settings(batch_size=4, micro_token_budget=60, seed=3)),
        model,
        Datasets(train=weigh(groups, by="prompt")),
        num_steps=5,
        records=Records(folder),
        save=lambda folder, step: None,
    )
    reports, micro_batches = [], 0
    while trainer.step < 5:
        plan = trainer.steps.plan(trainer.step, trainer.token_budget)
        micro_batches += len(plan)
        reports.append(trainer.train_step(plan))
        trainer.step += 1
    assert micro_batches > 5, "steps are made of several micro-batches"
    norms = [report.grad_norm for report in reports] + [report.head_grad_norm for report in reports]
    return [report.sums.mean_loss for report in reports], norms, on_disk(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_five_steps_over_uneven_kwise_groups_equal_a_plain_padded_loop(family, tmp_path):
    ours, plain, before = five_steps(family, torch.float64, tmp_path)
    for found, wanted in zip(ours[:2], plain[:2], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
    for name, tensor in plain[2].items():
        assert (ours[2][name] - tensor).norm() <= 1e-9 * (tensor - before[name]).norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("problems", [5, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_in_float32_they_are_no_further_from_the_exact_ones_than_the_plain_loop(family, problems, tmp_path):
    """AdamW divides gradients by their own size, those of rounding too, so how far two orders of summation get apart
    depends on the processor, and of one problem by chance: ours is up to 14 times as far as the plain loop, or as
    near. Over several problems the typical ratio says which of them is wrong; over 12 it is measured as 0.7 to 1.25,
    from which 0.6 to 1.4 is expected over 5; the bound is 3.
    """
    ratios = []
    for seed in range(problems):
        _, exact, _ = five_steps(family, torch.float64, None, seed)
        ours, plain, _ = five_steps(family, torch.float32, tmp_path / f"{seed}", seed)
        tracks = zip(ours, plain, exact, strict=True)
        ratios.append([distance(found, truth) / distance(wanted, truth) for found, wanted, truth in tracks])
    typical = np.exp(np.log(ratios).mean(axis=0))
    assert (typical <= 3).all(), f"losses, gradient norms, weights: {typical}"


def distance(track: Any, truth: Any) -> float:
    """Root mean square of the distances of numbers, or geometric mean over the tensors."""
    if isinstance(truth, dict):
        return float(np.exp(np.mean([np.log(float((track[name] - truth[name]).norm())) for name in truth])))
    return float(np.sqrt(np.mean(np.square(np.subtract(track, truth)))))


@pytest.mark.usefixtures("verified_here")
def test_a_run_from_rows_to_folder_equals_a_plain_loop_over_the_same_rows(tmp_path):
    """From JSONL to saved weights: reading, rendering, weighing by prompt, three steps, saving."""
    base, tokenizer = tmp_path / "base", make_tokenizer(pad="<|unused|>")
    config = CONFIGS["llama"]()
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(str(base))
    pairs = write_pairs(tmp_path / "pairs.jsonl", 6)
    kwise = tmp_path / "kwise.jsonl"
    answers = ["Water it.", "yes, light", "no", "Paris!"]
    ranked = [
        {"prompt": f"Soil {n}?", "responses": answers[: 3 + n % 2], "scores": [2, 3, 1, 0][: 3 + n % 2]}
        for n in range(5)
    ]
    kwise.write_text("".join(json.dumps(row) + "\n" for row in ranked), encoding="utf-8")
    result = train(
        RewardTrainerConfig.of(
            **settings(
                model=str(base),
                dataset=(str(pairs), str(kwise)),
                output_dir=tmp_path / "run",
                steps=3,
                batch_size=64,
                eval_fraction=0.0,
                max_seq_len=128,
                micro_token_budget=200,
                precision="fp32",
            )
        )
    )
    rows, prompts = rows_of_files(pairs, ranked, tokenizer)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    classifier.get_input_embeddings().padding_idx = None
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    assert all(PAD not in row for row in rows), "transformers finds the end by the pad"
    losses, norms, _ = run_reference(classifier, [(rows, prompts)] * 3)
    assert min(norms) > MAX_NORM
    saved = load_file(result.last / "model.safetensors")
    for name, tensor in classifier.state_dict().items():
        gap, moved = (saved[name] - tensor).norm(), (tensor - before[name]).norm()
        assert gap <= 1e-3 * moved, f"{name}: {gap / moved:.1e} of its movement"
    assert losses[-1] < losses[0]


def rows_of_files(pairs: Path, ranked: list[dict[str, Any]], tokenizer: Any) -> Any:
    """Tokens and judgements of the rows, through the tokenizer's own chat template."""
    rows: list[list[int]] = []
    prompts: list[list[Judgement]] = []

    def add(prompt: str, replies: Sequence[str], scores: Sequence[float]) -> None:
        start = len(rows)
        for reply in replies:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        better = [(i, j) for i in range(len(replies)) for j in range(len(replies)) if scores[i] > scores[j]]
        prompts.append([(start + i, start + j, 1.0, 1.0, 0.0) for i, j in better])

    for row in map(json.loads, pairs.read_text(encoding="utf-8").splitlines()):
        add(row["prompt"], [row["chosen"], row["rejected"]], [1, 0])
    for row in ranked:
        add(row["prompt"], row["responses"], row["scores"])
    return rows, prompts
