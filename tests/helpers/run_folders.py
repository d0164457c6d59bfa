"""Folders as runs leave them, written without torch: small, with known numbers, and hostile where a test wants that."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.metrics import by_source, evaluate
from rewardlab.core.files import sha256_file, write_json, write_jsonl, write_summed_json
from rewardlab.core.spec import Canary, RendererSpec, RewardSpec
from rewardlab.core.types import Comparison, Message, ScoreRow, prompt_key
from rewardlab.data.finding import find_sources

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "[click](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "| a | b |\n| --- | --- |\n\n# Heading\n\n```\n<b>bold</b>",
    "1. x\n---\nhttps://evil.example www.evil.example <https://evil.example> @someone",
    "\x1b[2J\x1b]0;title\x07 \u202eright to left\u202c \x00 \u2028 \ud800",
    "name: [unclosed\n---\nbase_model: evil/model\n--- # !!python/object/apply:os.system ['x']",
    "&lt;b&gt; &#60;i&#62; &amp;",
)
"""What prompts, names and paths may hold to become markup, commands of a terminal, or YAML."""


_PARTS: dict[tuple[float, ...], list[dict[str, object]]] = {}
"""β and scores -> what was computed of them: names change no number, so equal scores are judged once."""


def prompt_of(number: int, text: str = "") -> tuple[Message, ...]:
    """The prompt of a row."""
    return (Message(role="user", content=f"Question {number} {text}"),)


def score_rows(num: int = 40, *, shift: float = 1.0, source: str = "preferences", text: str = "", seed: int = 0):
    """Rows of `num` pairs; preferred replies score `shift` higher on average."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(num):
        key = prompt_key(prompt_of(number, text))
        lengths = generator.integers(5, 60, size=2).tolist()
        for reply in range(2):
            rows.append(
                ScoreRow(
                    preference_id=f"test.jsonl:{number + 1}",
                    source=source,
                    prompt_key=key,
                    reply=reply,
                    score=float(generator.normal(shift if reply == 0 else 0.0)),
                    num_tokens=lengths[reply] + 10,
                    prompt_tokens=10,
                    truncated_tokens=int(number % 7 == 0),
                    comparisons=(Comparison(first=0, second=1),) if reply == 0 else (),
                )
            )
    return rows


def write_evaluation(folder: Path, name: str, rows: Iterable[ScoreRow], *, beta: float = 1.0) -> None:
    """The two files of an evaluation, as `evaluation.evaluate` writes them."""
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    scores = folder / f"{name}.scores.jsonl"
    write_jsonl(scores, (row.as_dict() for row in rows))
    names = ["all", *dict.fromkeys(row.source for row in rows)]
    key = (beta, *(row.score for row in rows))
    if key not in _PARTS:
        parts = [evaluate(rows, beta=beta), *by_source(rows, beta=beta).values()]
        _PARTS[key] = [
            {
                "estimates": encode(own.estimates),
                "sums": encode(own.sums),
            }
            for own in parts
        ]
    values: dict[str, object] = dict(zip(names, _PARTS[key], strict=True))
    write_json(folder / f"{name}.metrics.json", values | {"scores_sha256": sha256_file(scores)})


def write_run(folder: Path, *, text: str = "", steps: int = 40, reached: int | None = None) -> Path:
    """A training run with everything in it; `text` stands in every name and text that may come from elsewhere.

    `reached` is the step at which it is now, if it is not finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reached = steps if reached is None else reached
    source = f"preferences {text}"
    data = folder.parent / "data"
    _write_data(data, text)
    config = {
        "model": f"base {text}",
        "dataset": [str(data / "test.jsonl")],
        "test_dataset": [str(data / "test.jsonl")],
        "eval_fraction": 0.1,
        "output_dir": str(folder),
        "steps": steps,
        "lr": 3e-5,
        "beta": 1.0,
        "seed": 0,
        f"key {text}": text,
    }
    provenance = {"git_commit": text, "packages": {f"package {text}": text}, "command": ["rewardlab", text]}
    report = {"name": source, "split": text, "rows_read": 50, "kept": 40, "dropped": {f"cause {text}": 10}}
    tokens = {"kept": 40, "replies": 80, "truncated_replies": 3, "lost_replies": 0, "tokens": 900, "longest": 70}
    manifest = {
        "config_hash": "0123",
        "data": {"train": [report], "test": [report], "shared": {f"test {text}": {"prompts": 1}}},
        "tokens": {f"training {text}": tokens},
        "peak": {"flops_per_second": 4e11, "source": f"measured {text}"},
        "provenance": provenance,
    }
    write_summed_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", config)
    _write_metrics(folder, reached)
    sign = {"step": 10, "name": f"overfitting {text}", "text": f"It is worse. {text}", "advice": f"Try less. {text}"}
    (folder / "warnings.jsonl").write_text(json.dumps(sign) + "\n", encoding="utf-8")
    scores = {side: np.random.default_rng(1).normal(size=30).tolist() for side in ("chosen", "rejected")}
    write_json(folder / "reward_distributions.json", {str(step): scores for step in range(0, reached + 1, 10)})
    evals = folder / "evals"
    for step in range(0, reached + 1, 10):
        write_evaluation(evals, f"step_{step}", score_rows(20, shift=step / 40, source=source, text=text))
    if reached < steps:
        return folder
    write_evaluation(evals, "selection", score_rows(20, shift=1.0, source=source, text=text))
    for name, shift in (("test_before_training", 0.0), ("test_length_only", 0.1), ("test_bag_of_words", 0.4)):
        write_evaluation(evals, name, score_rows(shift=shift, source=source, text=text))
    # The rows of the first source are found again in the data; those of the second are not.
    (found,) = find_sources([str(data / "test.jsonl")], "test")
    rows = score_rows(shift=1.0, source=found.name, text=text)
    write_evaluation(evals, "test", [*rows, *score_rows(12, shift=0.5, source=source, text=text, seed=3)])
    write_model(folder / "best", text=text)
    return folder


def write_model(folder: Path, *, text: str = "") -> Path:
    """A spec without a model, which is all that a report reads of one."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text.replace("\ud800", "")  # a spec with half a character is refused when it is read
    template = f"{{{{ messages }}}}{text}"
    spec = RewardSpec(
        renderer=RendererSpec(
            chat_template=template,
            template_source="plain",
            template_arguments={},
            system_prompt=None,
            max_length=128,
            truncation="oldest_turns_first_fewest_tokens",
            final_token_id=None,
            bos_token_id=None,
            num_bos=0,
            special_tokens_in_text="text",
        ),
        beta=1.0,
        head_dtype="float32",
        save_dtype="float32",
        rounding="none",
        max_rounding_error=0.0,
        canaries=[
            Canary(name="short", messages=[{"role": "user", "content": text}], token_ids=[1], score=0.0, decoys={})
        ],
        files={},
        provenance={"step": 40},
    )
    write_json(folder / "reward_spec.json", spec.to_dict())
    return folder


def _write_data(folder: Path, text: str) -> None:
    rows = [
        {
            "prompt": prompt_of(number, text)[0].content,
            "chosen": f"Good answer {number} {text}",
            "rejected": f"Bad answer {number} {text}",
            "true_probability": 0.8,
        }
        for number in range(40)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "test.jsonl", rows)


def _write_metrics(folder: Path, reached: int) -> None:
    rows = []
    for step in range(0, reached + 1, 5):
        row: dict[str, object] = {"step": step}
        if step:
            row |= {"train_loss": 0.7 - step / 200, "train_nll": 0.7 - step / 200, "train_accuracy": 0.5 + step / 100}
            row |= {"lr": 3e-5, "grad_norm": 5.0, "pairs_per_second": 4.0, "seconds": 20.0, "peak_memory_gib": 1.5}
        if step % 10 == 0:
            accuracy = 0.5 + step / 200
            row |= {
                "eval_accuracy": accuracy,
                "eval_accuracy_low": accuracy - 0.1,
                "eval_accuracy_high": accuracy + 0.1,
            }
            row |= {"eval_loss": 0.69 - step / 400, "eval_loss_low": 0.5, "eval_loss_high": 0.7, "eval_ece": 0.05}
            row |= {"eval_margin": step / 40, "eval_pairs": 20, "eval_score_mean": 0.1, "eval_score_std": 1.0}
        rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_jsonl(folder / "metrics.jsonl", rows)
