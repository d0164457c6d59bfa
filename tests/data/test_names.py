"""Laws of naming datasets: names find files before the hub is asked, and what is not there is named with what is."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path, PurePath

import pytest

from loading import THREE, THREE_CONTENTS, contents, ids, load, pair, write
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.data.finding import find_sources


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

    def test_a_name_that_begins_like_a_home_folder_of_nobody_is_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "~nobody.train.jsonl", [pair(0)])
        assert ids(load("~nobody.train.jsonl").preferences) == ["~nobody.train.jsonl:1"]

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

    @pytest.mark.parametrize("behind", ["#100", ":train", "[:10]", ":nan"])
    def test_what_stands_behind_a_file_that_is_there_is_told(self, tmp_path: Path, behind: str) -> None:
        path = write(tmp_path / "pairs.jsonl", [pair(0)])
        with pytest.raises(
            DataError, match=rf"is there, and '{re.escape(behind)}' is no part of its name\. Name .*alone"
        ):
            load(f"{path}{behind}")
        with pytest.raises(DataError, match="no such file"):
            load(f"{tmp_path}/other.jsonl{behind}")

    def test_an_unknown_extension_is_an_error_with_the_known_ones(self, tmp_path: Path) -> None:
        (tmp_path / "pairs.txt").write_text("a")
        with pytest.raises(DataError, match=r"pairs\.txt: unknown extension.*\.jsonl\.gz"):
            load(tmp_path / "pairs.txt")

    @pytest.mark.parametrize("name", ["data", "data/train.json.gz", "name"])
    def test_a_compressed_file_that_is_not_read_is_an_error_with_what_to_do(self, tmp_path: Path, name: str) -> None:
        for file in ("data/train.json.gz", "name.train.json.gz"):
            write(tmp_path / file, [pair(0)])
        with pytest.raises(DataError, match=r"train\.json\.gz.*unpack it first, or name it \.jsonl\.gz if every line"):
            load(tmp_path / name)


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


def test_a_folder_of_configurations_names_them(tmp_path: Path) -> None:
    for name, file in (("helpful", "train.jsonl"), ("harmless", "train-00000-of-00001.jsonl"), ("notes", "a.txt")):
        (tmp_path / "hh" / name).mkdir(parents=True)
        (tmp_path / "hh" / name / file).write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(DataError, match=r"has folders with one: harmless, helpful\. Name one, such as .*hh/harmless\."):
        find_sources([str(tmp_path / "hh")], "train")
    with pytest.raises(DataError, match=r"no such file\. Looked for"):
        find_sources([str(tmp_path / "hh")], "test")


def test_very_many_files_are_told_apart_without_comparing_each_with_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for number in range(300):
        path = tmp_path / f"folder{number // 3}" / ("same.jsonl" if number % 3 == 0 else f"part-{number}.jsonl")
        path.parent.mkdir(exist_ok=True)
        path.touch()
        names.append(str(path))
    divided, parts = 0, PurePath.parts

    def counted(path: PurePath) -> tuple[str, ...]:
        nonlocal divided
        divided += 1
        return parts.fget(path)

    monkeypatch.setattr(PurePath, "parts", property(counted))
    labels = [source.label for source in find_sources(names, "train")]
    assert divided <= 10 * len(names)
    assert labels[:4] == ["folder0/same.jsonl", "part-1.jsonl", "part-2.jsonl", "folder1/same.jsonl"]
    assert len(set(labels)) == len(names)
