"""Tests whether the files of the stages have the same rows in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Conversation
from rewardlab.gold.checking.reading import Stages, Taken, bare_key, shown_system
from rewardlab.gold.files.rows import GoldRow, system_of
from rewardlab.gold.findings import Finding, further

AGAIN = "Write the later file again from the earlier one."


def stage_findings(stages: Stages) -> Iterator[Finding]:
    """Yield the findings of comparing prompts, samples, responses, scores and labels with each other."""
    yield from _counts(stages)
    if "labels" in stages.names and stages.samples is not None and stages.labels is not None:
        yield _same_rows(stages.samples, stages.labels, stages)
    if stages.taken is not None:
        yield _by_replies(stages, stages.taken)
    if stages.prompts is not None and stages.responses is None and stages.rows:
        yield _same_prompts(stages.prompts, stages.rows, stages)


def _counts(stages: Stages) -> Iterator[Finding]:
    counts = {
        "prompts": stages.prompts,
        "samples": stages.samples if stages.responses is None else None,
        "responses": stages.responses,
        "rewards": stages.rewards,
        "labels": stages.labels if "labels" in stages.names else None,
    }
    sizes = {what: len(rows) for what, rows in counts.items() if rows is not None}
    if len(sizes) > 1:
        told = ", ".join(f"{stages.name(what)} has {size:,}" for what, size in sizes.items())
        same = len(set(sizes.values())) == 1
        yield Finding(
            name="number of rows",
            status="pass" if same else "fail",
            evidence=f"{told} rows.",
            advice=""
            if same
            else "They belong together by place, so rows are missing or were written twice: everything after that "
            "place belongs to the row beside it. Write the file with the wrong number again.",
        )
    yield from _replies(stages)


def _replies(stages: Stages) -> Iterator[Finding]:
    if not stages.rows:
        return
    sizes = Counter(len(row.responses) for row in stages.rows)
    wrong = 0
    if stages.rewards is not None and stages.responses is not None:
        pairs = zip(stages.responses, stages.rewards, strict=False)
        wrong = sum(len(texts) != len(scores) for texts, scores in pairs)
    told = ", ".join(f"{number_of(count, 'row')} with {size}" for size, count in sizes.most_common(4))
    if wrong:
        yield Finding(
            name="replies and scores of a row",
            status="fail",
            evidence=f"{wrong:,} {plural(wrong, 'row has', 'rows have')} another number of scores than of responses.",
            advice="Label these rows again; give --num-responses where only the first so many are to count.",
        )
    yield Finding(
        name="replies a row",
        status="pass" if len(sizes) == 1 else "warn",
        evidence=f"{told} replies.",
        advice="" if len(sizes) == 1 else "Rows with fewer replies have less weight in what is built from all pairs.",
    )


def _same_rows(samples: Sequence[GoldRow], labels: Sequence[GoldRow], stages: Stages) -> Finding:
    """Judge whether the labelled rows are those that were sampled, in their order."""
    name = "samples and labels"
    wrong = [
        number
        for number, (one, other) in enumerate(zip(samples, labels, strict=False))
        if (one.key, one.responses) != (other.key, other.responses)
    ]
    if not wrong:
        return Finding(name=name, status="pass", evidence="The same prompts with the same replies in the same order.")
    first = wrong[0]
    told = (
        f"{len(wrong):,} of {min(len(samples), len(labels)):,} rows differ, the first is row {first + 1} "
        f"({stages.name('samples')}, {stages.name('labels')})."
    )
    turns = [number for number in wrong if bare_key(samples[number].prompt) == bare_key(labels[number].prompt)]
    by_system = sum(system_of(samples[number].prompt) != system_of(labels[number].prompt) for number in turns)
    if by_system == len(wrong):
        one, other = (shown_system(system_of(rows[first].prompt)) for rows in (samples, labels))
        return Finding(
            name=name,
            status="fail",
            evidence=f"{told} Only their system turns do: {one} when sampled, {other} when labelled.",
            advice="Gold saw another template than the sampler. Give the same --system to both, and label again.",
        )
    moved = _displacement([_whole(row) for row in samples], [_whole(row) for row in labels], wrong)
    if moved is not None:
        return Finding(name=name, status="fail", evidence=f"{told} From there on {moved}.", advice=AGAIN)
    replies = sum(samples[number].key == labels[number].key for number in wrong)
    what = f"{replies:,} of them have the same prompt with other replies" if replies else "They have other prompts"
    return Finding(name=name, status="fail", evidence=f"{told} {what}.", advice=f"They are of other data. {AGAIN}")


def _whole(row: GoldRow) -> tuple[object, ...]:
    return (bare_key(row.prompt), row.responses)


def _displacement(ours: Sequence[object], theirs: Sequence[object], wrong: Sequence[int]) -> str | None:
    """Return, in words, by how many rows most of the wrong ones are moved, or that only their order differs.

    None if neither holds.
    """
    place = {row: number for number, row in reversed(list(enumerate(theirs)))}
    moved = Counter(place[ours[number]] - number for number in wrong if ours[number] in place)
    if not moved or moved.most_common(1)[0][1] < len(wrong) / 2:
        return "the same rows come in another order" if sum(moved.values()) > len(wrong) / 2 else None
    by = moved.most_common(1)[0][0]
    return f"rows are shifted: they stand {further(by)}"


def _same_prompts(prompts: Sequence[Conversation], rows: Sequence[GoldRow], stages: Stages) -> Finding:
    name = "prompts"
    wrong = [
        number
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=False))
        if bare_key(prompt) != bare_key(row.prompt)
    ]
    if not wrong:
        return Finding(name=name, status="pass", evidence="Every row has the prompt of its place.")
    moved = _displacement([bare_key(one) for one in prompts], [bare_key(row.prompt) for row in rows], wrong)
    told = (
        f"{len(wrong):,} {plural(len(wrong), 'row has', 'rows have')} another prompt than "
        f"{stages.name('prompts')}, the first is row {wrong[0] + 1}."
    )
    return Finding(name=name, status="fail", evidence=f"{told} From there on {moved}." if moved else told, advice=AGAIN)


def _by_replies(stages: Stages, taken: Taken) -> Finding:
    """Return what is known about prompts that were taken from the pairs with the same replies."""
    unpaired, ambiguous = taken.unpaired, taken.ambiguous
    told = (
        f"No file of prompts was named. {len(stages.rows) - len(unpaired) - len(ambiguous):,} of {len(stages.rows):,} "
        f"rows have the prompt of the pair with their replies, so pairs with a wrong prompt cannot be seen."
    )
    if unpaired:
        untied = sum(len(set(stages.rows[row].gold or ())) > 1 for row in unpaired)
        told += f" {len(unpaired):,} {plural(len(unpaired), 'row is', 'rows are')} in no pair"
        told += "." if stages.labels is None else f", {untied:,} of them with different gold scores."
    if ambiguous:
        told += (
            f" The replies of {len(ambiguous):,} rows come in several rows or under several prompts, so their prompts "
            f"are not known, and their pairs are not held against the scores."
        )
    return Finding(name="prompts", status="undecided", evidence=told, advice="Name them with --prompts-path.")
