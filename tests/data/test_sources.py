"""Laws of loading datasets: every row is accounted for, limits and splits are seeded."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import SHARED
from harness.in_memory import LoadedPreferences, load_preferences
from loading import ALLOW_DROPS, THREE, THREE_CONTENTS, Row, contents, ids, load, pair, write
from rewardlab.core.errors import DataError
from rewardlab.core.files import to_json
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.rows import CAUSES
from rewardlab.data.splits import Texts, count_shared
from rewardlab.data.tally import SourceReport

SHARED_DATA = SHARED / "data"
SIDES = ("train", "test")

BAD_ROWS: dict[str, Row] = {
    "missing_field": {"prompt": "Why?", "chosen": "a"},
    "reply_not_text": {"prompt": "Why?", "chosen": 1, "rejected": "b"},
    "empty_reply": {"prompt": "Why?", "chosen": "a", "rejected": " "},
    "identical_replies": {"prompt": "Why?", "chosen": "a", "rejected": "a "},
    "empty_prompt": {"prompt": "", "chosen": "a", "rejected": "b"},
    "bad_label": {"prompt": "Why?", "chosen": "a", "rejected": "b", "label": 2},
    "bad_strength": {"prompt": "Why?", "chosen": "a", "rejected": "b", "strength": -1},
    "bad_roles": {"prompt": [{"role": "x", "content": "Why?"}], "chosen": "a", "rejected": "b"},
}


class TestAccount:
    @given(causes=st.lists(st.sampled_from([None, *BAD_ROWS]), min_size=1, max_size=30))
    @settings(max_examples=60, deadline=None)
    def test_kept_and_dropped_are_what_was_read_each_for_its_cause(
        self, tmp_path_factory: pytest.TempPathFactory, causes: list[str | None]
    ) -> None:
        rows = [pair(0), *(pair(k) if cause is None else BAD_ROWS[cause] for k, cause in enumerate(causes, 1))]
        path = write(tmp_path_factory.mktemp("rows") / "f.jsonl", rows)
        loaded = load(path, **ALLOW_DROPS)
        (report,) = loaded.reports
        expected = [cause for cause in causes if cause]
        assert report.rows_read == len(rows)
        assert report.kept == len(loaded.preferences) == len(rows) - len(expected)
        assert dict(report.dropped) == {cause: expected.count(cause) for cause in expected}
        for cause, places in report.examples.items():
            lines = [f"f.jsonl:{number}: " for number, name in enumerate(causes, 2) if name == cause][:3]
            assert [place[: len(line)] for place, line in zip(places, lines, strict=True)] == lines

    @given(roles=st.lists(st.lists(st.sampled_from(["chosen", "rejected"]), min_size=1, max_size=3), max_size=8))
    @settings(max_examples=40, deadline=None)
    def test_long_form_data_is_counted_in_pairs(
        self, tmp_path_factory: pytest.TempPathFactory, roles: list[list[str]]
    ) -> None:
        rows = [
            {"pair_id": k, "role": role, "prompt": "Why?", "response": role}
            for k, sides in enumerate([["chosen", "rejected"], *roles])
            for role in sides
        ]
        rows.sort(key=lambda row: str(row["role"]))  # the sides of a pair are far apart
        path = write(tmp_path_factory.mktemp("rows") / "f.jsonl", rows)
        loaded = load(path, **ALLOW_DROPS)
        (report,) = loaded.reports
        complete = 1 + sum(sorted(sides) == ["chosen", "rejected"] for sides in roles)
        assert (report.rows_read, report.kept) == (1 + len(roles), complete)
        assert report.dropped.get("incomplete_pair", 0) == 1 + len(roles) - complete

    def test_the_report_is_json_and_names_the_bytes_read(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.jsonl", [pair(0), BAD_ROWS["bad_label"], BAD_ROWS["bad_label"]])
        report = load(path, **ALLOW_DROPS).reports[0]
        assert json.loads(to_json(report.as_dict())) == {
            "name": "f",
            "split": "all rows",
            "format": "pairs, by the columns prompt, chosen, rejected",
            "rows_read": 3,
            "kept": 1,
            "dropped": {"bad_label": 2},
            "examples": {
                "bad_label": [f"f.jsonl:{line}: label is 2, wanted a finite number from 0 to 1" for line in (2, 3)]
            },
            "skipped_ties": 0,
            "skipped_identical": 0,
            "skipped": {},
            "left_out_replies": {},
            "labelled": 0,
            "swapped": 0,
            "second_preferred": 0,
            "json_texts": 0,
            "system_turns": 0,
            "scripts": {"Latin": 1},
            "unused_by_limit": 0,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }

    def test_a_report_that_does_not_add_up_cannot_be_made(self) -> None:
        with pytest.raises(AssertionError):
            SourceReport(
                name="f", split="train", rows_read=3, kept=1, dropped={"bad_label": 1}, examples={},
                skipped_ties=0, skipped_identical=0, labelled=0, swapped=0, unused_by_limit=0, sha256=None,
            )  # fmt: skip

    def test_ties_and_identical_replies_of_kwise_rows_are_counted(self, tmp_path: Path) -> None:
        row = {"prompt": "Why?", "responses": ["a", "b", "c", "c"], "scores": [1, 1, 2, 3]}
        report = load(write(tmp_path / "k.jsonl", [row, row])).reports[0]
        assert (report.kept, report.skipped_ties, report.skipped_identical) == (2, 2, 2)

    def test_no_usable_row_is_an_error_with_causes_counts_and_places(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.jsonl", [BAD_ROWS["bad_label"], BAD_ROWS["empty_reply"], BAD_ROWS["bad_label"]])
        with pytest.raises(DataError, match=r"f\.jsonl: none of the 3 rows") as caught:
            load(path, **ALLOW_DROPS)
        message = str(caught.value)
        assert f"bad_label: 2 ({CAUSES['bad_label']}), for example f.jsonl:1: label is 2" in message
        assert "empty_reply: 1" in message
        assert "f.jsonl:3" in message

    @pytest.mark.parametrize("num_good", [71, 93])
    def test_too_many_dropped_rows_are_an_error_whose_remedy_works(self, tmp_path: Path, num_good: int) -> None:
        rows = [pair(k) for k in range(num_good)] + [BAD_ROWS["bad_label"]] * (100 - num_good)
        path = write(tmp_path / "f.jsonl", rows)
        with pytest.raises(DataError, match=rf"f\.jsonl: {100 - num_good} of 100 rows.*") as caught:
            load(path)
        message = str(caught.value)
        assert f"f.jsonl:{num_good + 1}: label is 2" in message
        allowed = float(message.rpartition("--max-drop-fraction ")[2].rstrip("."))
        assert load(path, max_drop_fraction=allowed).reports[0].kept == num_good

    def test_the_allowed_share_itself_may_be_dropped(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.jsonl", [*(pair(k) for k in range(19)), BAD_ROWS["bad_label"]])
        assert load(path, max_drop_fraction=0.05).reports[0].kept == 19
        with pytest.raises(DataError, match="--max-drop-fraction"):
            load(path, max_drop_fraction=0.0)

    def test_plackett_luce_is_handed_on(self, tmp_path: Path) -> None:
        path = write(tmp_path / "k.jsonl", [{"prompt": "Why?", "responses": ["a", "b", "c"], "scores": [1, 1, 2]}])
        with pytest.raises(DataError, match=r"^k\.jsonl:1: .*Plackett-Luce"):
            load_preferences(
                [str(path)], split="train", reading=ReadingConfig(), seed=0, limit=None, kwise_loss="plackett-luce"
            )


class TestLimit:
    def test_it_draws_by_seed_and_dataset_and_reports_the_rest(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / f"{name}.jsonl", [pair(k) for k in range(50)]) for name in ("a", "b")]
        loaded = load(*paths, limit=10)
        assert [(report.kept, report.unused_by_limit) for report in loaded.reports] == [(50, 40), (50, 40)]
        drawn = contents(loaded)
        assert len(drawn) == 20
        assert drawn[:10] != drawn[10:]
        assert load(*paths, limit=10) == loaded
        assert load(*paths, limit=10, seed=1).preferences != loaded.preferences
        assert drawn[:10] != contents(load(paths[0]))[:10]

    def test_a_smaller_limit_is_the_beginning_of_a_larger_one(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [pair(k) for k in range(50)])
        many = load(path, limit=100).preferences
        assert load(path, limit=7).preferences == many[:7]
        assert sorted(ids(many)) == sorted(ids(load(path).preferences))

    def test_without_it_rows_are_in_the_order_of_the_file(self, tmp_path: Path) -> None:
        assert contents(load(write(tmp_path / "a.jsonl", THREE))) == THREE_CONTENTS


def test_local_data_is_read_without_torch_transformers_or_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", THREE)
    code = (
        "import sys; from rewardlab.data.config import ReadingConfig; from rewardlab.data.judgements import Rules; "
        "from rewardlab.data.finding import find_sources; from rewardlab.data.sources import open_units, parse_units; "
        f"(source,) = find_sources([{str(path)!r}], 'train'); "
        "rules = Rules(source='f', reading=ReadingConfig(), seed=0); schema, units = open_units(source, rules); "
        "found, tally = parse_units(units, source=source, schema=schema, rules=rules); assert tally.kept == 3; "
        "sys.exit(','.join({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)) or 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def meanings(loaded: LoadedPreferences) -> set[tuple[str, ...]]:
    """Prompt key and replies of every row, in no order."""
    return {(row.key, *(reply[-1].content for reply in row.replies)) for row in loaded.preferences}


@pytest.mark.shared_data
class TestRealData:
    @pytest.fixture(autouse=True)
    def _present(self) -> None:
        if not SHARED_DATA.is_dir():
            pytest.skip(f"the preference data is not at {SHARED_DATA}")

    def test_hh_transcripts_mean_what_the_cleaned_pairs_say(self) -> None:
        for raw, cleaned in [("hh_raw.helpful-base", "hh_helpful"), ("hh_raw.harmless-base", "hh_harmless")]:
            first, second = (load(SHARED_DATA / "dev" / name, split="test") for name in (raw, cleaned))
            assert meanings(first) == meanings(second)

    @pytest.mark.parametrize("name", ["fast/pairs_200.jsonl", "fast/hh_raw_40.jsonl", "fast/kwise_32.jsonl"])
    def test_the_quick_files_are_kept_whole(self, name: str) -> None:
        loaded = load(SHARED_DATA / name, max_drop_fraction=0.0)
        assert loaded.reports[0].kept == loaded.reports[0].rows_read == len(set(ids(loaded.preferences)))

    def test_rows_of_equal_scores_are_the_only_ones_dropped_of_kwise_qa_feedback(self) -> None:
        report = load(SHARED_DATA / "dev" / "kwise.qa_feedback").reports[0]
        assert set(report.dropped) == {"no_comparison"}
        assert (report.name, report.split) == ("kwise.qa_feedback", "train")

    @pytest.mark.slow
    def test_train_and_test_share_no_prompt(self) -> None:
        for name in ("hh_helpful", "webgpt", "ukp_args_balanced"):
            train, test = (Texts.of(load(SHARED_DATA / "dev" / name, split=part).preferences) for part in SIDES)
            assert count_shared(test, train)["prompts"] == 0

    def test_several_datasets_have_names_of_their_own(self) -> None:
        sources = find_sources([str(SHARED_DATA / "dev" / name) for name in ("hh_helpful", "hh_harmless")], "train")
        assert [source.name for source in sources] == ["hh_helpful", "hh_harmless"]
