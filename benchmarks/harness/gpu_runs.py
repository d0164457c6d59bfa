"""What the scripts for one GPU share: shapes, lengths, a clock, and cells that are kept whatever comes after them."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import machine, ours, results
from harness.random_model import config_folder, random_weights
from harness.workload import Lengths
from rewardlab.core.types import TokenGroup
from rewardlab.model.out_of_memory import release_cached
from rewardlab.model.reward import RewardModel
from rewardlab.training.settings.config import RewardTrainerConfig

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "0.5b": QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "3b": QWEN | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "tiny": QWEN
    | {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    },
}
PAIRS = {"0.5b": 64, "3b": 32, "tiny": 16}
DATA: Mapping[str, Lengths] = {
    "hh": Lengths(prompt=114, chosen=39, rejected=47.5, spread=(0.7, 0.8)),
    "shp": Lengths(prompt=300, chosen=80, rejected=80, spread=(0.6, 0.7)),
    "ultrafeedback": Lengths(prompt=150, chosen=350, rejected=350, spread=(0.8, 0.5)),
}
NO_GPU = "there is no GPU here. Try the script with --device cpu --tiny."


def scaled(lengths: Lengths, factor: float) -> Lengths:
    """Shorter ones."""
    return Lengths(
        prompt=lengths.prompt * factor,
        chosen=lengths.chosen * factor,
        rejected=lengths.rejected * factor,
        spread=lengths.spread,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that all scripts for a GPU have."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, to try the script")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing more after this")
    parser.add_argument("--tag", default=None, help="in the result's name; by default the device")
    results.add_flags(parser)


def device_of(options: argparse.Namespace) -> torch.device:
    """The device asked for, with its number."""
    return torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")


def device_name(options: argparse.Namespace) -> str:
    """The GPU's name; `cpu-tiny` for a trial."""
    return torch.cuda.get_device_name() if options.device == "cuda" else f"cpu{'-tiny' if options.tiny else ''}"


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_model(
    folder: str, chosen: Mapping[str, object], device: torch.device
) -> tuple[RewardTrainerConfig, RewardModel]:
    """The configuration and model of a run, with the same random weights every time."""
    config = ours.settings(folder, chosen)
    with random_weights(seed=0, device=device):
        return config, ours.build_model(config, sharing=True, device=device)


def folder_of(work: Path, name: str, **changes: object) -> str:
    """A folder with the configuration of one of MODELS."""
    return config_folder(work / "-".join([name, *map(str, changes.values())]), {**MODELS[name], **changes})


def longest(options: argparse.Namespace) -> int:
    """Tokens of a conversation, at most."""
    return 128 if options.tiny else 1024


def draw_pairs(model: str, options: argparse.Namespace, *, count: int | None = None) -> list[TokenGroup]:
    """Pairs of lengths like HH's, by default as many as a step of the model has."""
    lengths = scaled(DATA["hh"], 0.2) if options.tiny else DATA["hh"]
    vocabulary = int(str(MODELS[model]["vocab_size"]))
    return lengths.draw(count or PAIRS[model], longest=longest(options), vocabulary=vocabulary, seed=0)


def build(
    model: str,
    kind: str,
    options: argparse.Namespace,
    work: Path,
    groups: Sequence[TokenGroup],
    **chosen: object,
) -> tuple[RewardTrainerConfig, RewardModel]:
    """Configuration and model of a step over these pairs, `full` or `lora`, in bf16 on a GPU."""
    device = device_of(options)
    fixed = {
        "batch_size": len(groups),
        "max_seq_len": longest(options),
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "lora": kind == "lora",
    }
    return random_model(folder_of(work, model), fixed | chosen, device)


Cell = Mapping[str, Any]


def run_cells(
    benchmark: str,
    options: argparse.Namespace,
    names: Sequence[str],
    *,
    measure: Callable[[str, argparse.Namespace, Path, float], Cell],
    page: Callable[[Sequence[Cell], argparse.Namespace], Sequence[str]],
) -> tuple[list[Cell], bool]:
    """Measure one cell after the other; write the result after each, so that a run that is stopped loses only one.

    `measure` is given the name, the options, a folder to work in, and the time after which it is to begin nothing more;
    `page` makes the page of the cells so far. A cell that raises is named in the result and the next one follows.
    Returns the cells, and whether none raised. SystemExit without a GPU.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    ours.quiet()
    until, load = time.monotonic() + 60 * options.minutes, machine.load_average()
    cells: list[Cell] = []
    failed: dict[str, str] = {}

    def write(left: Sequence[str], *, last: bool) -> None:
        results.write(
            benchmark,
            options.tag or re.sub(r"\W+", "-", device_name(options).lower()),
            page=[*page(cells, options), *footnotes(failed, left)],
            data={"cells": cells, "broken": failed, "left_out": list(left)},
            options=options,
            device=torch.device(options.device),
            load=(load, machine.load_average()),
            say=last,
        )

    with tempfile.TemporaryDirectory() as work:
        for number, name in enumerate(names):
            if number and time.monotonic() > until:
                write(names[number:], last=True)
                break
            print(f"{name}:", flush=True)
            try:
                cells.append(measure(name, options, Path(work), until))
            except Exception as error:  # kernels and drivers raise what they like, and time on a GPU is dear
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            release_cached(torch.device(options.device))
            write(names[number + 1 :], last=number + 1 == len(names))
    return cells, not failed


def footnotes(failed: Mapping[str, str], left: Sequence[str]) -> list[str]:
    """What could not run, and what there was no time for."""
    return [
        *([f"Could not run: {'; '.join(f'{name}: {why}' for name, why in failed.items())}.", ""] if failed else []),
        *([f"Left out for want of time: {'; '.join(left)}.", ""] if left else []),
    ]
