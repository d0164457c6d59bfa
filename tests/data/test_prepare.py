"""Data prepared in chunks, by workers, through stores and from the cache are those of a plain loop over lists."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import make_tokenizer
from harness.in_memory import load_preferences, split_by_root
from rewardlab.core.errors import ConfigError, DataError, RenderError
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data import bulk, pipeline, prepare, reading
from rewardlab.data.chat import Renderer
from rewardlab.data.dataset_names import require_sources
from rewardlab.data.prepare import load_data
from rewardlab.data.splits import HeldOut
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import to_groups

WORDS = ["light", "water", "soil", "basil", "Paris", "France", "dry", "give", "keep", "alive"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK", 7)
    monkeypatch.setattr(pipeline, "ALONE", 2)


def write_rows(path: Path, count: int, seed: int) -> Path:
    """K-wise rows on repeated prompts; some are broken, too long or of identical replies."""
    draw = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS, int(draw.integers(1, most))))

    rows = []
    for number in range(count):
        num_replies = int(draw.integers(2, 5))
        row: dict[str, Any] = {
            "prompt": f"{draw.integers(count // 2)} {WORDS[number % 3]}",
            "responses": [text(12) for _ in range(num_replies)],
            "scores": [int(n) for n in draw.permutation(num_replies)],
        }
        if number % 9 == 4:
            row["prompt"] = row["prompt"] + " water" * 60
        if number % 17 == 2:
            row["responses"][0] = "light " * 200
        if number % 19 == 5:
            row = {"prompt": "p", "responses": ["a", " "], "scores": [1, 0]}
        if number % 23 == 6:
            row["responses"] = ["a", "a", *row["responses"][2:]]
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path: Path) -> RewardTrainerConfig:
    """Two training files, in one process, kept nowhere."""
    return RewardTrainerConfig.of(
        model="m",
        dataset=(str(write_rows(tmp_path / "a.jsonl", 90, 0)), str(write_rows(tmp_path / "b.jsonl", 40, 1))),
        max_drop_fraction=0.5,
        eval_fraction=0.2,
        max_seq_len=64,
        train_eval_limit=9,
        num_workers=1,
        cache_dir="none",
    )


def renderer_of(config: RewardTrainerConfig) -> Renderer:
    """The tiny tokenizer's."""
    return build_renderer(make_tokenizer(), config.data.rendering)


def plain(group: TokenGroup) -> tuple[object, ...]:
    """A group as values that can be compared."""
    return (
        *(group.preference_id, group.source, group.prompt_key, group.prompt_tokens, group.truncated_tokens),
        *(group.comparisons, group.ranking, len(group.shared)),
        *(group.conversation(reply).tolist() for reply in range(group.num_replies)),
    )


class Oracle:
    """The same by loops over lists of objects, as it was done before there were stores."""

    def __init__(self, config: RewardTrainerConfig) -> None:
        self.config, self.renderer = config, renderer_of(config)
        loaded = load_preferences(
            config.data.dataset,
            split="train",
            reading=config.data.reading,
            seed=config.run.seed,
            limit=config.data.limit,
        )
        self.reports = [report.as_dict() for report in loaded.reports]
        train, held_out = split_by_root(
            loaded.preferences, fraction=config.data.selection.eval_fraction, seed=config.run.seed
        )
        self.train = self.tokens(list(train))
        self.eval = self.tokens(self.draw(list(held_out), config.data.eval_limit))
        self.train_eval = self.draw(self.train[0], config.data.selection.train_eval_limit)

    def draw(self, rows: list[Any], limit: int | None) -> list[Any]:
        """At most `limit` of the rows, by the seed."""
        if limit is None or limit >= len(rows):
            return rows
        order = np.random.default_rng((self.config.run.seed, len(rows))).permutation(len(rows))
        return [rows[n] for n in sorted(order[:limit])]

    def tokens(self, preferences: list[Preference]) -> tuple[list[TokenGroup], dict[str, int]]:
        """(groups, preferences left out by cause)."""
        groups: list[TokenGroup] = []
        dropped: dict[str, int] = {}
        for preference in preferences:
            try:
                group = self.renderer.group(preference)
            except RenderError:
                group = "template_refuses"
            if isinstance(group, str):
                dropped[group] = dropped.get(group, 0) + 1
                continue
            share = 1 / len(group.comparisons)
            weighed = tuple(replace(c, weight=c.weight * share) for c in group.comparisons)
            groups.append(replace(group, comparisons=weighed))
        return groups, dropped


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "changed", [{}, {"limit": 25, "eval_limit": 3}, {"limit": 1000, "seed": 3}, {"seed": 1}], ids=str
)
@pytest.mark.parametrize(
    "how", ["one process", pytest.param("workers", marks=pytest.mark.slow), "from the cache", "from a whole entry"]
)
def test_the_data_are_those_of_a_plain_loop(
    config: RewardTrainerConfig, changed: dict[str, Any], how: str, tmp_path: Path
) -> None:
    config = config.replace(**changed, num_workers=2 if how == "workers" else 1)
    renderer = renderer_of(config)
    if how.startswith("from"):
        config = config.replace(cache_dir=str(tmp_path / "cache"))
        load_data((config.replace(limit=None) if "whole" in how else config).data, renderer, seed=config.run.seed)
    wanted = Oracle(config)
    prepared = load_data(config.data, renderer, seed=config.run.seed)
    data, test, reports = to_groups(config, prepared, renderer)
    assert [done["from_cache"] for done in prepared.reports["preparation"]] == [how.startswith("from")] * 2
    assert [plain(group) for group in data.train] == [plain(group) for group in wanted.train[0]]
    assert data.train_eval is not None
    assert [plain(group) for group in data.train_eval] == [plain(group) for group in wanted.train_eval]
    for group, other in zip(data.eval, wanted.eval[0], strict=True):
        assert plain(group)[6:] == plain(other)[6:]
        assert group.preference_id == other.preference_id
    assert prepared.reports["train"] == wanted.reports
    assert len(test) == 0
    for name, (groups, dropped) in {"training": wanted.train, "evaluation": wanted.eval}.items():
        assert (reports[name].kept, reports[name].dropped) == (len(groups), dropped)
    assert any(dropped for _, dropped in (wanted.train, wanted.eval)), "some rows ought to be left out"


@pytest.mark.slow
def test_the_second_start_reads_the_cache_and_says_so(
    config: RewardTrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, renderer = config.replace(cache_dir=str(tmp_path / "cache")), renderer_of(config)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        load_data(config.data, renderer, seed=0)
        assert "prepared: a[all rows]: 90 rows in" in caplog.text
        assert "preferences/s" in caplog.text
        assert "cache" not in caplog.text
        monkeypatch.setattr(reading, "write_store", lambda *_, **__: pytest.fail("prepared again"))
        other = config.replace(eval_fraction=0.5, kwise_weight="comparison", batch_size=3, seed=5)
        load_data(other.data, renderer, seed=5)
        assert "prepared: a[all rows]: read from cache in" in caplog.text
        assert "prepared: b[all rows]: read from cache in" in caplog.text


def test_a_limit_tokenises_no_more_than_it_keeps(config: RewardTrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    render_all = bulk.render_all

    def count(preferences: Any, *arguments: Any, **named: Any) -> Any:
        counted.append(len(preferences))
        return render_all(preferences, *arguments, **named)

    monkeypatch.setattr(pipeline, "render_all", count)
    load_data(config.replace(limit=11).data, renderer_of(config), seed=0)
    assert sum(counted) == 2 * 11


@pytest.mark.slow
def test_no_row_stays_in_memory_as_an_object(config: RewardTrainerConfig) -> None:
    renderer = renderer_of(config)
    prepared = load_data(config.data, renderer, seed=0)
    data, _, _ = to_groups(config, prepared, renderer)
    held = {type(value) for value in vars(data.train).values()} | {
        type(value) for value in vars(prepared.train).values()
    }
    assert held <= {tuple, np.ndarray, bool}
    for store in prepared.train.stores:
        assert {type(column) for column in store.columns.values()} == {np.ndarray}
    assert data.train[0] is not data.train[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_broken_line_deep_in_a_file_is_named(config: RewardTrainerConfig, num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text((tmp_path / "a.jsonl").read_text() + "{torn\n" + "\x00\n")
    config = config.replace(dataset=(str(path),), num_workers=num_workers)
    with pytest.raises(DataError, match=r"broken.jsonl:91: not valid JSON"):
        load_data(config.data, renderer_of(config), seed=0)


@pytest.mark.parametrize("limit", [None, 5])
def test_too_many_dropped_rows_are_an_error_also_from_the_cache(
    config: RewardTrainerConfig, tmp_path: Path, limit: int | None
) -> None:
    config = config.replace(max_drop_fraction=0.01, limit=limit, cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"a.jsonl: 7 of 90 rows cannot be used(.*\n)*.*--max-drop-fraction 0.08"):
            load_data(config.data, renderer_of(config), seed=0)


def test_one_long_reply_among_few_held_out_rows_is_no_error(
    config: RewardTrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n} basil", "chosen": f"light {n}", "rejected": f"dry {n}"} for n in range(60)]
    rows[7]["chosen"] = "light " * 200
    path = tmp_path / "one_long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    few = config.replace(dataset=(str(path),), eval_fraction=0.05, max_drop_fraction=0.05)
    mask_P = np.isin(np.arange(60), [3, 7, 20])
    held_out = HeldOut(mask_P=mask_P, rule="reply", wanted=3, prompts=3, roots=3, largest=1, digest="")
    monkeypatch.setattr(prepare, "hold_out", lambda *_, **__: held_out)
    renderer = renderer_of(few)
    _, _, reports = to_groups(few, load_data(few.data, renderer, seed=0), renderer)
    assert (reports["evaluation"].preferences, reports["evaluation"].kept) == (3, 2)
    named = few.replace(eval_dataset=(str(path),), max_drop_fraction=0.01)
    with pytest.raises(DataError, match="training data: 1 of 60 preferences cannot be used"):
        to_groups(named, load_data(named.data, renderer, seed=0), renderer)


def test_a_file_that_changes_while_it_is_read_is_an_error(
    config: RewardTrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store = reading.write_store

    def write(folder: Path, source: Any, **named: Any) -> None:
        write_store(folder, source, **named)
        with source.path.open("a") as file:
            file.write(" \n")

    monkeypatch.setattr(reading, "write_store", write)
    config = config.replace(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="a.jsonl changed while it was read"):
        load_data(config.data, renderer_of(config), seed=0)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_between_the_two_readings_of_a_limit_is_an_error(
    config: RewardTrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    path, chosen_by_limit = tmp_path / "a.jsonl", pipeline.chosen_by_limit

    def choose(*arguments: Any) -> Any:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[0]] if grows else lines[:-1]))
        return chosen_by_limit(*arguments)

    monkeypatch.setattr(pipeline, "chosen_by_limit", choose)
    config = config.replace(dataset=(str(path),), limit=11)
    with pytest.raises(DataError, match="a.jsonl changed while it was read. Start again when it is complete"):
        load_data(config.data, renderer_of(config), seed=0)


def test_what_is_missing_shows_before_anything_is_prepared(config: RewardTrainerConfig, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"x": 1}\n')
    for changed, error, words in (
        ({"test_dataset": (str(tmp_path / "none.jsonl"),)}, DataError, "no such file"),
        ({"eval_dataset": (str(tmp_path / "odd.jsonl"),)}, DataError, "no known schema"),
        ({"eval_split": "test"}, ConfigError, "is one file and has no splits"),
    ):
        with pytest.raises(error, match=words):
            require_sources(config.replace(**changed).data)
    require_sources(config.data)
