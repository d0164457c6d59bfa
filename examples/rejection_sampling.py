"""Keep the best of sampled replies, as rows for supervised fine-tuning.

    python examples/rejection_sampling.py runs/mine/best samples.jsonl sft.jsonl
    python examples/rejection_sampling.py http://127.0.0.1:8000 samples.jsonl sft.jsonl --top-share 0.25 --skip-close

A row of the file has `prompt` (a text, or messages) and `replies`. The best reply of each prompt is kept, or the best
share, or all from a score on. Scores of different prompts are not on one scale, so `--from-score` keeps more replies of
some prompts than of others, whatever their quality. A row that is written has `messages`, and where it is from: the
score, its noise, the digest of the model, the file and line, how many replies there were, and whether the choice is
close: another scoring, in another batch or engine, could make another one.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.core.files import write_jsonl
from rewardlab.rl import RewardScorer, Rollout, Scored
from rewardlab.rl.samples import Samples, read_samples

PROMPTS_AT_A_TIME = 64


def kept_of(scored: Sequence[Scored], asked: argparse.Namespace) -> tuple[list[int], bool]:
    """The numbers of the replies to one prompt that are kept, best first, and whether that is a close choice."""
    order = sorted(range(len(scored)), key=lambda number: -scored[number].score)
    if asked.from_score is not None:
        kept = [number for number in order if scored[number].score >= asked.from_score]
        return kept, any(abs(one.score - asked.from_score) <= one.noise for one in scored)
    num = 1 if asked.top_share is None else math.ceil(asked.top_share * len(scored) - 1e-9)
    kept, dropped = order[:num], order[num:]
    return kept, any(
        scored[good].score - scored[bad].score <= scored[good].noise + scored[bad].noise
        for good in kept
        for bad in dropped
    )


async def sft_rows(asked: argparse.Namespace, counts: Counter[str]) -> list[Mapping[str, object]]:
    """The rows to be written; `counts` is told what became of every prompt and reply."""
    rows: list[Mapping[str, object]] = []
    samples = list(read_samples(asked.samples))
    async with RewardScorer(asked.model, text_as="transcript", truncate=asked.truncate) as scorer:
        reading = await scorer.reading()
        for start in range(0, len(samples), PROMPTS_AT_A_TIME):
            part = samples[start : start + PROMPTS_AT_A_TIME]
            groups = [
                [
                    reading.rollout((row.prompt, reply), name=f"{row.where}: reply {row.replies.index(reply)}")
                    for reply in dict.fromkeys(row.replies)  # each text once
                ]
                for row in part
            ]
            scored = iter(await scorer.details([rollout for group in groups for rollout in group]))
            for row, group in zip(part, groups, strict=True):
                rows += chosen(row, group, [next(scored) for _ in group], asked, counts)
    return rows


def chosen(
    row: Samples, group: Sequence[Rollout], scored: Sequence[Scored], asked: argparse.Namespace, counts: Counter[str]
) -> Iterator[Mapping[str, object]]:
    """The rows of one prompt."""
    kept, is_close = kept_of(scored, asked)
    if is_close and asked.skip_close:
        kept = []
    counts["prompts"] += 1
    counts["prompts of which none is kept"] += not kept
    counts["close prompts"] += is_close
    counts["replies"] += len(row.replies)
    counts["repeated"] += len(row.replies) - len(group)
    counts["of close prompts" if is_close and asked.skip_close else "not chosen"] += len(group) - len(kept)
    for number in kept:
        counts["kept"] += 1
        yield {
            "messages": [turn.as_dict() for turn in group[number].conversation],
            "score": scored[number].score,
            "noise": scored[number].noise,
            "close": is_close,
            "model_digest": scored[number].digest,
            "source": row.where,
            "num_replies": len(row.replies),
        }


def main(arguments: Sequence[str] | None = None) -> Counter[str]:
    """Score, choose, write, and say what became of every reply."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a reward-model folder, or the address of a server")
    parser.add_argument("samples", type=Path, help="prompts with replies, such as a JSONL file")
    parser.add_argument("output", type=Path, help="the JSONL file that is written; it must not be there yet")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--top-share", type=float, help="keep this share of the replies to each prompt, rounded up")
    choice.add_argument("--from-score", type=float, help="keep every reply with at least this raw score")
    parser.add_argument("--skip-close", action="store_true", help="leave out prompts where another scoring may differ")
    parser.add_argument("--truncate", action="store_true", help="cut long conversations; otherwise one is an error")
    asked = parser.parse_args(arguments)
    if asked.top_share is not None and not 0 < asked.top_share <= 1:
        raise ConfigError(f"--top-share: wanted more than 0 and at most 1, got {asked.top_share}.")
    if asked.output.exists():
        raise ConfigError(f"{asked.output} is there already. Name another file, or remove it.")

    counts: Counter[str] = Counter()
    write_jsonl(asked.output, asyncio.run(sft_rows(asked, counts)))
    print(f"{counts['kept']} of {counts['replies']} replies to {counts['prompts']} prompts are in {asked.output}.")
    print(
        f"Dropped: {counts['not chosen']} not chosen, {counts['repeated']} that repeat another reply to their prompt."
    )
    if asked.skip_close:
        print(f"Dropped: {counts['of close prompts']} of prompts that are close.")
    if counts["prompts of which none is kept"]:
        print(f"{counts['prompts of which none is kept']} prompts have no reply in the file.")
    print(f"{counts['close prompts']} prompts are close: differences within the noise decided what was kept.")
    return counts


if __name__ == "__main__":
    try:
        main()
    except RewardlabError as error:
        sys.exit(f"error: {error}")
