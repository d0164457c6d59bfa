"""Laws of `rewardlab data split`: groups stay whole, order does not matter, and new rows move little."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import load, pair, write
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Preference
from rewardlab.curation.files import splitting
from rewardlab.curation.files.config import SplitConfig
from rewardlab.curation.files.splitting import Divided, split
from rewardlab.curation.files.writing import only_writer
from rewardlab.data.splits import Texts, count_shared
from written import configured, rows_in

WORDS = [f"word{k}" for k in range(200)]


def run(tmp_path: Path, *names: Path, output: str = "splits", **how: Any) -> Divided:
    """`split`, to a folder beside."""
    return split(configured(SplitConfig, *names, output_dir=tmp_path / output, **how))


def sides_of(done: Divided) -> dict[str, str]:
    """Id of a row -> the split it went to."""
    return {row["id"]: name for name in done.splits for row in rows_in(done.folder / f"{name}.jsonl")}


def question(number: int, words: int = 30) -> str:
    """A text that no other resembles."""
    return " ".join(random.Random(number).sample(WORDS, words))


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Conversations of one to three rows; every fifth has a near copy of the prompt before it."""
    made = []
    for k in range(start, start + count):
        text = question(k - 1) + " please" if k % 5 == 4 else question(k)
        for turn in range(k % 3 + 1):
            later = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"{k} {turn}"}] * (turn > 0)
            prompt = [{"role": "user", "content": text}, *later]
            made.append({"prompt": prompt, "chosen": f"a {k} {turn}", "rejected": f"b {k} {turn}"})
    return made


def test_every_row_is_in_one_split_and_the_sides_share_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", rows(200))
    done = run(tmp_path, path)
    assert sum(facts["rows"] for facts in done.splits.values()) == len(sides_of(done)) == len(rows(200))
    parts = {name: load(done.folder, split=name).preferences for name in done.splits}
    for names in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = count_shared(*(Texts.of(parts[name]) for name in names))
        assert (shared["rows"], shared["prompts"], shared["first_turns"]) == (0, 0, 0)
    assert all(not counts["near_duplicate_prompts"] for counts in done.shared.values())
    share = done.splits["train"]["share"]
    assert isinstance(share, float)
    assert abs(share - 0.9) < 0.06
    told = json.loads((done.folder / "manifest.json").read_text())
    assert told["splits"] == json.loads(json.dumps(done.splits))
    assert [one["file"] for one in told["outputs"]] == ["train.jsonl", "validation.jsonl", "test.jsonl"]


def test_near_copies_of_a_prompt_stay_together_unless_they_may_part(tmp_path: Path) -> None:
    made = []
    for k in range(150):
        made += [pair(k) | {"prompt": question(k)}, pair(k) | {"prompt": question(k) + " please", "chosen": f"c {k}"}]
    path = write(tmp_path / "in.jsonl", made)
    together = list(sides_of(run(tmp_path, path, fractions=["a=0.5", "b=0.5"])).items())
    sides = dict(together)
    assert all(sides[f"in.jsonl:{2 * k + 1}"] == sides[f"in.jsonl:{2 * k + 2}"] for k in range(150))
    apart = sides_of(run(tmp_path, path, output="apart", fractions=["a=0.5", "b=0.5"], near="none"))
    parted = sum(apart[f"in.jsonl:{2 * k + 1}"] != apart[f"in.jsonl:{2 * k + 2}"] for k in range(150))
    assert 45 < parted < 105


def test_the_order_of_the_rows_does_not_matter(tmp_path: Path) -> None:
    made = rows(60)
    shuffled = random.Random(1).sample(made, len(made))
    texts = []
    for name, some in (("one", made), ("other", shuffled)):
        done = run(tmp_path, write(tmp_path / f"{name}.jsonl", some), output=name)
        texts.append({side: {row["replies"][0][0]["content"] for row in rows_in(done.folder / f"{side}.jsonl")}
                      for side in done.splits})  # fmt: skip
    assert texts[0] == texts[1]


def test_rows_that_are_added_later_move_no_other_conversation(tmp_path: Path) -> None:
    made = [pair(k) | {"prompt": question(k)} for k in range(300)]
    before = sides_of(run(tmp_path, write(tmp_path / "in.jsonl", made[:200])))
    after = sides_of(run(tmp_path, write(tmp_path / "in.jsonl", made), output="more"))
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_the_seed_decides_and_each_split_gets_its_share(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [pair(k) for k in range(1000)])
    first, again, other = (
        sides_of(run(tmp_path, path, output=name, seed=seed, near="none"))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other
    # 50 rows expected in a split of 5 %, with a standard deviation of 7.
    assert all(22 < list(first.values()).count(side) < 78 for side in ("validation", "test"))


def test_a_group_goes_where_its_first_turn_goes_however_large_it_and_the_data_are(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    single = [pair(k) for k in range(60)]
    grouped = [pair(k) | {"chosen": f"x {k} {n}"} for k in range(60, 70) for n in range(10)]
    more = [pair(k) for k in range(100, 160)]
    how: dict[str, Any] = {"fractions": ["train=0.95", "test=0.05"], "near": "none"}
    for seed in (0, 3):
        before = sides_of(run(tmp_path, write(tmp_path / "in.jsonl", [*single, *grouped]), output=f"a{seed}",
                              seed=seed, **how))  # fmt: skip
        after = sides_of(run(tmp_path, write(tmp_path / "in.jsonl", [*single, *grouped, *more]), output=f"b{seed}",
                             seed=seed, **how))  # fmt: skip
        assert {name: after[name] for name in before} == before
    large = [f"in.jsonl:{61 + 10 * k}" for k in range(10)]
    assert {before[name] for name in large} == {"train", "test"}, "the last seed has a large group in the small split"
    assert re.search("split: test gets .* since only whole groups are moved; its largest has 10 rows", log.text)


def test_a_small_split_that_chance_missed_is_not_laid_on_groups(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "in.jsonl", [pair(k) for k in range(60)])
    for seed in range(6):
        with suppress(DataError):  # of a split without any row
            run(tmp_path, path, output=f"s{seed}", seed=seed, near="none", fractions=["train=0.95", "test=0.05"])
    told = set(re.findall(r"split: test gets .*", log.text))
    assert told
    assert all("each row is drawn by its first turn and --seed alone" in line for line in told)
    assert "whole groups" not in log.text


def test_a_huge_group_in_a_small_split_is_an_error_and_no_move(tmp_path: Path) -> None:
    large = [pair(0) | {"chosen": f"x {k}"} for k in range(90)]
    path = write(tmp_path / "in.jsonl", [*large, *(pair(k) for k in range(1, 211))])
    how: dict[str, Any] = {"near": "none", "fractions": ["train=0.8", "test=0.2"]}
    assert sides_of(run(tmp_path, path, seed=0, **how))["in.jsonl:1"] == "train"
    said = "90 of 300 rows belong together and go to the split test, for which 60 were wanted. Try another seed"
    with pytest.raises(DataError, match=said):
        run(tmp_path, path, output="other", seed=5, **how)


def test_a_group_that_fits_nowhere_and_a_split_without_rows_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [*(pair(0) | {"chosen": f"x {k}"} for k in range(8)), pair(1), pair(2)])
    with pytest.raises(DataError, match="8 of 10 rows belong together, which is more than any split may have"):
        run(tmp_path, path, fractions=["a=0.5", "b=0.5"])
    few = write(tmp_path / "few.jsonl", [pair(k) for k in range(4)])
    with pytest.raises(DataError, match=r"the split \w+ would get none of 4 rows in 4 groups"):
        run(tmp_path, few)
    assert not (tmp_path / "splits").exists()


@pytest.mark.slow
@given(
    prompts=st.lists(st.integers(0, 12), min_size=30, max_size=60),
    replies=st.lists(st.integers(0, 25), min_size=60, max_size=60),
)
@settings(max_examples=30, deadline=None)
def test_whatever_rows_have_in_common_the_sides_have_no_prompt_in_common(
    tmp_path_factory: pytest.TempPathFactory, prompts: Sequence[int], replies: Sequence[int]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    made: list[Mapping[str, object]] = [
        {"prompt": f"question {prompt}", "chosen": f"a reply that is long enough to join its rows, number {reply}",
         "rejected": f"no {number}"}
        for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=False))
    ]  # fmt: skip
    path = write(folder / "in.jsonl", made)
    refused = ""
    try:
        done = run(folder, path, fractions=["a=0.6", "b=0.4"], near="none")
    except DataError as error:
        refused = str(error)
    if refused:
        assert "belong together" in refused or "would get none" in refused
        return
    sides: dict[str, set[str]] = {}
    for name, preferences in ((name, load(done.folder, split=name).preferences) for name in done.splits):
        sides[name] = {preference_key(row) for row in preferences}
    assert not sides["a"] & sides["b"]


def preference_key(row: Preference) -> str:
    """The prompt of a row."""
    return row.key


class TestOutputs:
    @pytest.mark.slow
    def test_the_folder_is_read_at_once_as_a_dataset(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", rows(60))
        for ending in ("jsonl.gz", "jsonl.zst", "parquet"):
            done = run(tmp_path, path, output=ending, ending=ending)
            assert len(load(done.folder, split="train").preferences) == done.splits["train"]["rows"]
            assert {one.name for one in done.folder.iterdir()} == {
                "manifest.json", *(f"{name}.{ending}" for name in done.splits)
            }  # fmt: skip

    def test_a_folder_with_other_files_is_left_alone(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", rows(60))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"holds files that `rewardlab data split` did not write \(notes.txt\)"):
            run(tmp_path, path, output="mine", overwrite=True)
        run(tmp_path, path)
        with pytest.raises(ConfigError, match=r"holds splits\..*--overwrite"):
            run(tmp_path, path)
        with pytest.raises(ConfigError, match="holds a dataset that is read"):
            run(tmp_path, tmp_path / "splits" / "train.jsonl", overwrite=True)
        before = (tmp_path / "splits" / "test.jsonl").read_bytes()
        run(tmp_path, path, overwrite=True, fractions=["test=0.3", "train=0.7"])
        assert (tmp_path / "splits" / "test.jsonl").read_bytes() != before
        assert not (tmp_path / "splits" / "validation.jsonl").exists()

    @pytest.mark.parametrize(
        ("fractions", "said"),
        [
            (["train"], "wanted a split and its share"),
            (["train=0.9", "test=0.2"], "sum to 1.1"),
            (["train=1"], "at least two"),
            (["train=0.5", "train=0.5"], "named twice"),
            (["../train=0.5", "test=0.5"], "wanted a split"),
            (["train=nan", "test=0.5"], "wanted a split"),
        ],
    )
    def test_fractions_that_cannot_be_are_an_error(self, tmp_path: Path, fractions: list[str], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            run(tmp_path, tmp_path / "in.jsonl", fractions=fractions)


def test_of_two_splits_into_one_folder_at_once_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(SplitConfig, write(tmp_path / "a.jsonl", rows(60)), output_dir=tmp_path / "splits")
    real = splitting.assign

    def after_another(*given: Any) -> Any:
        monkeypatch.setattr(splitting, "assign", real)
        split(replace(config, seed=7))
        return real(*given)

    monkeypatch.setattr(splitting, "assign", after_another)
    with pytest.raises(ConfigError, match=r"--output-dir .*splits: holds splits. .* --overwrite"):
        split(config)
    assert json.loads((tmp_path / "splits/manifest.json").read_text())["settings"]["seed"] == 7
    with only_writer(tmp_path / "splits"), pytest.raises(ConfigError, match="is being written by process"):
        split(replace(config, overwrite=True))
    assert [path.name for path in tmp_path.glob(".splits*")] == []
