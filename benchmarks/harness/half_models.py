"""Models trained in half precision and in float32, and who computes them afterwards: live, from a folder, exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from harness import ours, peers, workload
from rewardlab.analysis.metrics import oriented
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.types import ScoreRow, TokenGroup, join_comparisons
from rewardlab.data.chat import Renderer
from rewardlab.evaluation.evaluate import evaluate_groups
from rewardlab.model.lora import bare_name
from rewardlab.model.reward import RewardModel
from rewardlab.score import score_rows
from rewardlab.serve.folders.export import export
from rewardlab.training.loop.reward_trainer import RewardTrainer
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
EXACT = "float32"
LIVE = "live"
ROUNDINGS = ("stochastic", "nearest")
SHORT: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16"}
DTYPES: Mapping[str, str] = {short: dtype for dtype, short in SHORT.items()}
Columns = Mapping[str, np.ndarray]
"""Of each test pair: margin, whether it is ordered as judged, NLL, its label and the key of its prompt; of each reply
its score."""


@dataclass
class Trained:
    """What an arm of a seed came to."""

    losses: list[float]
    """A loss a step; none for a folder that was trained elsewhere."""
    exact: Columns
    """Its weights in float32."""
    others: dict[str, Columns] = field(default_factory=dict)
    """The same model by who computes it: live, as it computes while it trains, and its folder by who serves it."""


class Distance(NamedTuple):
    """Root mean squares of differences from the exact numbers, in standard deviations of those."""

    margins: float
    scores: float


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is trained and judged on, and the model to begin with."""

    name: str
    folder: str
    renderer: Renderer
    train: Sequence[TokenGroup]
    test: Sequence[TokenGroup]


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Where models are trained and judged, in which half precision, and the dtypes that they are exported to."""

    device: torch.device
    half: str
    exports: Sequence[str]

    def arm(self, rounding: str) -> str:
        """The name of the arm that computes in half precision."""
        return f"{self.half}, {rounding}"

    def arms(self) -> dict[str, Mapping[str, str]]:
        """The settings of each arm of ours."""
        return {EXACT: {"precision": "fp32"}} | {
            self.arm(rounding): {"precision": self.half, "half_rounding": rounding} for rounding in ROUNDINGS
        }


def train_arm(
    rows: Rows, settings: Mapping[str, object], steps: int, *, work: Path | None, machinery: Machinery
) -> Trained:
    """One run. With a folder to `work` in, the model is saved there, exported, and served by several."""
    config = ours.settings(rows.folder, settings)
    trainer = ours.build_trainer(config, rows.train, sharing=True, device=machinery.device)
    step = ours.step_of(trainer)
    losses = [float(step()["loss"]) for _ in range(steps)]
    others = {LIVE: columns(judge(trainer.model, rows.test, config))}
    if work is not None:
        save_reward_model(
            work / "saved", trainer.model, rows.renderer, beta=1.0, save_dtype=torch.float32, provenance={}
        )
        others |= serve(work / "saved", rows, config, work=work, machinery=machinery)
    exact = columns(judge(in_float32(trainer), rows.test, config))
    return Trained(losses=losses, exact=exact, others=others)


def read_folder(folder: Path, rows: Rows, work: Path, machinery: Machinery) -> Trained:
    """A model that was saved elsewhere, such as the head of `rewardlab probe`, served by several."""
    config = ours.settings(rows.folder, {})
    others = serve(folder, rows, config, work=work, machinery=machinery)
    return Trained(losses=[], exact=others["the folder in fp32"], others=others)


def judge(model: RewardModel, test: Sequence[TokenGroup], config: RewardTrainerConfig) -> Sequence[ScoreRow]:
    """A row for every reply."""
    return evaluate_groups(model, test, beta=1.0, budget=config.run.token_budget, progress="judging").rows


def in_float32(trainer: RewardTrainer) -> RewardModel:
    """The model, which from now on computes by its float32 weights."""
    model = trainer.model
    if model.half_weights is not None:
        model.half_weights.drop()
        model.half_weights = None
    # Frozen weights were rounded, if that changes them: those of the files are what the model is saved with.
    originals = {} if model.read_originals is None else model.read_originals()
    for name, parameter in model.named_parameters():
        original = None if parameter.requires_grad else originals.get(bare_name(name))
        parameter.data = (parameter.data if original is None else original).float()
    model.compute_dtype = torch.float32
    model.attention_backend = "segments"
    return model


def serve(
    saved: Path, rows: Rows, config: RewardTrainerConfig, *, work: Path, machinery: Machinery
) -> dict[str, Columns]:
    """The test pairs by a saved folder: reloaded in both precisions, and in plain transformers, exported and as it is.

    From a GPU also on the CPU. transformers computes in the dtype of the export; the exported folders go into `work`.
    """
    places = {f"the folder in {precision}": (precision, machinery.device) for precision in ("fp32", machinery.half)}
    if machinery.device != CPU:
        places["the folder in fp32 on the CPU"] = "fp32", CPU
    found = {
        name: columns(judge(load(saved, precision=precision, device=device).model, rows.test, config))
        for name, (precision, device) in places.items()
    }
    served = {}
    for dtype in machinery.exports:
        export(saved, work / dtype, dtype=dtype)
        served[f"exported, transformers in {SHORT[dtype]}"] = work / dtype, getattr(torch, dtype)
    served[f"not exported, transformers in {machinery.half}"] = saved, getattr(torch, DTYPES[machinery.half])
    for name, (folder, arithmetic) in served.items():
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=arithmetic).eval()
        classifier.to(machinery.device)
        scores = []
        for group in rows.test:
            batch = peers.pad_rows([group.conversation(n) for n in (0, 1)], classifier.config.pad_token_id)
            with torch.no_grad():
                scores.append(peers.scores(classifier, batch, half=False).cpu().numpy())
        found[name] = columns(score_rows(rows.test, scores))
    return found


def train_trl(rows: Rows, settings: Mapping[str, object], steps: int, work: Path) -> Trained:
    """TRL's RewardTrainer with `bf16=True` on the CPU, from our weights and head, on our rows in our order."""
    import parity_trl

    exactly: Mapping[str, str] = {"precision": "fp32"}
    autocast: Mapping[str, str] = {"precision": "bf16", "half_rounding": "nearest"}
    nearest = {**settings, **autocast}
    config = ours.settings(rows.folder, nearest)
    trainer = parity_trl.build_trl(
        rows.folder,
        config,
        ours.build_model(config, sharing=True, device=CPU),
        rows.train,
        num_steps=steps,
        pad=workload.pad_token(rows.folder),
        work=work,
    )
    losses = list(parity_trl.train_trl(trainer, num_steps=steps).losses)
    model: Any = trainer.model.merge_and_unload() if config.model.lora else trainer.model
    model.save_pretrained(work / "trl")
    rows.renderer.tokenizer.save_pretrained(str(work / "trl"))
    del trainer, model
    plain = {"lora": False, "train_head_only": False}
    judged = {}
    for name, arm in (("exact", exactly), (LIVE, autocast)):
        config = ours.settings(str(work / "trl"), {**settings, **plain, **arm})
        judged[name] = columns(judge(ours.build_model(config, sharing=True, device=CPU), rows.test, config))
    return Trained(losses=losses, exact=judged["exact"], others={LIVE: judged[LIVE]})


def columns(rows: Sequence[ScoreRow]) -> Columns:
    """What is compared, pair by pair."""
    pairs = oriented(join_comparisons(rows))
    return {
        "margin": pairs.difference,
        "accuracy": pairs.outcome,
        "NLL": pairs.nll(beta=1.0),
        "label": pairs.label,
        "prompt": np.array(pairs.prompt_keys),
        "score": np.array([row.score for row in rows]),
    }


def distance(found: Columns, exact: Columns) -> Distance:
    """How far a computation of a model is from its weights in float32."""

    def part(name: str) -> float:
        return float(np.sqrt(np.mean((found[name] - exact[name]) ** 2)) / exact[name].std())

    return Distance(margins=part("margin"), scores=part("score"))
