"""Laws of loading datasets: names find files, every row is accounted for, limits and splits are seeded."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import to_json
from rewardlab.core.types import Preference, prompt_key
from rewardlab.data.config import DataConfig
from rewardlab.data.readers import find_sources
from rewardlab.data.rows import CAUSES
from rewardlab.data.sources import LoadedPreferences, SourceReport, load_preferences, shared_prompts, split_by_prompt

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ALLOW_DROPS = {"max_drop_fraction": 1.0}

Row = Mapping[str, object]


def pair(k: int) -> dict[str, object]:
    return {"prompt": f"question {k}", "chosen": f"good {k}", "rejected": f"bad {k}"}


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def load(
    *names: Path | str, split: str = "train", seed: int = 0, limit: int | None = None, **settings: Any
) -> LoadedPreferences:
    config = DataConfig(**settings)
    return load_preferences([str(name) for name in names], split=split, config=config, seed=seed, limit=limit)


def contents(loaded: LoadedPreferences) -> list[tuple[str, str, str]]:
    return [(row.prompt[0].content, row.replies[0][0].content, row.replies[1][0].content) for row in loaded.preferences]


def ids(preferences: Sequence[Preference]) -> list[str]:
    return [preference.id for preference in preferences]


THREE = [pair(k) for k in range(3)]
THREE_CONTENTS = [(f"question {k}", f"good {k}", f"bad {k}") for k in range(3)]


class TestFiles:
    def test_jsonl_ids_are_file_and_line_and_empty_lines_do_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.jsonl"
        path.write_text(f"{json.dumps(pair(0))}\n\n{json.dumps(pair(1))}\n")
        loaded = load(path)
        assert ids(loaded.preferences) == ["pairs.jsonl:1", "pairs.jsonl:3"]
        assert {row.source for row in loaded.preferences} == {"pairs"}

    def test_every_format_of_file_gives_the_same_rows(self, tmp_path: Path) -> None:
        write(tmp_path / "a.jsonl", THREE)
        write(tmp_path / "b.jsonl.gz", THREE)
        (tmp_path / "c.json").write_text(json.dumps(THREE))
        (tmp_path / "d.json").write_text(json.dumps({name: [row[name] for row in THREE] for name in THREE[0]}))
        with (tmp_path / "e.csv").open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(THREE[0]))
            writer.writeheader()
            writer.writerows(THREE)
        for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json", "e.csv"):
            assert contents(load(tmp_path / name)) == THREE_CONTENTS, name

    def test_parquet_gives_the_same_rows(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in THREE]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
        loaded = load(tmp_path / "p.parquet")
        assert contents(loaded) == THREE_CONTENTS
        assert ids(loaded.preferences) == ["p.parquet:1", "p.parquet:2", "p.parquet:3"]

    def test_broken_parquet_is_an_error_with_the_file(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        (tmp_path / "p.parquet").write_bytes(b"PAR1 no table")
        with pytest.raises(DataError, match=r"p\.parquet: cannot be read as Parquet"):
            load(tmp_path / "p.parquet")

    def test_parquet_without_pyarrow_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        (tmp_path / "p.parquet").write_bytes(b"")
        with pytest.raises(DataError, match=r'needs the package pyarrow.*pip install "rewardlab\[hub\]"'):
            load(tmp_path / "p.parquet")

    def test_a_broken_json_line_is_an_error_with_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.jsonl"
        path.write_text(json.dumps(pair(0)) + '\n{"prompt": "Why?", "chos\n')
        with pytest.raises(DataError, match=r"pairs\.jsonl:2: not valid JSON"):
            load(path, **ALLOW_DROPS)

    def test_json_lines_named_json_are_an_error_with_the_remedy(self, tmp_path: Path) -> None:
        path = write(tmp_path / "pairs.json", THREE)
        with pytest.raises(DataError, match=r"pairs\.json: not valid JSON.*rename it to \.jsonl"):
            load(path)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"prompt": ["a"], "chosen": ["b", "c"]}, r"equal length; got prompt \(1\), chosen \(2\)"),
            ({"version": 1, "rows": []}, r"got version \(no list\), rows \(0\)"),
            ("text", "got a JSON str"),
            ([pair(0), 5], r"f\.json:2: row 2 is int"),
        ],
    )
    def test_json_that_is_no_table_is_an_error(self, tmp_path: Path, value: object, message: str) -> None:
        (tmp_path / "f.json").write_text(json.dumps(value))
        with pytest.raises(DataError, match=message):
            load(tmp_path / "f.json", **ALLOW_DROPS)

    def test_csv_cells_may_hold_line_breaks_and_ids_name_the_first_line(self, tmp_path: Path) -> None:
        path = tmp_path / "f.csv"
        path.write_text('prompt,chosen,rejected,label\n"Why,\nthough?",a,b,\nHow?,c,d,0.25\n')
        loaded = load(path)
        assert contents(loaded) == [("Why,\nthough?", "a", "b"), ("How?", "c", "d")]
        assert ids(loaded.preferences) == ["f.csv:2", "f.csv:4"]
        assert [row.comparisons[0].label for row in loaded.preferences] == [1.0, 0.25]

    def test_csv_cells_may_hold_lists_but_a_reply_in_brackets_is_text(self, tmp_path: Path) -> None:
        path = tmp_path / "k.csv"
        path.write_text('prompt,responses,scores\nWhy?,"[""a"", ""b""]","[1, 2]"\n')
        assert load(path).preferences[0].ranking == (1, 0)
        path = tmp_path / "f.csv"
        path.write_text('prompt,chosen,rejected\n"[{""role"": ""user"", ""content"": ""Why?""}]",[1],[x]\n')
        assert contents(load(path)) == [("Why?", "[1]", "[x]")]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompt,chosen,rejected\na,b,c\na,b,c,d\n", r"f\.csv:3: 4 cells"),
            ('prompt\n"a" b\n', r"f\.csv:2: not valid"),
        ],
    )
    def test_broken_csv_is_an_error_with_file_and_line(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "f.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            load(tmp_path / "f.csv", **ALLOW_DROPS)

    def test_a_long_csv_cell_is_read_and_the_limit_of_the_csv_module_restored(self, tmp_path: Path) -> None:
        before = csv.field_size_limit()
        (tmp_path / "f.csv").write_text(f"prompt,chosen,rejected\nWhy?,{'x' * (before + 1)},b\n")
        assert len(load(tmp_path / "f.csv").preferences[0].replies[0][0].content) == before + 1
        assert csv.field_size_limit() == before

    @pytest.mark.parametrize(
        ("name", "text"), [("f.jsonl", "\n"), ("f.json", "[]"), ("f.csv", "prompt,chosen\n"), ("g.csv", "")]
    )
    def test_a_file_without_rows_is_an_error(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=rf"{name}: no rows"):
            load(tmp_path / name)

    def test_unknown_columns_are_an_error_with_file_line_and_columns(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.jsonl", [{"question": "a", "better": "b"}])
        with pytest.raises(DataError, match=r"f\.jsonl:1: the columns 'question', 'better'.*prompt, chosen, rejected"):
            load(path)


class TestNames:
    def test_a_folder_holds_splits(self, tmp_path: Path) -> None:
        write(tmp_path / "hh" / "train.jsonl", [pair(0)])
        write(tmp_path / "hh" / "test.jsonl.gz", [pair(1)])
        loaded = load(tmp_path / "hh", split="test")
        assert contents(loaded) == [THREE_CONTENTS[1]]
        assert (loaded.reports[0].name, loaded.reports[0].split) == ("hh", "test")
        assert ids(loaded.preferences) == ["test.jsonl.gz:1"]

    @pytest.mark.parametrize("name", ["hh", "hh_raw.helpful-base"])
    def test_the_beginning_of_a_path_finds_the_split(self, tmp_path: Path, name: str) -> None:
        write(tmp_path / f"{name}.train.jsonl.gz", [pair(0)])
        write(tmp_path / f"{name}.test.jsonl.gz", [pair(1)])
        loaded = load(tmp_path / name)
        assert contents(loaded) == [THREE_CONTENTS[0]]
        assert (loaded.reports[0].name, loaded.reports[0].split) == (name, "train")

    def test_a_relative_name_is_looked_for_here_before_the_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "dev" / "hh.train.jsonl", [pair(0)])
        assert ids(load("dev/hh").preferences) == ids(load("./dev/hh").preferences) == ["hh.train.jsonl:1"]

    def test_a_file_is_taken_whatever_the_split_and_says_its_own(self, tmp_path: Path) -> None:
        write(tmp_path / "hh.test.jsonl", [pair(0)])
        report = load(tmp_path / "hh.test.jsonl", split="train").reports[0]
        assert (report.name, report.split) == ("hh", "test")

    def test_files_of_one_name_are_told_apart_by_their_folders(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / folder / "hh.train.jsonl", [pair(0)]) for folder in ("a", "b")]
        loaded = load(*paths)
        assert ids(loaded.preferences) == ["a/hh.train.jsonl:1", "b/hh.train.jsonl:1"]
        assert [report.name for report in loaded.reports] == ["a/hh", "b/hh"]
        folders = [write(tmp_path / folder / "train.jsonl", [pair(0)]).parent for folder in ("c", "d")]
        assert [report.name for report in load(*folders).reports] == ["c", "d"]

    def test_splits_of_one_dataset_loaded_together_have_names_of_their_own(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / f"hh.{split}.jsonl", [pair(0)]) for split in ("train", "test")]
        assert [report.name for report in load(*paths).reports] == ["hh.train.jsonl", "hh.test.jsonl"]

    def test_a_dataset_named_twice_is_an_error(self, tmp_path: Path) -> None:
        path = write(tmp_path / "hh.train.jsonl", [pair(0)])
        with pytest.raises(DataError, match=r"hh\.train\.jsonl is named 2 times"):
            load(path, tmp_path / "hh")

    def test_a_link_keeps_its_own_name_but_is_the_file_it_points_to(self, tmp_path: Path) -> None:
        blob = write(tmp_path / "blobs" / "0a1b.jsonl", [pair(0)])
        (tmp_path / "hh").mkdir()
        link = tmp_path / "hh" / "train.jsonl"
        link.symlink_to(blob)
        assert load(tmp_path / "hh").reports[0].name == "hh"
        with pytest.raises(DataError, match="is named 2 times"):
            load(link, blob)

    def test_no_name_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="--dataset"):
            load()

    def test_a_name_that_fits_two_files_is_an_error(self, tmp_path: Path) -> None:
        write(tmp_path / "hh.train.jsonl", [pair(0)])
        write(tmp_path / "hh" / "train.jsonl", [pair(0)])
        with pytest.raises(DataError, match=r"could be .*train\.jsonl or .*hh\.train\.jsonl"):
            load(tmp_path / "hh")

    @pytest.mark.parametrize(
        "wrong", ["hh_helpfull", "hh_helpful.trian.jsonl", "hh_helpful.csv", "hh_helpful", "hh_helpfull.test.jsonl"]
    )
    def test_a_path_that_is_not_there_is_an_error_with_near_names(self, tmp_path: Path, wrong: str) -> None:
        write(tmp_path / "hh_helpful.train.jsonl", [pair(0)])
        write(tmp_path / "unlike.train.jsonl", [pair(0)])
        with pytest.raises(DataError, match=r"no such file\. Looked for") as caught:
            load(tmp_path / wrong, split="test")
        assert "hh_helpful.train.jsonl" in str(caught.value)
        assert "unlike" not in str(caught.value)

    def test_a_folder_without_the_split_is_an_error_with_its_files(self, tmp_path: Path) -> None:
        for k in range(10):
            write(tmp_path / f"part{k}.jsonl", [pair(0)])
        with pytest.raises(DataError, match=r"train\.\*.*part0\.jsonl.*and 2 more"):
            load(tmp_path)

    def test_an_unknown_extension_is_an_error_with_the_known_ones(self, tmp_path: Path) -> None:
        (tmp_path / "pairs.txt").write_text("a")
        with pytest.raises(DataError, match=r"pairs\.txt: unknown extension.*\.jsonl\.gz"):
            load(tmp_path / "pairs.txt")


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None, str]]:
        """A stand-in for `datasets` that records what is asked and knows one dataset."""
        asked: list[tuple[str, str | None, str]] = []

        def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, object]]:
            asked.append((name, configuration, split))
            if name != "org/known":
                raise ConnectionError("Couldn't reach it\nand more")
            return THREE

        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return asked

    def test_other_names_are_asked_of_the_hub(self, hub: list[tuple[str, str | None, str]]) -> None:
        loaded = load("org/known:small", split="validation")
        assert hub == [("org/known", "small", "validation")]
        assert contents(loaded) == THREE_CONTENTS
        assert ids(loaded.preferences)[0] == "org/known:small[validation]:1"
        report = loaded.reports[0]
        assert (report.name, report.split, report.sha256) == ("org/known:small", "validation", None)
        assert contents(load("org/known")) == THREE_CONTENTS
        assert hub[-1] == ("org/known", None, "train")

    def test_a_hub_that_does_not_answer_is_an_error_with_what_to_do(self, hub: list[object]) -> None:
        with pytest.raises(DataError, match=r"'org/unknown', split 'train'.*Couldn't reach it\).*local path"):
            load("org/unknown")
        assert len(hub) == 1

    def test_without_datasets_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r'org/known.*needs the package datasets.*pip install "rewardlab\[hub\]"'):
            load("org/known")

    @pytest.mark.parametrize("name", ["./org/known", "org/known.jsonl", "a/b/c", "~/known", "near/hh_helpfull"])
    def test_what_looks_like_a_path_is_not_asked_of_the_hub(self, hub: list[object], tmp_path: Path, name: str) -> None:
        write(tmp_path / "near" / "hh_helpful.train.jsonl", [pair(0)])
        with pytest.raises(DataError, match="no such file"):
            load(name)
        assert not hub


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
            "rows_read": 3,
            "kept": 1,
            "dropped": {"bad_label": 2},
            "examples": {
                "bad_label": [f"f.jsonl:{line}: label is 2, wanted a finite number from 0 to 1" for line in (2, 3)]
            },
            "skipped_ties": 0,
            "skipped_identical": 0,
            "unused_by_limit": 0,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }

    def test_a_report_that_does_not_add_up_cannot_be_made(self) -> None:
        with pytest.raises(AssertionError):
            SourceReport(
                name="f", split="train", rows_read=3, kept=1, dropped={"bad_label": 1}, examples={},
                skipped_ties=0, skipped_identical=0, unused_by_limit=0, sha256=None,
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
                [str(path)], split="train", config=DataConfig(), seed=0, limit=None, kwise_loss="plackett-luce"
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


def preferences_on(prompts: Sequence[int], folder: Path) -> tuple[Preference, ...]:
    rows = [{**pair(prompt), "chosen": f"good {k}"} for k, prompt in enumerate(prompts)]
    return load(write(folder / "f.jsonl", rows)).preferences


class TestSplit:
    @given(
        prompts=st.lists(st.integers(0, 12), min_size=2, max_size=40).filter(lambda drawn: len(set(drawn)) > 1),
        fraction=st.floats(0, 0.5),
        seed=st.integers(0, 3),
    )
    @settings(max_examples=40, deadline=None)
    def test_sides_share_no_prompt_and_lose_no_row(
        self, tmp_path_factory: pytest.TempPathFactory, prompts: list[int], fraction: float, seed: int
    ) -> None:
        rows = preferences_on(prompts, tmp_path_factory.mktemp("rows"))
        train, held_out = split_by_prompt(rows, fraction=fraction, seed=seed)
        assert shared_prompts(train, held_out) == set()
        assert sorted(ids([*train, *held_out])) == sorted(ids(rows))
        assert [row for row in rows if row in set(train)] == list(train)
        expected = max(1, round(fraction * len(set(prompts)))) if fraction else 0
        assert len({row.key for row in held_out}) == expected

    def test_it_depends_on_seed_and_prompts_and_not_on_the_order_of_rows(self, tmp_path: Path) -> None:
        rows = preferences_on(range(40), tmp_path)
        _, held_out = split_by_prompt(rows, fraction=0.2, seed=0)
        assert set(split_by_prompt(rows[::-1], fraction=0.2, seed=0)[1]) == set(held_out)
        assert set(split_by_prompt(rows, fraction=0.2, seed=1)[1]) != set(held_out)

    def test_prompts_that_differ_in_case_and_space_stay_together(self, tmp_path: Path) -> None:
        rows = [{**pair(k), "prompt": prompt} for k, prompt in enumerate(["Why?", " why? ", "How?"])]
        _, held_out = split_by_prompt(load(write(tmp_path / "f.jsonl", rows)).preferences, fraction=0.5, seed=0)
        assert len({row.key for row in held_out}) == 1

    @pytest.mark.parametrize(("prompts", "fraction"), [([0, 0, 0], 0.1), ([0, 1], 1.0), ([0, 1], 0.9)])
    def test_leaving_nothing_to_train_on_is_an_error(self, tmp_path: Path, prompts: list[int], fraction: float) -> None:
        with pytest.raises(DataError, match=r"nothing to train on.*--eval-dataset.*--eval-fraction"):
            split_by_prompt(preferences_on(prompts, tmp_path), fraction=fraction, seed=0)

    def test_shared_prompts_are_the_keys_on_both_sides(self, tmp_path: Path) -> None:
        rows = preferences_on([0, 1, 2], tmp_path)
        assert shared_prompts(rows[:2], rows[1:]) == {rows[1].key} == {prompt_key(rows[1].prompt)}


def test_local_data_is_read_without_torch_transformers_or_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", THREE)
    code = (
        "import sys; from rewardlab.data.sources import load_preferences; "
        "from rewardlab.data.config import DataConfig; "
        f"load_preferences([{str(path)!r}], split='train', config=DataConfig(), seed=0, limit=None); "
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

    def test_train_and_test_share_no_prompt(self) -> None:
        for name in ("hh_helpful", "webgpt", "ukp_args_balanced"):
            sides = [load(SHARED_DATA / "dev" / name, split=split).preferences for split in ("train", "test")]
            assert shared_prompts(*sides) == set()

    def test_several_datasets_have_names_of_their_own(self) -> None:
        sources = find_sources([str(SHARED_DATA / "dev" / name) for name in ("hh_helpful", "hh_harmless")], "train")
        assert [source.name for source in sources] == ["hh_helpful", "hh_harmless"]
