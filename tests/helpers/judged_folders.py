"""Folders of evaluations and probes with everything that only some have, written without torch: suites, robustness, a
precision card, controls, an ensemble, slices by columns. A text stands in every name of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rewardlab.analysis.precision import MEASURES
from rewardlab.analysis.robustness import MEASURES as MOVED
from rewardlab.core.files import sha256_file, write_json
from rewardlab.core.types import Estimate
from rewardlab.evaluation.records import write_slices
from run_folders import score_rows, write_evaluation, write_model


def estimate(value: float, method: str = "Wilson") -> dict[str, object]:
    """An estimate as JSON."""
    return asdict(Estimate(value=value, low=value - 0.1, high=value + 0.1, n=100, method=method))


def write_judged(folder: Path, *, text: str = "") -> Path:
    """An evaluation of a model on a dataset, on suites and as a member of an ensemble."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "model", text=text)
    rows = score_rows(60, source=f"preferences {text}", text=text)
    write_evaluation(folder, "eval", rows)
    config = {"model": str(model), "dataset": [f"pairs {text}"], "hf_split": f"test {text}", "precision": "fp32"}
    write_json(
        folder / "manifest.json",
        {
            "config": config,
            "data": [{"name": text, "split": text, "rows_read": 60, "kept": 60, "dropped": {f"cause {text}": 1}}],
            "tokens": {"kept": 60, "replies": 120},
            "spec_sha256": sha256_file(model / "reward_spec.json"),
            "provenance": {"git_commit": text},
        },
    )
    keys = [(row.source, row.preference_id) for row in rows if row.reply == 0]
    values = [f"{text} {'ab'[number % 2]}" for number in range(len(keys))]
    write_slices(folder, "eval", {f"column {text}": dict(zip(keys, values, strict=True))})
    write_json(folder / "suite.hhh.json", _suite(text))
    write_json(folder / "eval.perturbed.json", _robustness(text))
    write_json(folder / "precision.json", card(text))
    write_json(folder / "diagnose.json", _controls(text))
    write_json(folder / "ensemble.json", _ensemble(text))
    for how in ("mean", "minimum"):
        write_evaluation(folder, f"ensemble.{how}", rows)
    return folder


def write_probe(folder: Path, *, text: str = "") -> Path:
    """A probe with layers, learning curve, uncertainty and a precision card."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"model": f"m {text}", "dataset": [f"d {text}"], "folds": 5, text or "x": text})
    write_evaluation(folder / "evals", "test", score_rows(source=f"preferences {text}", text=text))
    held_out = {
        "eval_accuracy": estimate(0.7, f"Wilson {text}"),
        "eval_loss": estimate(0.6, text),
        f"eval {text}": estimate(0.6),
    }
    write_json(
        folder / "probe.json",
        {
            "chosen_layer": f"12 {text}",
            "layers": [{"layer": f"12 {text}", "penalty": 0.3, "held_out": held_out}],
            "learning_curve": [{"comparisons": 50.0 * n, **held_out} for n in (1, 2)],
            "uncertainty": {name: estimate(0.7, text) for name in ("over_heads", "sure", "unsure")},
            "seconds": 75.0,
        },
    )
    write_json(folder / "evals/precision.json", card(text))
    return folder


def card(text: str) -> dict[str, object]:
    """A precision card."""
    measures = {measure: estimate(0.6, f"method {text}") for measure in MEASURES}
    return {
        "preferences": f"60 {text}" if text else 60,
        "available": 60,
        "seed": 0,
        "measures": {"float32": measures, f"bf16 {text}": measures},
        "off": [f"bf16 {text}"],
        "verdicts": [
            {"precision": f"bf16 {text}", "answer": f"may be served {text}", "evidence": f"It is near. {text}"}
        ],
    }


def _suite(text: str) -> dict[str, object]:
    row = {
        "name": f"Focus {text}",
        "kind": "subset",
        "rows": 12,
        "score": estimate(0.7, f"bootstrap {text}"),
        "ties_at_random": estimate(0.65),
        "baselines": {f"longest {text}": estimate(0.6)},
        "better_baseline": f"longest {text}",
        "gain": estimate(0.1),
        "p_value": 0.01,
        "p_holm": 0.02,
    }
    total = {**row, "name": f"HHH {text}", "kind": "total"}
    return {"suite": f"HHH {text}", "ties": text, "weighting": text, "rows": [row, total, {**row, "kind": text}]}


def _robustness(text: str) -> dict[str, object]:
    effect = {
        "estimates": {measure: estimate(0.1, f"t {text}") for measure in MOVED},
        "p_shift_holm": 0.01,
        "p_accuracy_holm": None,
        "preferences": 60,
    }
    return {"preferences": f"60 {text}", "available": 60, "perturbations": {f"typos {text}": effect}}


def _controls(text: str) -> dict[str, object]:
    measured = [{"name": f"accuracy {text}", "seeds": estimate(0.5), "conversations": estimate(0.5, text)}]
    control = {
        "control": f"shuffled_labels {text}",
        "verdict": f"fail {text}",
        "sentence": f"It learns. {text}",
        "measured": measured,
    }
    return {
        "what": f"What {text}",
        "headline": f"Headline {text}",
        "model_itself": {"over_seeds": estimate(0.7), "over_conversations": estimate(0.7, text)},
        "controls": [control, {**control, "verdict": "fail"}],
    }


def _ensemble(text: str) -> dict[str, object]:
    return {
        "members": [f"a {text}", f"b {text}"],
        "scaled_by": f"the calibration {text}",
        "combinations": {f"ensemble mean {text}": f"mean {text}"},
        "penalty": 1.0,
        "disagreement": {
            "by_spread": estimate(0.6, text),
            "by_margin": estimate(0.7),
            "num_errors": 20,
            "num_right": 40,
        },
    }
