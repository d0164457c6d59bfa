"""What a search found, as a report for the terminal and as Markdown to be read by eye."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rewardlab.core.terminal import number_of, plural, visible
from rewardlab.core.types import Conversation, Estimate
from rewardlab.curation.mislabels.crossfit import Testimony
from rewardlab.curation.mislabels.lengths import Lengths
from rewardlab.curation.mislabels.noise import SUREST, Noise
from rewardlab.curation.mislabels.pairs import Pairs
from rewardlab.curation.mislabels.planting import Planted
from rewardlab.curation.mislabels.ranking import Ranking, Rule
from rewardlab.curation.mislabels.worth import Worth
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.tables import column_notes, format_count, format_estimate, format_points, report_width, text_table

MOST_CHARACTERS: Final = 4000
"""Most characters of a text in mislabels.md; a longer text is cut in the middle, with a note."""


def report(
    *,
    pairs: Pairs,
    ranking: Ranking,
    rule: Rule,
    held: str,
    lengths: Lengths | None,
    noise: Noise,
    planted: Planted | None,
    worth: Worth | None,
) -> str:
    """Return the report of a search."""
    parts = [_head(pairs, ranking, rule, held), _witnesses(ranking, rule)]
    if lengths is not None:
        parts.append(_wrapped(lengths.sentence()))
    parts.append(_noise(noise))
    if planted is not None:
        parts.append(_planted(planted))
    if worth is not None:
        parts.append(_worth(worth))
    return "\n\n".join(parts)


def _head(pairs: Pairs, ranking: Ranking, rule: Rule, held: str) -> str:
    flagged = int(ranking.flagged_N.sum())
    return _wrapped(
        f"{number_of(len(pairs), 'judged pair')} of {number_of(len(pairs.preferences), 'row')}"
        + (
            f" ({format_count(pairs.num_ties)} {plural(pairs.num_ties, 'tie is', 'ties are')} not judged)"
            if pairs.num_ties
            else ""
        )
        + f", held out {held}. {format_count(flagged)} {'is' if flagged == 1 else 'are'} flagged: at least "
        f"{rule.agree} of {len(ranking.testimonies)} witnesses put the probability of the label below {rule.below:g}, "
        f"by heads and temperatures that saw nothing of the pair. "
        + (
            "A flag is a reason to look, and no proof: pairs on which people disagree look the same."
            if flagged
            else "That says nothing of how many labels are wrong: where a third is, even a witness who knows the truth "
            "puts none below a third, and one that knows little none far below a half. Read the ranking, or raise "
            "--below."
        )
    )


def _witnesses(ranking: Ranking, rule: Rule) -> str:
    header = ["witness", "agrees with labels", "NLL", "temperature", "against", "silent"]
    told = [*ranking.testimonies, ranking.together]
    against = [int((row < rule.below).sum()) for row in ranking.probability_WN]
    rows = [
        [
            one.name,
            format_estimate(one.accuracy, percent=True),
            format_estimate(one.loss),
            _range(one.temperatures),
            format_count(against[number]) if number < len(against) else "—",
            format_count(one.num_silent),
        ]
        for number, one in enumerate(told)
    ]
    notes = column_notes({"agrees with labels": [one.accuracy for one in told], "NLL": [one.loss for one in told]})
    return "\n".join([text_table(header, rows), *notes, *_silent(ranking, rule), *_unsure(told)])


def _silent(ranking: Ranking, rule: Rule) -> list[str]:
    """Return what silent witnesses mean, and how many pairs can have no flag for want of witnesses."""
    if not any(one.num_silent for one in ranking.testimonies):
        return []
    heard_N = np.isfinite(ranking.probability_WN).sum(0)
    few = int((heard_N < rule.agree).sum())
    return [
        _wrapped(
            f"silent: pairs of which the witness has no score, since a reply is above its limit or not in its scores. "
            f"{format_count(few)} of {number_of(len(heard_N), 'pair')} {plural(few, 'has', 'have')} fewer than "
            f"{rule.agree} witnesses, which a flag takes."
        )
    ]


def _unsure(told: Sequence[Testimony]) -> list[str]:
    names = [one.name for one in told[:-1] if not one.accuracy.low > 0.5]
    if not names:
        return []
    return [_wrapped(f"{', '.join(names)}: not shown to be better than chance. Such a witness flags by luck.")]


def _range(temperatures: Sequence[float]) -> str:
    low, high = min(temperatures), max(temperatures)
    return f"{low:.3g} to {high:.3g}"


def _noise(noise: Noise) -> str:
    table = text_table(
        ["estimate of wrong labels", "share", "labels"],
        [
            ["confident count", format_estimate(noise.confident, percent=True), _labels(noise.wrong)],
            ["at most, if labels are wrong by chance", format_estimate(noise.at_most, percent=True), "—"],
        ],
    )
    words = (
        f"The confident count is the share of {number_of(noise.num_confident, 'confident pair')} (a label with at "
        f"least its mean probability, {noise.threshold:.2f}) whose label is the other one. It counts every mistake of "
        f"the witnesses, and every pair on which people disagree, as a wrong label. The second line is the share that "
        f"is contradicted among the surest {SUREST:.0%}: labels that are wrong whatever the pair cannot be more."
    )
    notes = column_notes({"share": [noise.confident, noise.at_most]})
    told = [] if noise.ceiling is None else [_wrapped(ceiling_note(noise.ceiling))]
    return "\n".join([table, *notes, _wrapped(words), *told])


def _labels(wrong: Estimate) -> str:
    return f"{wrong.value:.0f} [{wrong.low:.0f}, {wrong.high:.0f}]" if wrong.low == wrong.low else f"{wrong.value:.0f}"


def _planted(planted: Planted) -> str:
    first = planted.rankings[0]
    depths = list(first.at_depth)
    rows = [
        [f"top {depth:.0%}", format_count(found.pairs), *_both(found.precision, found.recall)]
        for depth, found in first.at_depth.items()
    ]
    rows.append(
        ["flagged", format_count(planted.flagged.pairs), *_both(planted.flagged.precision, planted.flagged.recall)]
    )
    at = planted.share
    single = [
        [
            one.name,
            format_estimate(one.at_depth[at].precision, percent=True),
            "—" if one.less is None else format_points(one.less),
            format_estimate(one.area),
        ]
        for one in planted.rankings
    ]
    found = [*(first.at_depth[depth] for depth in depths), planted.flagged]
    estimates = [one for top in found for one in (top.precision, top.recall)]
    return "\n".join(
        [
            _wrapped(
                f"Planted: {number_of(planted.labels, 'label')} ({planted.share:.0%}) turned round, "
                f"{planted.seeds} "
                f"times others. Chance has a precision of {planted.share:.0%} at every depth."
            ),
            text_table(["all witnesses together", "pairs", "precision", "recall"], rows),
            *column_notes({"precision, recall": estimates}),
            "",
            text_table(["ranking", f"precision, top {at:.0%}", "minus all together, points", "AUC"], single),
            *column_notes(
                {
                    "minus all together": [one.less for one in planted.rankings if one.less is not None],
                    "AUC": [one.area for one in planted.rankings],
                }
            ),
            _wrapped(
                "Planted labels are wrong by chance, on easy pairs as on hard ones. Real mistakes sit on hard pairs, "
                "where witnesses are unsure too, so fewer of them are found than of these. Labels that were wrong "
                "before count here as false alarms."
            ),
        ]
    )


def _both(precision: Estimate, recall: Estimate) -> tuple[str, str]:
    return format_estimate(precision, percent=True), format_estimate(recall, percent=True)


def _worth(worth: Worth) -> str:
    rows = [[arm, format_estimate(accuracy, percent=True)] for arm, accuracy in worth.accuracy.items()]
    effects = [
        [
            f"minus {effect.against}",
            format_points(effect.accuracy),
            format_estimate(effect.loss, digits=4),
            f"{effect.p:.3f}" if effect.p == effect.p else "—",
        ]
        for effect in worth.effects
    ]
    words = (
        f"Worth: {worth.seeds} divisions into {worth.folds} folds; {worth.removed:.1f} of {worth.trained_on:.0f} rows "
        f"removed on average, found in the training part alone, and judged on held-out rows that stay as they are."
    )
    return "\n".join(
        [
            _wrapped(words),
            text_table(["head fitted on", "accuracy on held-out pairs"], rows),
            *column_notes({"accuracy": list(worth.accuracy.values())}),
            "",
            text_table(["without the flagged", "accuracy, points", "NLL", "p"], effects),
            *column_notes(
                {
                    "accuracy": [effect.accuracy for effect in worth.effects],
                    "NLL": [effect.loss for effect in worth.effects],
                }
            ),
            _wrapped("p: sign flips by conversation of the change of accuracy, after Holm's correction for both lines"),
            *map(_wrapped, worth.sentences()),
        ]
    )


def _wrapped(words: str) -> str:
    return textwrap.fill(words, report_width(), break_long_words=False, break_on_hyphens=False)


# --- to be read by eye ---------------------------------------------------------------------------------------


def markdown(
    entries: Iterable[Mapping[str, Any]], texts: Mapping[int, tuple[Conversation, Conversation, Conversation]]
) -> str:
    """Return suspicious pairs as Markdown. `texts` has the prompt, the preferred reply and the other of each rank."""
    entries = list(entries)
    any_flagged = any(entry["flagged"] for entry in entries)
    lines = [
        "# Labels that are probably wrong" if any_flagged else "# No label is flagged: the most suspicious pairs",
        "",
        "The most suspicious first. Read both replies before you look at the label: a flag is a reason to look, and no "
        "proof.",
    ]
    for entry in entries:
        prompt, preferred, other = texts[entry["rank"]]
        flagged = "flagged" if entry["flagged"] else "not flagged"
        lines += ["", f"## {entry['rank']}. {_escaped(str(entry['id']))} ({flagged})", ""]
        lines += [f"- {_escaped(reason)}" for reason in entry["reasons"]]
        for title, turns in (
            ("Prompt", prompt),
            ("Labelled as preferred", preferred),
            ("Labelled as worse", other),
        ):
            lines += ["", f"**{title}**", "", *_fenced(_said(turns))]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", visible(text))


def _said(turns: Conversation) -> str:
    text = "\n\n".join(f"{turn.role}: {turn.content}" for turn in turns)
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
    return visible(text, lines=True)


def _fenced(text: str) -> list[str]:
    """Return a block whose fence is longer than any run of backticks in the text, so that no text can end it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]
