"""Sliding windows: one prompt and its replies, forward and backward, with the prompt shared and in padded rows.

    scripts/bench windows
    scripts/bench windows --precision fp32 --windows 0 512

A model of Gemma 3's shape with random weights: five layers of six have a window. For each length of prompt and replies
and each window the two layouts run in turn. Ends with an error if their scores differ by more than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import machine, ours, results, timing, workload
from harness.random_model import config_folder, random_weights
from rewardlab.batch import pack
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import TokenGroup
from rewardlab.model.reward import RewardModel

CPU = torch.device("cpu")
LAYOUTS = ("padded", "shared")
SIZES: dict[str, dict[str, Any]] = {
    # Gemma 3 270M's widths; a small vocabulary, since nothing here depends on it.
    "gemma3-270m": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}
VOCABULARY = 1024


def lengths(text: str) -> tuple[int, list[int]]:
    """(tokens of the prompt, of each reply) of `800+150+120`."""
    prompt, *replies = (int(part) for part in text.split("+"))
    if not replies:
        raise argparse.ArgumentTypeError(f"{text}: give the prompt's tokens and each reply's, as in 800+150+120")
    return prompt, replies


def build(options: argparse.Namespace, window: int, work: Path) -> dict[str, RewardModel]:
    """The same weights in either layout; a window of 0 is none."""
    layers = options.layers
    folder = config_folder(
        work / f"window-{window}",
        SIZES[options.size]
        | {
            "model_type": "gemma3_text",
            "vocab_size": VOCABULARY,
            "num_hidden_layers": layers,
            "layer_types": [
                "full_attention" if window == 0 or number % 6 == 5 else "sliding_attention" for number in range(layers)
            ],
            "sliding_window": window or options.max_seq_len,
            "max_position_embeddings": options.max_seq_len,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
    )
    found = {}
    for layout in LAYOUTS:
        chosen = {"attention": layout, "precision": options.precision, "max_seq_len": options.max_seq_len}
        config = ours.settings(folder, chosen | ours.parse_settings(options.set))
        with random_weights(seed=0, device=CPU):
            found[layout] = ours.build_model(config, sharing=True, device=CPU)
    return found


class Pass:
    """Forward and backward over one batch, in either layout, and the scores that came out."""

    def __init__(self, models: Mapping[str, RewardModel], group: TokenGroup) -> None:
        self.models, self.batch = models, pack([group])
        rows = [len(group.shared) + len(suffix) for suffix in group.suffixes]
        self.tokens = {"padded": len(rows) * max(rows), "shared": group.num_tokens}
        self.scores: dict[str, torch.Tensor] = {}

    def work(self, layout: str) -> Callable[[], Mapping[str, float]]:
        """Scores the replies and takes the gradient of their sum."""
        model = self.models[layout]

        def run() -> Mapping[str, float]:
            model.zero_grad()
            scores = model(self.batch).float()
            scores.sum().backward()
            self.scores[layout] = scores.detach()
            return {"tokens": float(self.tokens[layout])}

        return run

    def apart(self) -> float:
        """The largest difference of a score, in units of max(1, |score|)."""
        one, other = (self.scores[layout] for layout in LAYOUTS)
        return float(((one - other).abs() / one.abs().clamp(min=1)).max())


def measure(models: Mapping[str, RewardModel], shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table, with its samples."""
    prompt, replies = lengths(shape)
    group = workload.random_group(prompt, replies, vocabulary=VOCABULARY, seed=0)
    both = Pass(models, group)
    found = timing.interleave(
        {layout: partial(timing.timed, both.work(layout)) for layout in LAYOUTS},
        repeats=options.rounds,
        say=lambda line: None,
    ).samples
    return {
        "shape": shape,
        "apart": both.apart(),
        "attention": models["shared"].attention_backend,
        "ratio": asdict(timing.ratio(found["padded"], found["shared"])),
        "samples": {layout: [asdict(sample) for sample in own] for layout, own in found.items()},
        "times": {layout: asdict(timing.Timing.of(own)) for layout, own in found.items()},
    }


def line_of(row: Mapping[str, Any]) -> list[str]:
    """For the page."""
    ratio, times = row["ratio"], row["times"]
    tokens = times["padded"]["facts"]["tokens"] / times["shared"]["facts"]["tokens"]
    return [
        row["shape"],
        str(row["window"] or "none"),
        f"**{ratio['value']:.2f}** ({ratio['low']:.2f} to {ratio['high']:.2f})",
        f"{tokens:.2f}",
        results.show(times["padded"]["wall"]),
        results.show(times["shared"]["wall"]),
        f"{row['apart']:.1e}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure every length under every window, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gemma3-270m", choices=list(SIZES), help="widths of the random model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 512, 128], help="0: none")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["800+150+120", "300+300+300", "1500+300+300+300+300"],
        metavar="PROMPT+REPLY+REPLY",
        help="tokens of a prompt and of each of its replies",
    )
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of both layouts")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for window in options.windows:
            models = build(options, window, Path(work))
            for shape in options.shapes:
                rows.append({"window": window, **measure(models, shape, options)})
                print("  ".join(line_of(rows[-1])), flush=True)
    rows.sort(key=lambda row: options.shapes.index(row["shape"]))
    allowed = SCORE_TOLERANCE["float32" if options.precision == "fp32" else "bfloat16"]
    results.write(
        "windows",
        f"{options.size}-{options.layers}-layers.{options.precision}",
        page=[
            "# Sliding windows: prompts shared, and padded rows",
            "",
            f"One prompt and its replies, forward and backward; the shape of {options.size}, {options.layers} layers "
            f"of random weights, of which every sixth has no window; {options.precision}, attention "
            f"{rows[0]['attention']}. {options.rounds} interleaved rounds after one of warm-up, medians of seconds. "
            f"Scores may be {allowed:g} apart, in units of max(1, |score|).",
            "",
            results.table(
                [
                    "prompt + replies",
                    "window",
                    "shared is faster by (range of rounds)",
                    "fewer tokens, times",
                    "seconds, padded",
                    "seconds, shared",
                    "scores apart",
                ],
                [line_of(row) for row in rows],
            ),
            "",
        ],
        data={"rows": rows},
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return int(any(not row["apart"] <= allowed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
