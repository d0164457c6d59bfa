"""Pairs that `gold build` kept of labelled rows, and their labels: what a run measured is judged by them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gold_matched import drawn, facts, findings, part, scored, sure
from rewardlab.core.files import read_jsonl, sha256_file
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.run import build
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.files.rows import GoldRow, read_gold_rows
from rewardlab.gold.matching.built import marked
from rewardlab.gold.matching.columns import Part
from rewardlab.gold.matching.run import match_parts


def built(folder: Path, rows: list[GoldRow], **settings: object) -> tuple[list[GoldRow], Path]:
    """The rows as `gold build` keeps them beside its preferences, and their file."""
    write_rows(folder / "labels.jsonl", [row.as_json() for row in rows])
    inputs = InputConfig(input=(folder / "labels.jsonl",))
    build(BuildConfig(output_dir=folder / "pairs", inputs=inputs, test_fraction=0.0, near="none", **settings))
    kept = folder / "pairs" / "labels.train.jsonl"
    return list(read_gold_rows(kept, labelled=True)), kept


def named(found: Part) -> set[str]:
    """The marked pairs, as `gold build` names them."""
    own = found.replies
    assert found.built_N is not None
    places = zip(own.row_N, found.reply_R[own.first_N], found.reply_R[own.second_N], found.built_N, strict=True)
    return {f"{found.rows[row].id}#{first}-{second}" for row, first, second, is_built in places if is_built}


@pytest.mark.parametrize(
    "settings",
    [{"pairs": "best-worst"}, {"pairs": "random", "seed": 3}, {"pairs": "adjacent"}, {"min_margin": 4.0}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_marked_pairs_are_those_that_were_built(tmp_path: Path, settings: dict[str, object]) -> None:
    rows, file = built(tmp_path, drawn(rows=30, replies=5), **settings)
    found = marked(part(rows, scored(rows)), [file])
    assert named(found) == {row["id"] for _, row in read_jsonl(file.parent / "train.jsonl")}


@pytest.mark.parametrize(
    ("replies", "settings"), [(5, {"pairs": "all"}), (2, {"pairs": "best-worst"})], ids=["all", "two replies"]
)
def test_nothing_is_marked_where_all_pairs_were_built(
    tmp_path: Path, replies: int, settings: dict[str, object]
) -> None:
    rows, file = built(tmp_path, drawn(rows=30, replies=replies), **settings)
    assert marked(part(rows, scored(rows)), [file]).built_N is None


def test_nothing_is_marked_without_a_manifest_that_tells(tmp_path: Path) -> None:
    rows, file = built(tmp_path, drawn(rows=30, replies=5), pairs="best-worst")
    own = part(rows, scored(rows))
    assert marked(own, []).built_N is None
    assert marked(own, [tmp_path / "labels.jsonl"]).built_N is None, "there is no manifest beside it"
    manifest = file.parent / "manifest.json"
    told = json.loads(manifest.read_text(encoding="utf-8"))
    for other in ({**told, "tool": "another"}, {**told, "settings": {"pairs": "best-worst"}}, ["x"]):
        manifest.write_text(json.dumps(other), encoding="utf-8")
        assert marked(own, [file]).built_N is None
    manifest.write_text("{", encoding="utf-8")
    assert marked(own, [file]).built_N is None


def test_a_proxy_of_the_best_and_the_worst_is_not_said_to_be_scored_with_other_texts(tmp_path: Path) -> None:
    rows, file = built(tmp_path, drawn(rows=300, replies=6), pairs="best-worst")
    gold = np.array([row.gold for row in rows], dtype=float)
    scores = gold + np.random.default_rng(0).normal(0, 1.2 * gold.std(), gold.shape)
    own = part(rows, scores)
    run = facts(train_accuracy=sure(0.97), own_accuracy=sure(0.97))
    whole = match_parts(own, own, runs={"p0": run})
    assert findings(whole)["template and texts"].status == "fail", "what the run measured is far above all pairs"

    kept = marked(own, [file])
    matched = match_parts(kept, kept, runs={"p0": run})
    found = findings(matched)
    match = matched.test.built["p0"]
    assert match.value > matched.test.matches["p0"].agreement.match.value + 0.1
    assert found["template and texts"].status == "pass"
    assert "on the pairs that `gold build` made" in found["template and texts"].evidence
    assert found["training accuracy"].evidence.startswith(f"{match.value:.1%}")
    assert "pairs that were built alike" in found["generalisation"].evidence


@pytest.mark.parametrize("pairs", ["all", "best-worst"])
def test_losses_are_judged_by_what_soft_labels_allow(tmp_path: Path, pairs: str) -> None:
    rows, file = built(tmp_path, drawn(rows=300, replies=4), pairs=pairs, soft_tau=8.0)
    labels = [one["label"] for _, row in read_jsonl(file.parent / "train.jsonl") for one in row["comparisons"]]
    least = float(np.mean([-label * np.log(label) - (1 - label) * np.log(1 - label) for label in labels]))
    own = part(rows, scored(rows))
    kept = marked(own, [file])
    assert kept.least_loss == pytest.approx(least, abs=1e-9)
    assert 0.5 < least < 0.69, "below which the limits of certain labels lie"

    reached = sure(least + 0.005, 0.002)
    run = facts(end_loss=reached, epoch_loss=reached, dataset=(str(file.parent / "train.jsonl"),))
    names = ("loss at the end", "loss after an epoch")
    found = findings(match_parts(own, runs={"p0": run}))
    assert [found[name].status for name in names] == ["warn", "fail"]
    found = findings(match_parts(kept, runs={"p0": run}))
    assert [found[name].status for name in names] == ["pass", "pass"]
    assert f"no proxy gets below {least:.3g}" in found[names[0]].evidence
    nothing = replace(run, end_loss=sure(0.693, 0.001), epoch_loss=sure(0.693, 0.001))
    found = findings(match_parts(kept, runs={"p0": nothing}))
    assert [found[name].status for name in names] == ["warn", "fail"]

    # From another folder a relative name leads nowhere: what the file held is known.
    sums = frozenset({sha256_file(file.parent / "train.jsonl")})
    found = findings(match_parts(kept, runs={"p0": replace(run, dataset=("pairs/train.jsonl",), sums=sums)}))
    assert [found[name].status for name in names] == ["pass", "pass"]

    below = replace(run, end_loss=sure(0.05), epoch_loss=sure(0.05))
    elsewhere = replace(run, dataset=("elsewhere/train.jsonl",))
    for other in (elsewhere, replace(elsewhere, sums=sums | {"other"}), replace(run, dataset=()), below):
        found = findings(match_parts(kept, runs={"p0": other}))
        assert [found[name].status for name in names] == (["pass"] * 2 if other is below else ["warn", "fail"])
        assert not any("soft" in found[name].evidence for name in names), "its labels are not known to be these"


def test_labels_of_a_tiny_temperature_are_certain(tmp_path: Path) -> None:
    rows, file = built(tmp_path, drawn(rows=30), soft_tau=1e-9)
    assert marked(part(rows, scored(rows)), [file]).least_loss < 1e-40


def test_without_a_decided_pair_labels_have_no_least_loss(tmp_path: Path) -> None:
    rows, file = built(tmp_path, drawn(rows=30), soft_tau=1.0)
    own = part(rows, scored(rows))
    own.replies.decided_N[:] = False
    assert marked(own, [file]).least_loss == 0.0
