"""What `rewardlab gold sample` prints."""

from __future__ import annotations

from rewardlab.core.terminal import number_of, plural
from rewardlab.gold.sampling.run import Sampled


def text_report(sampled: Sampled) -> str:
    """Return what was written, and what is worth knowing about it."""
    counts, place = sampled.counts, sampled.place
    replies = counts["replies"]
    before = " (all of them before)" if sampled.was_complete else ""
    lines = [
        f"{number_of(replies, 'reply')} to {number_of(counts['prompts'], 'prompt')}{before}: "
        f"{place.rows} and {place.twin.name}"
    ]
    if replies:
        mean = counts["tokens"] / replies
        rate = "" if sampled.tokens_per_s is None else f", {sampled.tokens_per_s:,.0f} a second"
        lines.append(f"{counts['tokens']:,} tokens, {mean:.0f} a reply{rate}")
        lines.append(
            f"{_share(counts['cut'], replies)} ended at the token limit (--max-tokens); "
            f"{_share(counts['identical'], replies)} equal an earlier reply to their prompt"
        )
    if num := counts.get("thoughts"):
        lines.append(
            f"{_share(num, replies)} hold thoughts (<think>), which gold and proxies then read too, where their "
            f"templates do not take them out; with --template-arguments enable_thinking=false many models write none"
        )
    if counts["errors"]:
        lines.append(
            f"{counts['errors']:,} {plural(counts['errors'], 'reply is', 'replies are')} missing; `samples` "
            f"says why, and the same command asks again:"
        )
        lines += [f"  {why}" for why in sampled.examples]
    return "\n".join(lines)


def _share(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.1%})"
