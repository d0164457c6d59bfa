"""A claim that was changed after results had been seen is marked wherever its verdict stands, and is counted apart."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.study_folders import PLAN, finished_study
from rewardlab.experiments.reporting.afterwards import _changed_files
from rewardlab.experiments.reporting.files import hypotheses_csv, json_report
from rewardlab.experiments.reporting.page import page
from rewardlab.experiments.reporting.summary import Summary, summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import Study, amend, open_study
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page

CHANGED = "changed after results had been seen"
APART = {"plain": 0.75, "smooth": 0.80, "harsh": 0.60}
"""Skills by which `keeps` is supported, whatever else is tested with it."""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return finished_study(tmp_path)


def amended(study: Study, *changes: tuple[str, str], seen: str = "results") -> Summary:
    path = study.folder / "plan.yaml"
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return summarise(amend(study.folder, reason="why", seen=seen, begun=True, judged=True))


@pytest.mark.slow
def test_a_claim_that_was_changed_is_marked_in_every_form(study: Study) -> None:
    found = amended(study, ("harms: accuracy(harsh) > accuracy(plain)", "harms: accuracy(harsh) < accuracy(plain)"))
    one = next(one for one in found.hypotheses if one.verdict.name == "harms")
    assert one.verdict.verdict == "supported", "the new claim fits what was seen"
    assert one.claim_before == "accuracy(harsh) > accuracy(plain)"
    document = page(found)
    text = " ".join(text_report(found).split())
    assert f"supported, {CHANGED}" in markdown_page(document)
    assert f"<td>supported, {CHANGED}</td>" in html_page(document)
    assert f"{CHANGED.capitalize()}; it was: accuracy(harsh) > accuracy(plain)" in text
    rows = {row["hypothesis"]: row for row in csv.DictReader(io.StringIO(hypotheses_csv(found)))}
    assert (rows["harms"]["change"], rows["keeps"]["change"]) == ("changed", "")
    assert json_report(found)["hypotheses"][1]["change"] == "changed"
    assert json.dumps(json_report(found))


@pytest.mark.slow
def test_it_is_counted_apart_and_supports_nothing(tmp_path: Path) -> None:
    study = finished_study(tmp_path, skills=APART)
    found = amended(
        study,
        ("  harms: accuracy(harsh) > accuracy(plain)\n", ""),
        ("  close: accuracy(smooth) > accuracy(plain)\n", "  late: accuracy(plain) > 0.5\n"),
    )
    assert found.headline.startswith("Of 1 hypothesis: 1 supported. Counted apart, 1 hypothesis changed or added after")
    assert "1 supported. Taken out after results had been seen: harms: accuracy(harsh) > accuracy(plain)" in (
        found.headline
    )
    assert {one.verdict.verdict for one in found.hypotheses} == {"supported"}
    assert [one.change for one in found.hypotheses] == ["", "added"]
    assert found.exit_status == 2
    assert "CLAIMS OF AFTERWARDS" in text_report(found)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "after",
    [pytest.param("", id="taken out"), pytest.param("accuracy(plain) > 0.1", id="replaced by what surely holds")],
)
def test_claims_that_failed_stay_in_the_family_when_they_are_taken_out_or_replaced(tmp_path: Path, after: str) -> None:
    failing = {f"fails_{number}": f"accuracy(smooth) > accuracy(plain) + 0.0{number}" for number in range(1, 9)}
    lines = {name: f"  {name}: {claim}\n" for name, claim in failing.items()}
    close = "  close: accuracy(smooth) > accuracy(plain)\n"
    study = finished_study(tmp_path, PLAN.replace(close, "".join(lines.values())))
    before = summarise(study)
    changes = [(line, f"  {name}: {after}\n" if after else "") for name, line in lines.items()]
    found = amended(study, *changes, ("  harms: accuracy(harsh) > accuracy(plain)\n", ""))
    then, now = (one.hypotheses[0].verdict for one in (before, found))
    assert now.name == "keeps"
    assert then.verdict == now.verdict == "undecided", "on its own it would be supported"
    assert now.adjusted_supported >= then.adjusted_supported > 0.05
    assert now.num_hypotheses >= then.num_hypotheses == 10
    assert f"adjusted over the {now.num_hypotheses} hypotheses of the plan, with those that were taken" in found.methods
    assert f"adjusted over {now.num_hypotheses} hypotheses" in " ".join(text_report(found).split())


CLOSE = "  close: accuracy(smooth) > accuracy(plain)"


@pytest.mark.parametrize("last", [pytest.param("", id="taken out"), pytest.param(f"{CLOSE}\n", id="as at first")])
def test_claims_that_only_amendments_in_between_had_stay_in_the_family(tmp_path: Path, last: str) -> None:
    study = finished_study(tmp_path)
    found = summarise(study)
    before = found.hypotheses[0].verdict
    for old, new in pairwise([f"{CLOSE}\n", *(f"{CLOSE} + 0.0{number}\n" for number in (1, 2, 3)), last]):
        found = amended(study, (old, new))
    verdict = found.hypotheses[0].verdict
    assert verdict.num_hypotheses == 6, "three of the plan, and three that were tried"
    assert verdict.adjusted_supported > before.adjusted_supported
    assert "close (version 3): accuracy(smooth) > accuracy(plain) + 0.02" in found.headline
    assert "CLAIMS OF AFTERWARDS" in text_report(found)
    assert found.exit_status != 0


@pytest.mark.slow
def test_an_amendment_in_between_whose_text_is_not_its_own_clears_nobody(study: Study) -> None:
    amended(study, ("would_change: a loss", "would_change: a large loss"))
    found = summarise(amended_again(study))
    assert not any(one.change for one in found.hypotheses)
    (study.folder / "frozen/plan.2.yaml").unlink()
    found = summarise(open_study(study.folder))
    assert {one.change for one in found.hypotheses} == {"not known"}


@pytest.mark.slow
def test_a_plan_whose_failures_were_taken_out_is_never_supported_as_a_whole(tmp_path: Path) -> None:
    study = finished_study(tmp_path, skills=APART)
    found = amended(
        study,
        ("  harms: accuracy(harsh) > accuracy(plain)\n", ""),
        ("  close: accuracy(smooth) > accuracy(plain)\n", ""),
    )
    assert {one.verdict.verdict for one in found.hypotheses} == {"supported"}
    assert found.exit_status == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("seen", "holds"), [("results", False), ("results-not-opened", True)])
def test_the_noise_of_all_arms_is_taken_only_if_that_was_said_before_results_were_seen(
    study: Study, seen: str, holds: bool
) -> None:
    (before, *_), switched = summarise(study).hypotheses, ("baseline: plain\n", "baseline: plain\npooled: true\n")
    after = amended(study, switched, seen=seen).hypotheses[0]
    assert before.verdict.verdict == "undecided"
    assert (after.verdict.p_supported < before.verdict.p_supported) is holds
    assert (after.verdict == before.verdict) is not holds
    assert (after.verdict.verdict == "supported") is holds


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("seen", "new"),
    [("results-not-opened", "accuracy(harsh) < accuracy(plain)"), ("results", "(accuracy(harsh)) > accuracy(plain)")],
)
def test_what_was_changed_before_or_only_in_its_form_is_not_marked(study: Study, seen: str, new: str) -> None:
    found = amended(study, ("harms: accuracy(harsh) > accuracy(plain)", f"harms: {new}"), seen=seen)
    assert not any(one.change for one in found.hypotheses)
    assert found.headline.startswith("Of 3 hypotheses:")


@pytest.mark.slow
def test_a_text_that_is_not_the_frozen_one_clears_nobody(study: Study) -> None:
    found = amended(study, ("would_change: a loss", "would_change: a large loss"))
    assert not any(one.change for one in found.hypotheses)
    (study.folder / "frozen/plan.1.yaml").write_text(PLAN, encoding="utf-8")
    found = summarise(amended_again(study))
    assert {one.change for one in found.hypotheses} == {"not known"}
    assert "perhaps changed" in text_report(found)


def amended_again(study: Study) -> Study:
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "# more\n", encoding="utf-8")
    return amend(study.folder, reason="why", seen="results", begun=True, judged=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("seeds: [0, 1, 2]", "seeds: [0, 2]", "smooth without the seed 1; plain without the seed 1"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, 2, 3, 4]", "smooth with the seeds 3, 4; plain with the seeds 3, 4"),
        ("smoothing, label_smoothing: 0.05", "smoothing, label_smoothing: 0.1", "smooth with other settings"),
    ],
)
def test_a_claim_whose_runs_were_changed_is_marked_and_counted_apart(
    tmp_path: Path, old: str, new: str, differs: str
) -> None:
    study = finished_study(tmp_path, skills=APART)
    line = "  harms: accuracy(harsh) > accuracy(plain)\n"
    found = amended(study, (old, new), (line, line))
    keeps, harms, _ = found.hypotheses
    assert keeps.changed == f"its runs were changed after results had been seen: {differs}"
    assert harms.change == ("" if "settings" in differs else "runs")
    assert "whose runs were changed after results had been seen: " in found.headline
    assert f"keeps: {keeps.changed}" in " ".join(text_report(found).split())
    assert found.exit_status != 0


def test_runs_of_other_files_are_other_runs(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"prompt": "x", "chosen": "a", "rejected": "b"}\n')
    found = summarise(amend(study.folder, reason="more", seen="results", begun=True, judged=True))
    assert {one.change for one in found.hypotheses} == {"runs"}
    assert found.hypotheses[0].other_runs == "smooth with other files; plain with other files"


def test_files_count_by_what_they_were_before_results_and_are_now_wherever_the_report_is_made(tmp_path, monkeypatch):
    study, path = finished_study(tmp_path), tmp_path / "train.jsonl"
    before = path.read_text(encoding="utf-8")
    given = {"seen": "results", "begun": True, "judged": True}
    path.write_text(before + '{"prompt": "x", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    amend(study.folder, reason="more", **given)
    path.rename(tmp_path / "elsewhere.jsonl")
    monkeypatch.chdir("/")
    assert {one.change for one in summarise(open_study(study.folder)).hypotheses} == {"runs"}
    path.write_text(before, encoding="utf-8")
    assert not any(one.change for one in summarise(amend(study.folder, reason="as it was", **given)).hypotheses)


def test_files_of_models_that_an_earlier_version_did_not_note_are_not_changed_ones(study: Study) -> None:
    seen = {"kind": "amended", "version": 2}
    now = {"train.jsonl": "1", "m/config.json": "2"}
    noted = [{"kind": "frozen", "data": {"train.jsonl": "1"}}, seen | {"data": now}]
    assert _changed_files(replace(study, entries=tuple(noted)), 2) == set()
    now |= {"train.jsonl": "3", "more.jsonl": "4"}
    assert _changed_files(replace(study, entries=tuple(noted)), 2) == {"train.jsonl", "more.jsonl"}


def test_where_noise_is_pooled_every_arm_counts(tmp_path: Path) -> None:
    study = finished_study(tmp_path, "pooled: true\n" + PLAN)
    gone = "  harsh: {says: smoothing and a high rate, label_smoothing: 0.05, lr: 0.01}\n", ""
    unclaimed = "  harms: accuracy(harsh) > accuracy(plain)\n", ""
    found = amended(study, gone, unclaimed, (", harsh]", "]"))
    assert found.hypotheses[0].other_runs == "harsh without the seeds 0, 1, 2"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seen", ["results", "results-not-opened"])
def test_runs_are_as_they_were_where_nothing_of_them_was_changed(study: Study, seen: str) -> None:
    changes = ("baseline: plain\n", "baseline: smooth\n"), ("seeds: [0, 1, 2]", "seeds: 3")
    before = [*changes] if seen == "results" else [("seeds: [0, 1, 2]", "seeds: [0, 2]")]
    assert not any(one.change for one in amended(study, *before, seen=seen).hypotheses)
