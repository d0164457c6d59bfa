"""Rendering of conversations, templates and tokens: one after the other, and together as scoring does it.

    scripts/bench rendering
    scripts/bench rendering --rows generated --count 200

Every reply of the rows is a conversation. The two ways run in turn. Ends with an error if they give other tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from harness import machine, ours, results, timing, workload
from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation
from rewardlab.data.bulk import render_conversations
from rewardlab.data.chat import Renderer
from rewardlab.data.layout import Rendered

Outcomes = Mapping[Conversation, Rendered | RenderError]
WAYS = ("one by one", "together")


def one_by_one(conversations: Sequence[Conversation], renderer: Renderer) -> Outcomes:
    """What the renderer gives for each conversation alone."""
    found: dict[Conversation, Rendered | RenderError] = {}
    for turns in conversations:
        try:
            found[turns] = renderer.render(turns[:-1], turns[-1:])
        except RenderError as error:
            found[turns] = error
    return found


def is_same(one: Rendered | RenderError, other: Rendered | RenderError) -> bool:
    """Whether two outcomes are the same tokens with the same prompt, or both an error."""
    if isinstance(one, RenderError) or isinstance(other, RenderError):
        return type(one) is type(other)
    return np.array_equal(one.token_ids, other.token_ids) and one.prompt_tokens == other.prompt_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Time both ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose template and tokenizer render")
    parser.add_argument("--rows", default="hh_helpful.test", help="a file of the data folder, or `generated`")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--count", type=int, default=300, help="rows")
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    load = machine.load_average()
    rows = workload.read_rows(options.rows, options.count, folder=options.data_folder)
    conversations = [one.prompt + reply for one in rows.preferences for reply in one.replies]
    conversations = list(dict.fromkeys(conversations))
    found: dict[str, Outcomes] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=None)
        renderer = workload.renderer_of(folder, max_seq_len=options.max_seq_len)
        ways = dict(zip(WAYS, (one_by_one, render_conversations), strict=True))

        def run(way: str) -> Mapping[str, float]:
            found[way] = ways[way](conversations, renderer)
            return {"conversations": float(len(conversations))}

        steppers = {way: partial(timing.timed, partial(run, way)) for way in WAYS}
        samples = timing.interleave(steppers, repeats=options.rounds, say=lambda line: None).samples
    first, second = (found[way] for way in WAYS)
    num_other = sum(not is_same(first[turns], second[turns]) for turns in conversations)
    lengths = [len(one.token_ids) for one in second.values() if isinstance(one, Rendered)]
    ratio = timing.ratio(samples[WAYS[0]], samples[WAYS[1]])
    times = {way: timing.Timing.of(samples[way]) for way in WAYS}
    each = {way: f"{1000 * times[way].wall / len(conversations):.3f}" for way in WAYS}
    results.write(
        "rendering",
        f"{Path(options.rows).name}.{Path(options.model).name}",
        page=[
            "# Rendering: conversations together, and one by one",
            "",
            f"{len(conversations)} conversations of {rows.name} ({rows.fixed_by}), {np.mean(lengths):.0f} tokens on "
            f"average, at most {options.max_seq_len}; template and tokenizer of {Path(options.model).name}. "
            f"{options.rounds} interleaved rounds after one of warm-up. Conversations with other tokens: {num_other}.",
            "",
            results.table(
                ["way", "milliseconds each, median", "seconds"],
                [[way, each[way], results.show(times[way].wall)] for way in WAYS],
            ),
            "",
            f"Together is **{ratio.value:.2f}** times as fast (rounds: {ratio.low:.2f} to {ratio.high:.2f}).",
            "",
        ],
        data={
            "conversations": len(conversations),
            "other_tokens": num_other,
            "ratio": asdict(ratio),
            "times": {way: asdict(times[way]) for way in WAYS},
        },
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    return int(num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
