"""Builds a report from folders: reads them, puts the sections in order, and writes the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.ceiling import Ceiling, of_score_rows
from rewardlab.analysis.judgement import Judgement, judge_rows
from rewardlab.analysis.mistakes import WorstMistakes, worst_mistakes
from rewardlab.analysis.reliability import NUM_DRAWS
from rewardlab.analysis.slices import TURNS
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.core.files import UTF8, write_text
from rewardlab.core.folders import remove_left_over, require_writable_folder
from rewardlab.core.run_folder import EVALUATED, MISTAKES, holds_run, judged_together, manifest_keys
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.terminal import quoted
from rewardlab.core.together import together
from rewardlab.core.types import Estimate, ScoreRow
from rewardlab.report.card import write_card
from rewardlab.report.checklist import checklist_section
from rewardlab.report.curves import curves_side_by_side, training_curves
from rewardlab.report.document import Document, Paragraph, Part, Section
from rewardlab.report.evaluations import Judged, read_columns, read_gold, read_scores
from rewardlab.report.extras import (
    controls_section,
    ensemble_section,
    precision_section,
    probe_section,
    robustness_section,
    suites_section,
)
from rewardlab.report.folder import EnsembleRecord, Record, read_controls, read_ensemble, read_folder
from rewardlab.report.from_scores import (
    calibration_section,
    length_section,
    ranking_section,
    rewards_section,
    slices_section,
)
from rewardlab.report.markdown import markdown_page
from rewardlab.report.mistakes import FindTexts, FoundTexts, Key, KnownTexts, keys_of, mistakes_section, written_texts
from rewardlab.report.page import html_page
from rewardlab.report.paired import AgainstBaselines, against_baselines, runs_section
from rewardlab.report.run_facts import settings_section, speed_section
from rewardlab.report.sections import (
    data_section,
    headline,
    problems_section,
    side_by_side,
    signs_section,
    status,
)

NUM_MISTAKES: Final = 5
REPORT_HTML: Final = "report.html"
REPORT_MD: Final = "report.md"
MARKS: Final = {REPORT_HTML: '<meta name="generator" content="rewardlab">', REPORT_MD: "<!-- rewardlab report -->"}
"""Name of a report -> the line that marks it as one that a report wrote and may replace."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A folder, and what follows from its score rows."""

    record: Record
    rows: Sequence[ScoreRow]
    judgement: Judgement | None
    mistakes: WorstMistakes
    texts: FoundTexts | None
    problems: Sequence[str]
    against: AgainstBaselines
    """The model against its baselines, on the same pairs."""

    @property
    def ceiling(self) -> Estimate | Ceiling | None:
        """Accuracy of a judge who knew the true probabilities, if the data hold them; else a noise ceiling from
        repeated judgements or soft labels; None if the data allow neither."""
        known = None if self.texts is None else self.texts.ceiling
        return of_score_rows(self.rows) if known is None else known


def tell(
    record: Record,
    *,
    find_texts: FindTexts | None,
    num_mistakes: int = NUM_MISTAKES,
    draws: int = NUM_DRAWS,
    earlier: Told | None = None,
) -> Told:
    """Judge the score rows of a folder and find the texts of the worst mistakes. Failures become `problems`.

    `draws` is the number of resamples behind the reliability curve. `earlier` is an earlier result for the same folder;
    it is used again if the folder is still judged by the same evaluation.
    """
    if earlier is not None and record.judged is not None and record.judged == earlier.record.judged:
        return replace(earlier, record=record)
    rows: list[ScoreRow] = []
    judgement, texts = None, None
    mistakes = WorstMistakes(comparisons=(), num_wrong=0)
    problems: list[str] = []
    if record.judged is not None:
        try:
            rows = read_scores(record.judged, problems)
            mistakes = worst_mistakes(rows, most=num_mistakes)
            if rows and find_texts is not None:
                texts = _texts(record.config, record.judged, mistakes, rows, find_texts)
            if rows:
                slices = _columns(record.judged, rows, {} if texts is None else texts.turns)
                judgement = judge_rows(
                    rows,
                    beta=record.beta,
                    thresholds=record.thresholds,
                    slices=slices,
                    gold=read_gold(record.judged),
                    draws=draws,
                )
        except (RewardlabError, OSError, KeyError, AssertionError) as error:
            problems.append(f"The rows of {record.judged.name} cannot be judged: {error}")
    return Told(
        record=record,
        rows=rows,
        judgement=judgement,
        mistakes=mistakes,
        texts=texts,
        problems=tuple(problems),
        against=against_baselines(record, rows),
    )


def _columns(judged: Judged, rows: Sequence[ScoreRow], turns: Mapping[Key, int]) -> dict[str, dict[Key, object]]:
    """Return the columns by which an evaluation is divided.

    These are the columns that were written beside its scores. The number of turns is added if it is not among them, was
    found in the data for every preference, and differs between preferences.
    """
    columns = read_columns(judged)
    wanted = {(row.source, row.preference_id) for row in rows}
    if TURNS not in columns and turns.keys() >= wanted and len(set(turns.values())) > 1:
        columns = {TURNS: {key: turns[key] for key in wanted}, **columns}
    return columns


def _texts(
    config: Mapping[str, Any], judged: Judged, mistakes: WorstMistakes, rows: Sequence[ScoreRow], find_texts: FindTexts
) -> KnownTexts:
    """Return the texts that were written with the scores; other texts and the ceiling come from the data."""
    path = None if judged.scores is None else judged.scores.with_name(f"{judged.name}.{MISTAKES}")
    written = {} if path is None else written_texts(path, mistakes.comparisons)
    wanted = [key for key in keys_of(mistakes.comparisons) if key not in written]
    found = find_texts(config, judged.name, wanted, rows)
    return KnownTexts(
        preferences={**found.preferences, **written},
        ceiling=found.ceiling,
        turns=found.turns,
        problems=tuple(found.problems),
    )


def report_of(told: Sequence[Told], ensembles: Sequence[EnsembleRecord] = ()) -> Document:
    """Return the report on one run, or on several side by side, and on ensembles of them."""
    records = [one.record for one in told]
    names = unique_names(records)
    parts = [Part(title=name, sections=_sections(one)) for name, one in zip(names, told, strict=True)]
    if len(records) > 1:
        curves = curves_side_by_side(records, names)
        rows = {name: (one.rows, one.record.beta) for name, one in zip(names, told, strict=True) if one.rows}
        sections = [side_by_side(records, names)]
        if (paired := runs_section(rows)).blocks:
            sections.append(paired)
        if curves.charts:
            sections.append(Section(title="Curves", blocks=(curves,)))
        parts.insert(0, Part(title="All runs", sections=tuple(sections)))
    together = tuple(ensemble_section(ensemble) for ensemble in ensembles)
    parts[0] = replace(parts[0], sections=(*parts[0].sections, *together))
    title = f"Reward model {names[0]}" if len(names) == 1 else f"{len(names)} reward models"
    return Document(title=title, made_by=f"Report of rewardlab {installed_version()}.", parts=tuple(parts))


def _sections(told: Told) -> tuple[Section, ...]:
    record, judgement = told.record, told.judgement
    head = headline(record, ceiling=told.ceiling)
    tone = Paragraph(text=status(record), tone="plain" if record.finished else "warning")
    found = [
        Section(title=head.title, blocks=(tone, *head.blocks)),
        problems_section(record, told.problems),
        signs_section(record),
        Section(title="Training curves", blocks=(curves,) if (curves := training_curves(record)).charts else ()),
    ]
    if judgement is not None:
        found += [
            calibration_section(judgement),
            rewards_section(judgement, record),
            length_section(judgement),
            slices_section(judgement),
            ranking_section(judgement),
            mistakes_section(told.mistakes, told.texts, beta=record.beta),
        ]
    found += [
        suites_section(record),
        robustness_section(record),
        precision_section(record),
        probe_section(record),
        controls_section(record),
        checklist_section(record, judgement, told.against),
        data_section(record),
        speed_section(record),
        settings_section(record),
    ]
    return tuple(section for section in found if section.blocks)


def write_report(
    folders: Sequence[Path],
    *,
    output_dir: Path,
    find_texts: FindTexts | None = None,
    num_mistakes: int = NUM_MISTAKES,
    card: bool = False,
    overwrite: bool = False,
    controls: Path | None = None,
    later: Path | None = None,
) -> list[Path]:
    """Write `report.html` and `report.md` about the folders, and with `card` the card of each model; return the paths.

    `later` is where `output_dir`, with folders that lie in it, stands when the report is read.
    The folder of an evaluation of several models stands for those of the models. `controls` is a folder of `rewardlab
    diagnose`, in place of what lies in the folders.

    Raises ConfigError for a folder that holds no run, or no controls; for files of these names that a report did not
    write, or one on another run that lies there, unless `overwrite`; and as `write_card` does.
    """
    records = [read_folder(place) for folder in folders for place in judged_together(folder) or [folder]]
    require_writable_folder(output_dir, "--output-dir")
    claim_report(output_dir, folders, overwrite=overwrite)
    if controls is not None:
        found = read_controls(controls)
        records = [replace(record, controls=found) for record in records]
    told = [tell(record, find_texts=find_texts, num_mistakes=num_mistakes) for record in records]
    if later is not None:
        told = [replace(one, record=_moved(one.record, output_dir, later)) for one in told]
    document = report_of(told, [own for folder in folders if (own := read_ensemble(folder)) is not None])
    html, text = output_dir / REPORT_HTML, output_dir / REPORT_MD
    for path in (html, text):
        remove_left_over(path)
    with together():
        write_text(html, html_page(document))
        write_text(text, f"{markdown_page(document)}\n{MARKS[REPORT_MD]}\n")
    if not card:
        return [html, text]
    return [
        html,
        text,
        *(_write_card(one, overwrite=overwrite) for one in told),
    ]


def _moved(record: Record, now: Path, later: Path) -> Record:
    """Return a record with its folder and that of its model as they are called when `now` has been moved to `later`."""

    def place(folder: Path) -> Path:
        return later / folder.relative_to(now) if folder.is_relative_to(now) else folder

    model = record.model_folder
    return replace(record, folder=place(record.folder), model_folder=None if model is None else place(model))


def _write_card(told: Told, *, overwrite: bool) -> Path:
    return write_card(
        told.record,
        told.judgement,
        ceiling=told.ceiling,
        against=told.against,
        problems=told.problems,
        overwrite=overwrite,
    )


def write_card_of(folder: Path, *, find_texts: FindTexts | None = None, overwrite: bool = False) -> list[Path]:
    """Write the model cards of a run, probe or evaluation, or of a reward-model folder in a run; return the paths.

    Raises ConfigError for a reward-model folder that is not the one that its run would put a card on, and as
    `write_card` does.
    """
    run = folder
    if (folder / SPEC_FILE).is_file() and not holds_run(folder):
        run = folder.resolve().parent
        if not holds_run(run):
            raise ConfigError(
                f"{folder}: a reward model that lies in no run, so there are no numbers for a card. Judge it with "
                f"`rewardlab eval --model {quoted(str(folder))} --dataset … --output-dir EVAL`, then give EVAL."
            )
    records = [read_folder(place) for place in judged_together(run) or [run]]
    if run is not folder and (own := records[0].model_folder) is not None and own.resolve() != folder.resolve():
        raise ConfigError(
            f"{folder}: the numbers of its run are those of {own}. Give that one, or judge this one with `rewardlab "
            f"eval --model {folder} --dataset … --output-dir EVAL` and give EVAL."
        )
    told = [tell(record, find_texts=find_texts) for record in records]
    return [_write_card(one, overwrite=overwrite) for one in told]


def claim_report(folder: Path, about: Sequence[Path], *, overwrite: bool) -> None:
    """Raise ConfigError if a folder holds files of these names that a report did not write, or the report on a run of
    its own that this one is not `about`, unless `overwrite`."""
    there = [name for name in MARKS if (folder / name).exists()]
    if overwrite or not there:
        return
    if foreign := [name for name in there if not is_own_report(folder / name)]:
        raise ConfigError(
            f"{folder} holds {' and '.join(foreign)}, which `rewardlab report` did not write. Choose another "
            f"--output-dir, or replace what is there with --overwrite."
        )
    together = judged_together(folder)
    own = {place.resolve() for place in (folder, *together)}
    is_one = bool(together) or holds_run(folder) or manifest_keys(folder) >= EVALUATED
    if is_one and own.isdisjoint(place.resolve() for place in about):
        raise ConfigError(
            f"{folder} holds another run, and {' and '.join(there)} about it. Choose another --output-dir, or replace "
            f"them with --overwrite."
        )


def is_own_report(path: Path) -> bool:
    """Return whether a file is a report: one of its lines is the mark."""
    try:
        text = path.read_text(encoding=UTF8, errors="replace") if path.is_file() else ""
    except OSError:
        return False
    return MARKS[path.name] in text.splitlines()


def unique_names(records: Sequence[Record]) -> list[str]:
    """Return a name for every run: that of its folder, with its parent folders where two names would be equal."""
    for depth in range(1, 8):
        names = ["/".join(record.folder.resolve().parts[-depth:]) for record in records]
        if len(set(names)) == len(names):
            return names
    return [f"{record.name} ({number})" for number, record in enumerate(records, start=1)]


def installed_version() -> str:
    """Return the version of the package, as installed."""
    try:
        return version("rewardlab")
    except PackageNotFoundError:
        return "(not installed)"
