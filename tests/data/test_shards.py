"""Laws of datasets of several files: in order, complete, one dataset with one name."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from loading import THREE, THREE_CONTENTS, contents, ids, load, pair, settings_of_run, write
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.data.dataset_names import all_named
from rewardlab.data.finding import find_sources
from rewardlab.data.readers import fingerprint

datasets.disable_progress_bars()


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    """A Parquet file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


class TestNumberedFiles:
    @pytest.mark.parametrize("inside", ["", "data"])
    @pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
    def test_the_files_of_a_split_are_one_dataset_in_their_order(
        self, tmp_path: Path, inside: str, ending: str
    ) -> None:
        # The folder lists the last file first, and another split beside it.
        for number in (2, 0, 1):
            path = tmp_path / "hh" / inside / f"train-{number:05}-of-00003.{ending}"
            (parquet if ending == "parquet" else write)(path, [pair(number)])
        write(tmp_path / "hh" / inside / "test-00000-of-00001.jsonl", [pair(9)])
        loaded = load(tmp_path / "hh")
        assert contents(loaded) == THREE_CONTENTS
        assert (loaded.reports[0].name, loaded.reports[0].split) == ("hh", "train")
        assert ids(loaded.preferences) == [f"train-*-of-00003.{ending}:{number}" for number in (1, 2, 3)]
        assert contents(load(tmp_path / "hh", split="test")) == [("question 9", "good 9", "bad 9")]

    def test_numbers_alone_are_files_of_the_split_that_their_folder_is_named_for(self, tmp_path: Path) -> None:
        for number in range(11):
            write(tmp_path / "hh" / "train" / f"{number}.jsonl", [pair(number)])
        loaded = load(tmp_path / "hh")
        assert [content[0] for content in contents(loaded)] == [f"question {number}" for number in range(11)]
        assert (loaded.reports[0].name, loaded.preferences[0].id) == ("hh", "train/*.jsonl:1")

    def test_missing_files_are_an_error_with_their_numbers(self, tmp_path: Path) -> None:
        write(tmp_path / "hh" / "train-00001-of-00003.jsonl", [pair(1)])
        with pytest.raises(DataError, match=r"of the 3 files of the split 'train', numbered from 0, 0, 2 are missing"):
            load(tmp_path / "hh")

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("train/1.jsonl", "train/part-1.jsonl"), r"1\.jsonl and part-1\.jsonl both have the number 1"),
            (("train/01.jsonl", "train/1.jsonl"), r"01\.jsonl and 1\.jsonl both have the number 1"),
            (("train-0-of-1.jsonl", "train-00000-of-00001.jsonl"), r"both have the number 0, so one of them would be"),
            (("train-0-of-1.jsonl", "train-0-of-1-8a.jsonl"), r"both have the number 0.*Remove or renumber one"),
            (("train/0000.jsonl", "train/0002.jsonl"), r"of the 3 files of the split 'train'.* 1 is missing"),
            (("train/1.jsonl", "train/3.jsonl"), r"of the 3 files of the split 'train', numbered from 1, 2 is missing"),
            (("train/0007.jsonl",), r"numbered from 0, 0, 1, 2, 3, 4 and 2 more are missing"),
            ((f"train/{10**80}.jsonl",), r"numbered from 0, 0, 1, 2, 3, 4 and 9+5 more are missing"),
            (("train/0000.jsonl", "train/extra.csv"), r"train: extra\.csv would be left out.*move the others away"),
            (("train-0-of-1.jsonl", "train-1-of-1.jsonl"), r"all there, and train-1-of-1\.jsonl would be left out"),
            (("train-0-of-0.jsonl",), r"the 0 files .* train-0-of-0\.jsonl would be left out"),
        ],
    )
    def test_no_numbered_file_is_left_out_without_a_word(
        self, tmp_path: Path, names: tuple[str, ...], message: str
    ) -> None:
        for number, name in enumerate(names):
            write(tmp_path / "hh" / name, [pair(number)])
        with pytest.raises(DataError, match=message):
            load(tmp_path / "hh")

    def test_numbers_by_hand_begin_with_1_and_what_holds_no_rows_may_lie_beside_them(self, tmp_path: Path) -> None:
        for number in (1, 2):
            write(tmp_path / "hh" / "train" / f"{number}.jsonl", [pair(number)])
        (tmp_path / "hh" / "train" / "README.md").write_text("two files")
        (tmp_path / "hh" / "train" / "dataset_info.json").write_text("{}")
        assert [content[0] for content in contents(load(tmp_path / "hh"))] == ["question 1", "question 2"]

    def test_names_of_older_repositories_of_the_hub_have_a_hash(self, tmp_path: Path) -> None:
        for number, sha in enumerate(("8349d0765e6718df", "0b4f2a")):
            parquet(tmp_path / "hh" / "data" / f"train-0000{number}-of-00002-{sha}.parquet", [pair(number)])
        loaded = load(tmp_path / "hh")
        assert [content[0] for content in contents(loaded)] == ["question 0", "question 1"]
        assert (loaded.reports[0].name, loaded.reports[0].split) == ("hh", "train")
        assert ids(loaded.preferences)[0] == "train-*-of-00002-*.parquet:1"

    def test_two_kinds_of_files_are_an_error(self, tmp_path: Path) -> None:
        write(tmp_path / "hh" / "train-0-of-1.jsonl", [pair(1)])
        write(tmp_path / "hh" / "train.jsonl", [pair(1)])
        with pytest.raises(DataError, match=r"could be .*train\.jsonl or .*train-\*-of-1\.jsonl"):
            load(tmp_path / "hh")

    def test_an_error_in_a_file_names_that_file(self, tmp_path: Path) -> None:
        write(tmp_path / "hh" / "train-0-of-2.jsonl", [pair(0)])
        (tmp_path / "hh" / "train-1-of-2.jsonl").write_text("{\n")
        with pytest.raises(DataError, match=r"train-1-of-2\.jsonl:1: not valid JSON"):
            load(tmp_path / "hh")

    def test_the_fingerprint_changes_with_any_of_the_files(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "hh" / f"train-{number}-of-2.jsonl", [pair(number)]) for number in (0, 1)]
        (source,) = find_sources([str(tmp_path / "hh")], "train")
        before = fingerprint(source)
        assert fingerprint(source) == before
        write(paths[1], [pair(7)])
        assert fingerprint(source) != before


class TestSavedFolders:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """A folder of `DatasetDict.save_to_disk`, in several files a split."""
        sides = {"train": datasets.Dataset.from_list(THREE), "test": datasets.Dataset.from_list([pair(9)])}
        datasets.DatasetDict(sides).save_to_disk(tmp_path / "hh", num_shards={"train": 2, "test": 1})
        return tmp_path / "hh"

    def test_a_saved_dictionary_holds_splits(self, saved: Path) -> None:
        loaded = load(saved)
        assert contents(loaded) == THREE_CONTENTS
        assert (loaded.reports[0].name, loaded.reports[0].split) == ("hh", "train")
        assert ids(loaded.preferences)[0] == "hh/train:1"
        assert contents(load(saved, split="test")) == [("question 9", "good 9", "bad 9")]
        with pytest.raises(DataError, match=r"no such file\. .*hh holds the splits train, test"):
            load(saved, split="dev")

    def test_a_table_of_a_saved_dataset_is_answered_with_its_folder(self, saved: Path) -> None:
        table = sorted((saved / "train").glob("*.arrow"))[0]
        with pytest.raises(DataError, match=rf"unknown extension\. .* name its folder, {saved / 'train'}\."):
            load(table)

    def test_a_saved_dataset_is_read_whatever_the_split_and_has_no_others(self, tmp_path: Path) -> None:
        rows = [{"prompt": [{"role": "user", "content": "Why?"}], "chosen": "a", "rejected": "b"}]
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
        loaded = load(tmp_path / "one", split="test")
        assert contents(loaded) == [("Why?", "a", "b")]
        assert (loaded.reports[0].name, loaded.reports[0].split) == ("one", "all rows")
        with pytest.raises(ConfigError, match="is one file and has no splits"):
            all_named(settings_of_run(tmp_path / "one", eval_split="test").data)

    def test_the_fingerprint_changes_with_the_content(self, saved: Path) -> None:
        (source,) = find_sources([str(saved)], "train")
        before = fingerprint(source)
        table = sorted((saved / "train").glob("*.arrow"))[-1]
        table.write_bytes(table.read_bytes()[:-1] + b"x")
        assert fingerprint(source) != before

    @pytest.mark.parametrize("harm", ["cut", "gone", "no description", "other description"])
    def test_a_damaged_folder_is_one_clear_sentence(self, saved: Path, harm: str) -> None:
        folder = saved / "train"
        table = sorted(folder.glob("*.arrow"))[-1]
        if harm == "cut":
            table.write_bytes(table.read_bytes()[:200])
        elif harm == "gone":
            table.unlink()
        elif harm == "no description":
            (folder / "state.json").write_text("{}")
        else:
            (folder / "state.json").write_text("[")
        with pytest.raises(DataError, match=r"train: cannot be read as a dataset that was saved, after row \d"):
            load(saved)

    def test_without_the_package_the_error_says_what_to_install(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(DataError, match=r'needs the package datasets.*pip install "rewardlab\[hub\]"'):
            load(saved)

    def test_a_copy_is_the_same_dataset(self, saved: Path, tmp_path: Path) -> None:
        shutil.copytree(saved, tmp_path / "copy")
        here, there = find_sources([str(saved), str(tmp_path / "copy")], "train")
        assert fingerprint(here) == fingerprint(there)
        assert (here.name, there.name) == ("hh", "copy")
