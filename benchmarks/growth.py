"""How much sharing prompts saves as replies, prompt share and tokens a step grow, against the formula, with a plot."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness import flops, machine, ours, results, timing, workload
from harness.random_model import config_folder, random_weights
from rewardlab.training.loop.reward_trainer import RewardTrainer

CPU = torch.device("cpu")
SIZES = {
    # SmolLM2-135M's width; a small vocabulary, since the embedding's update costs the same whatever is shared.
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Groups of K replies to a prompt of P tokens, R tokens each."""

    tokens: int
    """Of a step without sharing: groups · K · (P + R)."""
    replies: int
    prompt: int
    reply: int
    groups: int

    @property
    def predicted(self) -> float:
        """K (P + R) / (P + K R)."""
        return self.replies * (self.prompt + self.reply) / (self.prompt + self.replies * self.reply)

    @classmethod
    def of(cls, tokens: int, replies: int, share: float, *, longest: int) -> Point:
        """Conversations of at most `longest` tokens, shorter where one group would be more than `tokens`."""
        length = min(longest, tokens // replies)
        prompt = min(max(1, round(share * length)), length - 1)
        return cls(
            tokens=tokens,
            replies=replies,
            prompt=prompt,
            reply=length - prompt,
            groups=max(1, tokens // (replies * length)),
        )


def measure(
    point: Point, folder: str, models: dict[bool, Any], options: argparse.Namespace
) -> tuple[timing.Ratio, dict[bool, timing.Timing]]:
    """(time without sharing over time with it, both timings)."""
    vocabulary = models[True].config.vocab_size
    groups = [
        workload.random_group(point.prompt, [point.reply] * point.replies, vocabulary=vocabulary, seed=seed)
        for seed in range(point.groups)
    ]
    budget = max(options.budget, max(group.num_unshared_tokens for group in groups))
    fixed = {
        "batch_size": len(groups),
        "max_seq_len": options.length,
        "precision": options.precision,
        "micro_token_budget": budget,
    }
    config = ours.settings(folder, fixed | ours.parse_settings(options.set))
    trainers: dict[bool, RewardTrainer] = {
        sharing: ours.trainer_of(config, model, groups) for sharing, model in models.items()
    }
    steps = {sharing: ours.step_of(trainer) for sharing, trainer in trainers.items()}
    found = timing.interleave(
        {name: lambda step=steps[sharing]: timing.timed(step) for name, sharing in (("packed", False), ("ours", True))},
        repeats=options.repeats,
        say=lambda line: None,
    )
    timings = {True: timing.Timing.of(found.samples["ours"]), False: timing.Timing.of(found.samples["packed"])}
    return timing.ratio(found.samples["packed"], found.samples["ours"]), timings


def main(arguments: Sequence[str] | None = None) -> int:
    """Both sweeps, the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="smollm2", choices=list(SIZES), help="widths of the random model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--replies", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--replies-along-tokens", type=int, nargs="+", default=[2, 8], help="of --replies, while the tokens change"
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9], help="prompt's part")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(10, 16)])
    parser.add_argument("--at-tokens", type=int, default=4096, help="tokens a step while the prompt's part changes")
    parser.add_argument("--at-share", type=float, default=0.5, help="prompt's part while the tokens change")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest conversation")
    parser.add_argument("--budget", type=int, default=8192, help="micro_token_budget")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of both layouts")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=10.0, help="points that do not fit are left out, and named")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load, end = machine.load_average(), time.monotonic() + 60 * options.minutes
    along = [k for k in options.replies if k in options.replies_along_tokens]
    sweeps = {
        "share": [(options.at_tokens, k, share) for share in options.shares for k in options.replies],
        "tokens": [(tokens, k, options.at_share) for tokens in sorted(options.tokens) for k in along],
    }
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        folder = config_folder(Path(work), SIZES[options.size] | {"num_hidden_layers": options.layers})
        chosen = {"precision": options.precision, "max_seq_len": options.length} | ours.parse_settings(options.set)
        config = ours.settings(folder, chosen)
        with random_weights(seed=0, device=CPU):
            models = {sharing: ours.build_model(config, sharing=sharing, device=CPU) for sharing in (True, False)}
        shape = flops.shape_of(ours.config_of(folder))
        for sweep, points in sweeps.items():
            for tokens, replies, share in points:
                point = Point.of(tokens, replies, share, longest=options.length)
                if time.monotonic() > end:
                    left.append(f"{sweep}: {tokens} tokens, K {replies}, {share:.0%}")
                    continue
                rows.append(row_of(sweep, share, point, measure(point, folder, models, options), shape))
                print(line_of(rows[-1]), flush=True)
    write(rows, left, options, load)
    return 0


def row_of(
    sweep: str,
    share: float,
    point: Point,
    measured: tuple[timing.Ratio, dict[bool, timing.Timing]],
    shape: flops.Shape,
) -> dict[str, Any]:
    """A point with what was measured and what was predicted."""
    found, timings = measured
    work = {sharing: flops.Work.of(times.facts) for sharing, times in timings.items()}
    return {
        "sweep": sweep,
        "share": share,
        **asdict(point),
        "predicted": point.predicted,
        "predicted_flops": shape.train_flops(work[False]) / shape.train_flops(work[True]),
        "ratio": asdict(found),
        "ours": asdict(timings[True]),
        "packed": asdict(timings[False]),
        "of_predicted": found.value / point.predicted,
    }


def line_of(row: dict[str, Any]) -> str:
    """For the terminal."""
    return (
        f"{row['sweep']:>7}  {row['tokens']:>6} tokens  K {row['replies']:>2}  prompt {row['share']:.0%}  "
        f"measured {row['ratio']['value']:.2f}  formula {row['predicted']:.2f}"
    )


def write(rows: Sequence[dict[str, Any]], left: Sequence[str], options: argparse.Namespace, load: float) -> None:
    """The page, its data and the plot."""
    show = results.show
    body = [
        [
            row["sweep"],
            f"{row['tokens']:,}",
            row["replies"],
            f"{row['prompt']} + {row['reply']}",
            f"**{row['ratio']['value']:.2f}** ({row['ratio']['low']:.2f} to {row['ratio']['high']:.2f})",
            f"{row['predicted']:.2f}",
            f"{row['of_predicted']:.0%}",
            show(row["ours"]["wall"]),
            show(row["packed"]["wall"]),
        ]
        for row in rows
    ]
    tag = f"{options.size}-{options.layers}-layers"
    page = [
        "# How the gain of sharing prompts grows",
        "",
        f"A training step without sharing over one with it, against K(P + R)/(P + KR); {options.size} widths, "
        f"{options.layers} layers of random weights, random tokens, {options.precision}, micro-batches of "
        f"{options.budget:,} tokens; {options.repeats} interleaved repeats in one process, medians, one warm-up."
        + (f" Settings: {' '.join(options.set)}." if options.set else ""),
        "",
        results.table(
            [
                "sweep",
                "tokens a step, unshared",
                "K",
                "P + R",
                "faster by (range of rounds)",
                "formula",
                "of formula",
                "seconds, shared",
                "seconds, unshared",
            ],
            body,
        ),
        *([f"Left out for want of time: {'; '.join(left)}.", ""] if left else []),
    ]
    picture = results.path_of(options, "growth", tag).with_suffix(".svg")
    if not options.no_result:
        page += [f"![measured against the formula]({picture.name})", ""]
    path = results.write(
        "growth",
        tag,
        page=page,
        data={"points": list(rows), "left_out": list(left)},
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    if path is not None:
        plot(rows, picture, options)


def plot(rows: Sequence[dict[str, Any]], path: Path, options: argparse.Namespace) -> None:
    """Measured points with their ranges, the formula as lines; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so there is no plot: pip install 'rewardlab[bench]'")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    panels = (
        ("share", "share", f"prompt's part of a conversation; {options.at_tokens:,} tokens a step"),
        ("tokens", "tokens", f"tokens a step without sharing; prompt {options.at_share:.0%}"),
    )
    for axis, (sweep, x, label) in zip(axes, panels, strict=True):
        for number, replies in enumerate(options.replies):
            points = [row for row in rows if row["sweep"] == sweep and row["replies"] == replies]
            if not points:
                continue
            at, value = [row[x] for row in points], [row["ratio"]["value"] for row in points]
            error = [
                [row["ratio"]["value"] - min(row["ratio"]["low"], row["ratio"]["value"]) for row in points],
                [max(row["ratio"]["high"], row["ratio"]["value"]) - row["ratio"]["value"] for row in points],
            ]
            axis.plot(at, [row["predicted"] for row in points], color=f"C{number}", linewidth=1)
            axis.errorbar(at, value, error, color=f"C{number}", fmt="o", capsize=2, label=f"K = {replies}")
        axis.set_xlabel(label)
        axis.axhline(1, color="grey", linewidth=0.5)
    axes[1].set_xscale("log", base=2)
    axes[0].set_yscale("log", base=2)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("times faster than without sharing")
    axes[0].legend(title="lines: K(P + R)/(P + KR)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
