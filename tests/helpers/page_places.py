"""What the commands of pages find where they are run: tiny files of every kind, put where a command names them."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from transformers import PreTrainedTokenizerFast

from foreign_models import adapters, seq_cls
from pages import ROOT, blocks, module_at, read
from rewardlab.cli import main
from rewardlab.core.types import Message
from rewardlab.data.synthetic import generate, reply_texts, write_dataset
from rewardlab.rl.rollout_log import RolloutLog, RolloutRow, key_of
from suite_folders import WRITERS

Row = dict[str, Any]
SHIPPED, MODEL = "smollm2-135m-instruct", "tiny-model"
PAIRS, PROMPTS, REPLIES = 240, 60, 4
TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRL = f"""\
model_name_or_path: {MODEL}
dataset_name: pairs.jsonl
use_peft: true
lora_r: 4
per_device_train_batch_size: 16
report_to: none
"""
LONGER = ("--lr", "5e-3", "--steps", "40", "--eval-fraction", "0.3")
"""Added to what trains for others to use, so that a model of random weights gets better and there is a best/."""
TINY_STAGES: Mapping[str, Mapping[str, object]] = {
    "sample": {"max_tokens": 16, "limit": 24},
    "build": {"test_fraction": 0.3, "near": "none"},
    "train": {"steps": 4, "baselines": False, "batch_size": 8},
}
"""Added to the plan of gold data on its page."""
STUDY = """\
question: Does smoothing change anything?
base:
  model: tiny-model
  dataset: [pairs.train.jsonl]
  test_dataset: [pairs.test.jsonl]
  eval_fraction: 0.2
  limit: 60
  steps: 2
  precision: fp32
  report_to: [none]
seeds: 1
arms:
  plain: {label_smoothing: 0.0}
  smoothed: {label_smoothing: 0.2}
phases:
  - {name: diagnostics, arms: [plain], gate: {learns: accuracy(plain) > 0.99}}
  - {name: rest, arms: [smoothed]}
baseline: plain
hypotheses:
  calibrated: ece(smoothed) < ece(plain)
"""
"""A plan of two runs, whose gate is closed."""


# --- rows -------------------------------------------------------------------------------------------------------


def pairs(topics: Any = "train") -> list[Row]:
    """Preferences as texts."""
    rows = []
    for pair in generate(PAIRS, seed=0, topics=topics):
        chosen, rejected = reply_texts(pair)
        rows.append({"prompt": pair.preference.prompt[0].content, "chosen": chosen, "rejected": rejected})
    return rows


def gold_rows() -> list[Row]:
    """Replies to prompts with their gold scores, of which none are equal."""
    texts = pairs("test")
    draw = np.random.default_rng(0)
    return [
        {
            "id": str(number),
            "prompt": [{"role": "user", "content": f"{number}. {texts[number]['prompt']}"}],
            "responses": [f"{texts[(number + k) % PAIRS]['chosen']} {k}" for k in range(REPLIES)],
            "gold": [round(float(value), 6) for value in draw.normal(size=REPLIES)],
        }
        for number in range(PROMPTS)
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows in the format that the name of a file says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name.endswith(".csv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
    else:
        assert name.endswith(".jsonl"), f"{name}: no rows are made for a file of this name"
        path.write_text(text, encoding="utf-8")


# --- files and folders of every kind --------------------------------------------------------------------------------


def preferences(path: Path, store: Path) -> None:
    """A file of pairs, or for the name of a dataset a file for each split; `votes.csv` has columns of its own."""
    topics = "train" if path.name.startswith(("pairs", "prefs", "votes")) or ".train." in path.name else "test"
    # Rows of their own for each file and split, so that none is a copy of another.
    rows = [{**row, "prompt": f"{row['prompt']} ({path.name})"} for row in pairs(topics)]
    if path.name == "votes.csv":
        names = {"prompt": "question", "chosen": "answer_1", "rejected": "answer_2"}
        votes = (["1"] * 3 + ["2", "tie"]) * PAIRS
        rows = [{**{names[k]: v for k, v in row.items()}, "winner": votes[n]} for n, row in enumerate(rows)]
    if path.suffix in (".jsonl", ".parquet", ".csv", ".gz", ".json"):
        write_rows(path, rows)
        return
    for split, topics in (("train", "train"), ("validation", "test"), ("test", "test")):
        mine = [{**row, "prompt": f"{row['prompt']} ({path.name}, {split})"} for row in pairs(topics)]
        write_rows(path.with_name(f"{path.name}.{split}.jsonl"), mine)


def model(path: Path, store: Path) -> None:
    """A model to begin from, whose weights are random."""
    shutil.copytree(store / MODEL, path)


def chat_template(path: Path, store: Path) -> None:
    """The text of a template that has a switch for thinking, as that of Qwen3."""
    path.write_text(TEMPLATE + "{% if enable_thinking %}<think>{% endif %}", encoding="utf-8")


def run_folder(path: Path, store: Path) -> None:
    """A run that is finished, with the best model in it."""
    shutil.copytree(store / "run", path, dirs_exist_ok=True)


def reward_model(path: Path, store: Path) -> None:
    """The model of the run, in the run that the name asks for."""
    if path.name == "best" and not (path.parent / "config.json").exists():
        run_folder(path.parent, store)
        return
    shutil.copytree(store / "run" / "best", path)


def calibrated_model(path: Path, store: Path) -> None:
    """The model of the run with a calibration in it."""
    reward_model(path, store)
    main(
        [
            "calibrate",
            str(path),
            "--dataset",
            str(store / "other-pairs.jsonl"),
            "--store",
            "--output-dir",
            f"{path}-calibration",
        ]
    )


def evaluation(path: Path, store: Path) -> None:
    """What `rewardlab eval --output-dir` leaves of two models."""
    shutil.copytree(store / "judged", path)


def conversations(path: Path, store: Path) -> None:
    """Prompts with two replies each."""
    write_rows(path, [{"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"]]} for row in pairs()[:8]])


def prompts(path: Path, store: Path) -> None:
    """Prompts alone, as texts or as rows."""
    texts = [row["prompt"][0]["content"] for row in gold_rows()]
    if path.suffix == ".json":
        path.write_text(json.dumps(texts), encoding="utf-8")
    else:
        write_rows(path, [{"prompt": text} for text in texts])


def samples(path: Path, store: Path) -> None:
    """Replies that have no gold score yet."""
    write_rows(path, [{name: row[name] for name in ("id", "prompt", "responses")} for row in gold_rows()])


def labels(path: Path, store: Path) -> None:
    """Replies with gold scores."""
    write_rows(path, gold_rows())


def gold_pairs(path: Path, store: Path) -> None:
    """What `rewardlab gold build` leaves, or one of its files."""
    folder = path if path.suffix == "" else path.parent
    shutil.copytree(store / "pairs", folder)


def gold_stages(path: Path, store: Path) -> None:
    """The folder of `rewardlab gold run`, with the files of three stages."""
    path.mkdir(parents=True)
    labels(path / "labels.jsonl", store)
    write_rows(path / "samples.jsonl", [{**row, "gold": None} for row in gold_rows()])
    gold_pairs(path / "pairs", store)


def proxy(path: Path, store: Path) -> None:
    """A proxy: a file with its scores, or a run."""
    if path.suffix == ".json":
        draw = np.random.default_rng(1)
        scores = [[value + float(draw.normal()) for value in row["gold"]] for row in gold_rows()]
        path.write_text(json.dumps(scores), encoding="utf-8")
    elif path.name == "best":
        reward_model(path, store)
    else:
        run_folder(path, store)


def one_fact(path: Path, store: Path) -> None:
    """A file of the layout with a fact a file: prompts, replies, gold scores, or pairs in columns."""
    rows = gold_rows()
    if "prompts" in path.name:
        value: object = [row["prompt"][0]["content"] for row in rows]
    elif "sft" in path.name:
        value = [{f"response_{k + 1}": text for k, text in enumerate(row["responses"])} for row in rows]
    elif "implicit" in path.name:
        columns: dict[str, list[object]] = {"chosen": [], "rejected": []}
        for row in rows:
            order = np.argsort(row["gold"])
            for side, place in (("chosen", order[-1]), ("rejected", order[0])):
                system = {"role": "system", "content": ""}
                reply = {"role": "assistant", "content": row["responses"][place]}
                columns[side].append([system, *row["prompt"], reply])
        value = columns
    else:
        value = [row["gold"] for row in rows]
    path.write_text(json.dumps(value), encoding="utf-8")


def gold_plan(path: Path, store: Path) -> None:
    """The plan of all stages on its page, with the tiny model and few steps."""
    text = next(block.text for block in blocks(read("gold.md"), "yaml") if "folder: runs/farm" in block.text)
    values = yaml.safe_load(text.replace(SHIPPED, MODEL))
    for stage, more in TINY_STAGES.items():
        values[stage] = {**values[stage], **more}
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    prompts(path.with_name(values["sample"]["prompts"]), store)
    gold = path.parent / values["label"]["model"]
    if not gold.exists():
        reward_model(gold, store)


def rollouts(path: Path, store: Path) -> None:
    """The record of an honest run: reward and gold rise together."""
    draw = np.random.default_rng(0)
    log = RolloutLog(path)
    texts = pairs()
    for step in range(24):
        rows = []
        for number in range(12):
            turns = (
                Message("user", texts[number]["prompt"]),
                Message("assistant", f"{texts[(number + step) % PAIRS]['chosen']} {step}"),
            )
            better, noise = 0.1 * step, float(draw.normal())
            rows.append(
                RolloutRow(
                    step=step,
                    prompt_key=key_of(turns),
                    conversation=turns,
                    reward=better + noise,
                    digest="proxy",
                    evidence={"gold": better + 0.8 * noise},
                )
            )
        log.write(rows)
    log.close()


def held_out(path: Path, store: Path) -> None:
    """Results of a suite at checkpoints."""
    draw = np.random.default_rng(0)
    rows = [
        {"step": step, "item": str(item), "value": float(draw.random() < 0.4 + 0.02 * step)}
        for step in range(0, 24, 3)
        for item in range(40)
    ]
    write_rows(path, rows)


def trl_config(path: Path, store: Path) -> None:
    """The file of `trl reward --config`, with its data."""
    path.write_text(TRL, encoding="utf-8")
    preferences(path.with_name("pairs.jsonl"), store)


def few_steps(path: Path, store: Path) -> None:
    """Settings of a run of two steps."""
    path.write_text("steps: 2\nbatch_size: 8\nlr: 1.0e-3\nbaselines: false\n", encoding="utf-8")


def foreign_model(path: Path, store: Path) -> None:
    """A sequence classifier as TRL writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seq_cls(path)


def foreign_adapters(path: Path, store: Path) -> None:
    """Adapters of PEFT on the tiny model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    adapters(path, store / MODEL, template=None)


def some_folder(path: Path, store: Path) -> None:
    """A folder with nothing in it."""
    path.mkdir()


def suite(path: Path, store: Path, *names: str) -> None:
    """The folder of a public suite, or one with several of them."""
    for name in names:
        WRITERS[name](path / name if len(names) > 1 else path, 40)


def plan(path: Path, store: Path) -> None:
    """A plan of the repository with a tiny model, few steps and the data of tiny plans; or one of two runs."""
    write_dataset(path.parent / "made", num_train=PAIRS, num_test=PAIRS, seed=0)
    root = path
    source = ROOT / "examples"
    if "examples" in path.parts:
        root = Path(*path.parts[: path.parts.index("examples")])
        place = path.parent
        shutil.copytree(source / place.name, place, dirs_exist_ok=True)
        for one in place.glob("*.yaml"):
            text = one.read_text(encoding="utf-8").replace(SHIPPED, MODEL)
            one.write_text(text.replace("steps: 100\n", "steps: 4\n"), encoding="utf-8")
    else:
        root = path.parent
        path.write_text(STUDY, encoding="utf-8")
    for part in ("train", "test"):
        if not (root / f"pairs.{part}.jsonl").exists():
            shutil.copy(path.parent / "made" / f"{part}.jsonl", root / f"pairs.{part}.jsonl")
    shutil.rmtree(path.parent / "made", ignore_errors=True)


def study(path: Path, store: Path) -> None:
    """A study of two runs that is frozen."""
    where = Path.cwd()
    plan(where / "made-plan.yaml", store)
    main(["plan", "freeze", "made-plan.yaml", "--output-dir", str(path)])


KINDS: Mapping[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        preferences, model, run_folder, reward_model, calibrated_model, evaluation, conversations, prompts, samples,
        labels, gold_pairs, gold_stages, proxy, one_fact, gold_plan, rollouts, held_out, trl_config, few_steps,
        foreign_model, foreign_adapters, some_folder, suite, plan, study, chat_template,
    )
}  # fmt: skip
"""Name of a kind -> puts one at a path, from what is in the store."""


def make_store(folder: Path) -> None:
    """Make what is copied from: the tiny model, a run of it, its evaluation, and preferences of gold scores."""
    with chdir(folder):
        preferences(Path("pairs.jsonl"), folder)
        preferences(Path("other-pairs.jsonl"), folder)
        text = Path("pairs.jsonl").read_text(encoding="utf-8")
        module_at(ROOT / "examples" / "first_study" / "make_files.py").write_model(Path(MODEL), text)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(MODEL)
        train = ["train", "--model", MODEL, "--dataset", "pairs.jsonl", "--lora", "--precision", "fp32"]
        main([*train, *LONGER, "--output-dir", "run"])
        main(
            [
                "eval",
                "--model",
                str(folder / "run" / "best"),
                "--dataset",
                "other-pairs.jsonl",
                "--output-dir",
                "judged",
            ]
        )
        labels(Path("labels.jsonl"), folder)
        main(["gold", "build", "--input", "labels.jsonl", "--output-dir", "pairs", "--test-fraction", "0.4"])
