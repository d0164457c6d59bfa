"""`gold check`: files that belong together pass, and each planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.gold_rows import Size, draw_rows, gold_of, with_gold
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import sha256_file
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.curation.files.forms import as_own_row
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.checking.report import claim, json_report, page, text_report, write
from rewardlab.gold.checking.rows import row_findings
from rewardlab.gold.checking.run import Checked, check
from rewardlab.gold.files.layouts import write_responses, write_rewards, write_rows
from rewardlab.gold.files.rows import GoldRow, with_system
from rewardlab.gold.findings import Finding, exit_status
from rewardlab.gold.stage import Asked, Place, write_manifest
from rewardlab.report.page import html_page

Rows = list[GoldRow]


def drawn(rows: int = 120, replies: int = 2, seed: int = 0) -> Rows:
    return draw_rows(Size(rows=rows, replies=replies, shown=0.95), np.random.default_rng(seed))


def messages(prompt: Sequence[Message], reply: str = "") -> list[dict[str, str]]:
    turns = [turn.as_dict() for turn in prompt]
    return [*turns, {"role": "assistant", "content": reply}] if reply else turns


def sides_of(row: GoldRow) -> tuple[str, str]:
    assert row.gold is not None
    order = np.argsort(np.array(row.gold, dtype=np.float64))
    best, worst = (row.responses[place] for place in (order[-1], order[0]))
    assert best is not None
    assert worst is not None
    return best, worst


def write_pairs(folder: Path, side: str, rows: Rows) -> None:
    """Every form of the pairs of one side, as `gold build` writes them."""
    folder.mkdir(exist_ok=True)
    own, trl = [], []
    for row in rows:
        best, worst = sides_of(row)
        preference = Preference(
            id=row.id,
            source="gold",
            prompt=row.prompt,
            replies=((Message("assistant", worst),), (Message("assistant", best),)),
            comparisons=(Comparison(first=0, second=1, label=0.0),),
        )
        own.append(as_own_row(preference, row.id, "gold"))
        trl.append({"chosen": messages(row.prompt, best), "rejected": messages(row.prompt, worst)})
    write_rows(folder / f"{side}.jsonl", own)
    write_rows(folder / f"{side}.trl.jsonl", trl)
    columns = {name: [pair[name] for pair in trl] for name in ("chosen", "rejected")}
    (folder / f"{side}.columns.json").write_text(json.dumps(columns), encoding="utf-8")


def stages(
    folder: Path, rows: Rows, *, samples: Rows | None = None, labels: Rows | None = None, built: Rows | None = None
) -> CheckConfig:
    """The files of all stages in a folder; each stage can be given other rows than the others."""
    sampled = [replace(row, gold=None) for row in (rows if samples is None else samples)]
    write_rows(folder / "samples.jsonl", (row.as_json() for row in sampled))
    write_responses(folder / "samples.json", sampled)
    labelled = rows if labels is None else labels
    write_rows(folder / "labels.jsonl", (row.as_json() for row in labelled))
    write_rewards(folder / "labels.json", labelled)
    pairs = rows if built is None else built
    cut = len(pairs) * 9 // 10
    write_pairs(folder / "pairs", "train", pairs[:cut])
    write_pairs(folder / "pairs", "test", pairs[cut:])
    digests = {path.name: sha256_file(path) for path in sorted((folder / "pairs").iterdir())}
    inputs = {"labels.jsonl": sha256_file(folder / "labels.jsonl")}
    manifest = {"outputs": digests, "inputs": inputs, "counts": {"pairs": len(pairs)}}
    (folder / "pairs" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return CheckConfig(folder=folder)


def failed(checked: Checked) -> dict[str, Finding]:
    """The first of each name."""
    return {one.name: one for one in reversed(checked.findings) if one.status == "fail"}


def fault(config: CheckConfig, name: str) -> str:
    found = failed(check(config))
    assert name in found, {one: found[one].evidence for one in found}
    return found[name].evidence


def test_files_that_belong_together_pass(tmp_path: Path) -> None:
    for replies in (2, 4):
        folder = tmp_path / str(replies)
        folder.mkdir()
        checked = check(stages(folder, drawn(replies=replies)))
        assert {one.status for one in checked.findings} == {"pass"}, text_report(checked)
        assert exit_status(checked.findings) == 0
        manifest = next(one for one in checked.findings if one.name == "manifest")
        assert manifest.evidence == "7 files have the hash that it names."


def test_swapped_scores_are_named(tmp_path: Path) -> None:
    rows = drawn()
    told = fault(stages(tmp_path, with_gold(rows, gold_of(rows)[:, ::-1]), built=rows), "chosen and gold scores")
    assert "Chosen and rejected are swapped or the two scores of each row." in told


def test_scores_of_many_replies_that_are_swapped_are_told_from_pairs_that_are(tmp_path: Path) -> None:
    rows = drawn(replies=4)
    told = fault(stages(tmp_path, with_gold(rows, gold_of(rows)[:, ::-1]), built=rows), "chosen and gold scores")
    assert "in the reverse order of the replies" in told
    (other := tmp_path / "other").mkdir()
    told = fault(stages(other, with_gold(rows, -gold_of(rows)), built=rows), "chosen and gold scores")
    assert "Chosen and rejected are swapped, or the scores have the opposite sign." in told


@pytest.mark.parametrize(("by", "told"), [(1, "stand 1 row further up"), (-1, "stand 1 row further down")])
def test_scores_that_are_shifted_against_the_pairs_are_named(tmp_path: Path, by: int, told: str) -> None:
    rows = drawn()
    moved = with_gold(rows, np.roll(gold_of(rows), -by, axis=0))
    assert told in fault(stages(tmp_path, moved, built=rows), "chosen and gold scores")


def test_a_row_that_is_missing_in_the_middle_is_placed(tmp_path: Path) -> None:
    rows = drawn(rows=200)
    gold = gold_of(rows)
    gold[120:] = np.roll(gold[120:], -1, axis=0)
    told = fault(stages(tmp_path, with_gold(rows, gold), built=rows), "chosen and gold scores")
    start = int(told.split("about row ")[1].split()[0])
    assert abs(start - 120) <= 5
    assert "stand 1 row further up" in told


def test_scores_of_another_set_are_named(tmp_path: Path) -> None:
    rows = drawn()
    other = with_gold(rows, gold_of(drawn(seed=5)))
    assert "scores of another set" in fault(stages(tmp_path, other, built=rows), "chosen and gold scores")


def test_some_flipped_pairs_are_counted(tmp_path: Path) -> None:
    rows = drawn()
    gold = gold_of(rows)
    gold[3:9] = gold[3:9, ::-1]
    told = fault(stages(tmp_path, rows, built=with_gold(rows, gold)), "chosen and gold scores")
    assert "6 the lower one" in told
    assert "some pairs were flipped" in told


def test_chosen_that_ties_with_rejected_is_told(tmp_path: Path) -> None:
    rows = drawn()
    gold = gold_of(rows)
    gold[4] = gold[4, 0]
    checked = check(stages(tmp_path, with_gold(rows, gold), built=rows))
    found = next(one for one in checked.findings if one.name == "chosen and gold scores")
    assert found.status == "warn"
    assert "1 two equal ones" in found.evidence


@pytest.mark.parametrize(("missing", "status"), [(120, "undecided"), (70, "undecided"), (50, "pass")])
def test_pairs_without_scores_are_not_found_in_order(tmp_path: Path, missing: int, status: str) -> None:
    rows = drawn()
    scored = [replace(row, gold=(None, None)) if place < missing else row for place, row in enumerate(rows)]
    checked = check(stages(tmp_path, scored, built=rows))
    found = next(one for one in checked.findings if one.name == "chosen and gold scores")
    assert found.status == status
    assert "have no score" in found.evidence


@pytest.mark.parametrize(("system", "status"), [("You are terse.", "fail"), ("", "warn")])
def test_another_system_turn_is_another_template(tmp_path: Path, system: str, status: str) -> None:
    rows = drawn()
    built = [replace(row, prompt=with_system(row.prompt, system)) for row in rows]
    checked = check(stages(tmp_path, rows, built=built))
    found = next(one for one in checked.findings if one.name == "system turn" and one.about == "train.jsonl")
    assert found.status == status
    assert "beside none (108)" in found.evidence
    assert all(one.name == "system turn" for one in checked.findings if one.status != "pass")


def test_a_system_turn_that_only_gold_saw_is_named(tmp_path: Path) -> None:
    rows = drawn()
    labels = [replace(row, prompt=with_system(row.prompt, "Be kind.")) for row in rows]
    told = fault(stages(tmp_path, rows, labels=labels), "samples and labels")
    assert "Only their system turns do: none when sampled, “Be kind.” when labelled." in told


def test_labels_of_shifted_and_of_other_rows_are_named(tmp_path: Path) -> None:
    rows = drawn()
    told = fault(stages(tmp_path, rows, labels=[*rows[:30], *rows[31:], rows[30]]), "samples and labels")
    assert "the first is row 31" in told
    assert "they stand 1 row further up" in told
    (other := tmp_path / "other").mkdir()
    told = fault(stages(other, rows, labels=drawn(seed=3)), "samples and labels")
    assert "120 of them have the same prompt with other replies" in told


def test_a_file_with_fewer_rows_is_named(tmp_path: Path) -> None:
    rows = drawn()
    assert "119" in fault(stages(tmp_path, rows, labels=rows[:-1]), "number of rows")


def test_pairs_of_other_data_are_of_no_row(tmp_path: Path) -> None:
    told = fault(
        stages(tmp_path, drawn(), built=draw_rows(Size(40, 2), np.random.default_rng(1), tag="x")), "pairs and rows"
    )
    assert "36 have a prompt that no row has" in told


def test_prompts_on_both_sides_and_forms_that_differ_are_named(tmp_path: Path) -> None:
    rows = drawn()
    config = stages(tmp_path, rows)
    write_pairs(tmp_path / "pairs", "test", rows[100:])
    found = failed(check(config))
    assert "8 in both" in found["train and test prompts"].evidence
    assert "changed after it was written" in found["manifest"].evidence
    lines = (tmp_path / "pairs" / "train.trl.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "pairs" / "train.trl.jsonl").write_text("\n".join(lines[1:]), encoding="utf-8")
    assert "train.trl.jsonl: other pairs than in train.jsonl" in failed(check(config))["forms of train"].evidence


def test_a_twin_that_was_changed_is_named(tmp_path: Path) -> None:
    rows = drawn()
    config = stages(tmp_path, rows)
    write_rewards(tmp_path / "labels.json", rows[1:] + rows[:1])
    assert "120 of them other than" in failed(check(config))["labels as JSON"].evidence


def test_the_manifest_of_a_stage_is_read(tmp_path: Path) -> None:
    config = stages(tmp_path, drawn())
    place = Place.of(tmp_path / "labels.jsonl")
    write_manifest(place, Asked(stage="label", settings={}, inputs={}), decided={"model": "0" * 64}, counts={})
    (manifest,) = [one for one in check(config).findings if "labels.jsonl.manifest" in one.about]
    assert (manifest.status, manifest.evidence) == ("pass", "2 files have the hash that it names.")
    write_rewards(place.twin, drawn(seed=1))
    assert "labels.json changed" in failed(check(config))["manifest"].evidence


def test_the_rows_that_a_built_folder_keeps_stand_in_for_labels(tmp_path: Path) -> None:
    rows = drawn()
    for side, own in (("train", rows[:100]), ("test", rows[100:])):
        write_pairs(tmp_path, side, own)
        write_rows(tmp_path / f"labels.{side}.jsonl", (row.as_json() for row in own))
    checked = check(CheckConfig(pairs=tmp_path))
    assert {one.status for one in checked.findings} == {"pass"}
    assert any("20 of 20 pairs have the reply" in one.evidence for one in checked.findings)


def test_shifted_gold_is_seen_in_the_texts_alone(tmp_path: Path) -> None:
    rows = drawn(rows=400)
    moved = with_gold(rows, np.roll(gold_of(rows), 1, axis=0))
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in moved))
    told = fault(CheckConfig(labels=tmp_path / "labels.jsonl"), "texts and gold scores")
    assert "with those 1 row further down" in told


@pytest.mark.parametrize(
    ("change", "name", "told"),
    [
        (lambda gold: np.clip(gold, 8, 12), "range of gold scores", "the same extreme one"),
        (lambda gold: np.round(gold / 10), "gold ties", "have one gold score twice"),
        (lambda gold: gold * 0 + 3, "range of gold scores", "from 3 to 3"),
    ],
)
def test_compressed_gold_is_named(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], name: str, told: str
) -> None:
    rows = drawn()
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in with_gold(rows, change(gold_of(rows)))))
    assert told in fault(CheckConfig(labels=tmp_path / "labels.jsonl"), name)


def test_scores_at_the_end_are_counted_by_prompt() -> None:
    """All replies to an easy prompt may have the highest score: three such prompts of 25 are no clip."""
    generator = np.random.default_rng(0)
    rows = [
        GoldRow(
            id=str(number),
            prompt=(Message("user", f"question {number}"),),
            responses=tuple(f"reply {number} {place}" for place in range(8)),
            gold=tuple((np.full(8, 5.0) if number < 3 else generator.normal(size=8)).tolist()),
        )
        for number in range(25)
    ]
    found = {one.name: one for one in row_findings(rows)}
    assert found["range of gold scores"].status == "pass", found["range of gold scores"].evidence


def test_gold_after_a_sigmoid_is_looked_at(tmp_path: Path) -> None:
    rows = drawn()
    squashed = with_gold(rows, 1 / (1 + np.exp(-gold_of(rows) / 10)))
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in squashed))
    found = {one.name: one for one in check(CheckConfig(labels=tmp_path / "labels.jsonl")).findings}
    assert found["range of gold scores"].status == "warn"
    assert "as after a sigmoid" in found["range of gold scores"].evidence


def test_one_text_with_two_scores_is_named(tmp_path: Path) -> None:
    rows = [replace(row, responses=("same", "same")) if number < 5 else row for number, row in enumerate(drawn())]
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in rows))
    assert "have two that differ" in fault(CheckConfig(labels=tmp_path / "labels.jsonl"), "identical replies")


def test_missing_cut_and_double_rows_are_counted(tmp_path: Path) -> None:
    rows = drawn()
    facts: list[dict[str, Any]] = [{"stop": "length"}, {"stop": "stop"}]
    rows = [replace(row, samples=tuple(facts)) for row in rows]
    rows[0] = replace(rows[0], gold=(None, 1.0), gold_errors={"0": "time-out"})
    rows[1] = replace(rows[1], responses=(None, "text"), gold=(None, 2.0))
    rows.append(rows[5])
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in rows))
    found = {one.name: one for one in check(CheckConfig(labels=tmp_path / "labels.jsonl")).findings}
    assert found["missing"].evidence == "Of 242 replies 1 not sampled, 1 without a gold score."
    assert found["cut at the token limit"].status == "warn"
    assert "1 of them with the same replies" in found["rows that come again"].evidence


def layout(folder: Path, rows: Rows, *, gold: np.ndarray | None = None) -> CheckConfig:
    """The files of the layout with one JSON file a fact, and pairs as one object under a name for lines."""
    prompts = [row.prompt[-1].content for row in rows]
    (folder / "rm_prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    write_responses(folder / "rm_sft.json", rows)
    write_rewards(folder / "rm_rewards.json", rows if gold is None else with_gold(rows, gold))
    empty = {"role": "system", "content": ""}
    columns = {
        side: [[empty, *messages(row.prompt, sides_of(row)[number])] for row in rows]
        for number, side in enumerate(("chosen", "rejected"))
    }
    (folder / "rm_implicit.jsonl").write_text(json.dumps(columns), encoding="utf-8")
    return CheckConfig(
        prompts_path=folder / "rm_prompts.json",
        responses_path=folder / "rm_sft.json",
        rewards_path=folder / "rm_rewards.json",
        data_path=folder / "rm_implicit.jsonl",
        system="",
    )


@pytest.mark.slow
def test_the_layout_of_one_file_a_fact_passes_and_its_faults_are_named(tmp_path: Path) -> None:
    rows = drawn()
    config = layout(tmp_path, rows)
    assert {one.status for one in check(config).findings} == {"pass"}
    assert "are swapped" in fault(layout(tmp_path, rows, gold=gold_of(rows)[:, ::-1]), "chosen and gold scores")
    layout(tmp_path, rows)
    write_responses(tmp_path / "rm_sft.json", [*rows[1:], rows[0]])
    assert "have replies that stand 1 row further up than their prompt" in fault(config, "pairs and rows")
    layout(tmp_path, rows)
    write_rewards(tmp_path / "rm_rewards.json", rows[:-1])
    assert "119" in fault(config, "number of rows")


def test_replies_under_several_prompts_do_not_tell_whose_they_are(tmp_path: Path) -> None:
    rows = drawn(6)
    same = [replace(row, responses=("Yes", "No")) if n < 2 else row for n, row in enumerate(rows)]
    gold = np.array([[2.0, 1.0], [1.0, 2.0], *gold_of(rows)[2:]])
    config = replace(layout(tmp_path, with_gold(same, gold)), prompts_path=None)
    pairs = json.loads((tmp_path / "rm_implicit.jsonl").read_text(encoding="utf-8"))
    (tmp_path / "rm_implicit.jsonl").write_text(json.dumps({side: own[::-1] for side, own in pairs.items()}))
    findings = {one.name: one for one in check(config).findings}
    assert "The replies of 2 rows come in several rows or under several prompts" in findings["prompts"].evidence
    assert findings["chosen and gold scores"].evidence.startswith("4 of 4 pairs")
    assert findings["pairs and rows"].status == "undecided"
    layout(tmp_path, with_gold(drawn(6, seed=1), gold))
    write_responses(tmp_path / "rm_sft.json", rows)
    assert "two replies that no row has together" in fault(config, "pairs and rows")


def test_pairs_as_lines_are_read_like_columns(tmp_path: Path) -> None:
    rows = drawn()
    config = layout(tmp_path, rows)
    columns = json.loads((tmp_path / "rm_implicit.jsonl").read_text(encoding="utf-8"))
    lines = [{"chosen": good, "rejected": bad} for good, bad in zip(*columns.values(), strict=True)]
    before = check(config)
    (tmp_path / "rm_implicit.jsonl").write_text(json.dumps(columns, indent=2), encoding="utf-8")
    assert check(config).findings == before.findings, "over several lines too"
    write_rows(tmp_path / "rm_implicit.jsonl", lines)
    assert check(config).findings == before.findings
    (tmp_path / "rm_implicit.jsonl").write_text('{"chosen": [,\n' + json.dumps(lines[0]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rm_implicit.jsonl:1: not valid JSON"):
        check(config)


@pytest.mark.slow
def test_rows_are_shown_by_the_seed(tmp_path: Path) -> None:
    config = replace(stages(tmp_path, drawn()), num_samples=3)
    first, again, other = check(config), check(config), check(replace(config, seed=1))
    assert len(first.shown) == 3
    assert first.shown == again.shown != other.shown
    told = text_report(first)
    assert "[user] Question" in told
    assert "[reply 0, gold " in told
    assert ", chosen]" in told


def test_the_report_is_written_once_a_folder_is_named_and_only_over_its_own(tmp_path: Path) -> None:
    config = replace(stages(tmp_path, drawn()), output_dir=tmp_path / "out")
    claim(config)
    checked = check(config)
    assert [path.name for path in write(checked, config)] == ["check.json", "check.md", "check.html"]
    assert json_report(checked, config)["exit_status"] == 0
    claim(config)
    (tmp_path / "out" / "check.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="did not write it"):
        claim(config)


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to check"):
        CheckConfig()
    with pytest.raises(ConfigError, match="prompts-path is missing"):
        CheckConfig(responses_path=tmp_path / "a.json")
    with pytest.raises(ConfigError, match="neither samples.jsonl"):
        check(CheckConfig(folder=tmp_path))
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="wanted `chosen` and `rejected`"):
        check(CheckConfig(data_path=tmp_path / "bad.jsonl"))


def test_what_passed_is_a_line_on_the_terminal_and_whole_on_the_page() -> None:
    good = [Finding(name=f"thing {n}", status="pass", evidence="fine") for n in range(3)]
    bad = Finding(name="number of rows", status="fail", evidence="3 and 4")
    checked = Checked(files=("a.jsonl: 3 rows",), findings=(*good, bad), shown=())
    text = text_report(checked)
    assert "3 passed. All of them are on the page that --output-dir writes." in text
    assert "FAIL      number of rows" in text
    assert "thing" not in text
    assert "thing 2" in html_page(page(checked))


def test_what_a_killed_build_left_is_not_taken_for_its_folder(tmp_path: Path) -> None:
    (tmp_path / ".pairs.tmp-1").mkdir()
    (tmp_path / ".pairs.tmp-1" / "train.jsonl").write_text("half")
    with pytest.raises(ConfigError, match=r"neither samples\.jsonl nor labels\.jsonl nor train\.jsonl lies in it"):
        check(CheckConfig(folder=tmp_path))
