"""Training on rows that a program holds: as from files, with the same checks and counts."""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rewardlab
from common import write_pairs
from resuming import config_for, stop_after
from rewardlab.core.errors import ConfigError, DataError, RunInterrupted
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.data.dataset_names import all_named, given_rows, require_apart, require_sources
from rewardlab.data.finding import source_of_rows
from rewardlab.data.in_memory import fingerprint_of_rows, plain_rows
from rewardlab.data.readers import fingerprint
from rewardlab.training.run import train
from runs import history_of

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture
def rows(tmp_path) -> list[dict[str, object]]:
    """Of a file of pairs."""
    path = write_pairs(tmp_path / "pairs.jsonl", 24)
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(folder, kind="train") -> dict[str, object]:
    """What the manifest says of the rows, without their name."""
    (report,) = json.loads((folder / "manifest.json").read_text())["data"][kind]
    return {key: value for key, value in report.items() if key not in ("name", "split", "sha256", "examples")}


@pytest.mark.slow
def test_rows_in_memory_train_as_the_same_rows_in_a_file(base_model, rows, tmp_path):
    rows = [*rows, {"prompt": "x", "chosen": "same", "rejected": "same"}]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(base_model, path, tmp_path / "file", steps=4, eval_fraction=0.2, max_drop_fraction=0.5)
    train(config)
    held = config.replace(dataset=(), output_dir=tmp_path / "held")
    train(held, preferences=rows)
    train(held.replace(output_dir=tmp_path / "walked"), preferences=(row for row in rows))
    assert told(tmp_path / "file")["dropped"] == {"identical_replies": 1}
    for name in ("held", "walked"):
        assert history_of(tmp_path / name) == history_of(tmp_path / "file")
        assert told(tmp_path / name) == told(tmp_path / "file")
        assert json.loads((tmp_path / name / "config.json").read_text())["dataset"] == []


@pytest.mark.slow
def test_a_dataset_of_the_hub_library_is_rows(base_model, rows, tmp_path):
    datasets = pytest.importorskip("datasets")
    config = config_for(base_model, "unused", tmp_path / "rows", steps=2).replace(dataset=())
    train(config, preferences=rows)
    train(config.replace(output_dir=tmp_path / "library"), preferences=datasets.Dataset.from_list(rows))
    assert history_of(tmp_path / "library") == history_of(tmp_path / "rows")


def preferences(count: int) -> Iterator[Preference]:
    """Three replies each, judged in two ways."""
    for k in range(count):
        replies = tuple((Message("assistant", f"{word} {k}"),) for word in ("good", "bad", "so"))
        yield Preference(
            id=f"mine-{k}",
            source="mine",
            prompt=(Message("system", "Be brief."), Message("user", f"why {k}?")),
            replies=replies,
            comparisons=(
                Comparison(first=0, second=1),
                Comparison(first=2, second=1, label=0.7, weight=2.0, margin=0.5),
            ),
        )


def test_preferences_keep_their_judgements_and_evaluation_and_test_data_their_places(base_model, tmp_path):
    config = config_for(base_model, "unused", tmp_path / "run", steps=2).replace(dataset=())
    result = train(
        config, preferences=preferences(16), eval_preferences=list(preferences(12)), test_preferences=preferences(11)
    )
    assert result.selected is not None
    assert result.test is not None
    assert (result.selected.overall.sums.comparisons, result.test.overall.sums.comparisons) == (24, 22)
    row = result.test.rows[2]
    assert row.source == "test_preferences"
    judged = {(c.first, c.second): c for c in row.comparisons}
    assert (judged[2, 1].label, judged[2, 1].weight, judged[2, 1].margin) == (0.7, 2.0, 0.5)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_rows_and_no_others(base_model, rows, tmp_path, monkeypatch):
    config = config_for(base_model, "unused", tmp_path / "run", steps=4).replace(dataset=())
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(RunInterrupted):
            train(config, preferences=rows)
    with pytest.raises(DataError, match="the training data are not what the run began with"):
        train(config.replace(resume="auto"), preferences=[*rows[1:], rows[0]])
    train(config.replace(resume="auto"), preferences=rows)
    train(config.replace(output_dir=tmp_path / "whole"), preferences=rows)
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pairs.jsonl", "preferences: got a str, wanted rows"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences: got a dict, wanted rows"),
        (7, "preferences: got a int, wanted rows"),
        (["prompt", "chosen"], r"preferences:1: is a str, .* give \.to_dict\('records'\)"),
        ([], r"preferences: no rows\.$"),
        ([{"prompt": "a", "choosen": "b", "rejected": "c"}], "Perhaps 'choosen' as 'chosen' is meant"),
    ],
)
def test_what_is_no_row_is_told_at_once(given, message):
    config = rewardlab.RewardTrainerConfig.of(model="m")
    with pytest.raises(DataError, match=message):
        require_sources(config.data, given_rows(preferences=given))


def test_a_run_that_has_no_rows_claims_no_folder(base_model, tmp_path):
    config = config_for(base_model, "unused", tmp_path / "run").replace(dataset=())
    with pytest.raises(DataError, match=r"preferences: no rows\.$"):
        train(config, preferences=[])
    assert not (tmp_path / "run").exists()


def test_data_that_are_given_twice_or_not_at_all_are_refused(rows):
    config = rewardlab.RewardTrainerConfig.of(model="m")
    with pytest.raises(ConfigError, match="--dataset is missing"):
        train(config)
    given = given_rows(preferences=rows, eval_preferences=None, test_preferences=rows)
    assert [named.purpose for named in all_named(config.data, given)] == ["train", "test"]
    for settings, words in (
        ({"dataset": "a.jsonl"}, "dataset=.* preferences are given as well"),
        ({"test_dataset": "a.jsonl"}, "test_dataset=.* test_preferences are given as well"),
        ({"eval_split": "test"}, "training data in memory have no splits. Give eval_preferences"),
        ({"test_split": "test"}, "rows in memory have no splits"),
    ):
        with pytest.raises(ConfigError, match=words):
            all_named(config.replace(**settings).data, given)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"eval_split": "test", "test_split": "test"}, True),
        ({"eval_split": "validation", "test_split": "test"}, False),
        ({"eval_dataset": "a.jsonl", "test_dataset": "a.jsonl"}, True),
        ({"eval_dataset": "a.jsonl", "test_dataset": "b.jsonl"}, False),
        ({"eval_dataset": ("a.jsonl", "b.jsonl"), "test_dataset": ("b.jsonl", "a.jsonl")}, True),
    ],
)
def test_data_that_choose_the_checkpoint_are_not_test_data(settings, same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        write_pairs(tmp_path / name, 3)
    config = rewardlab.RewardTrainerConfig.of(model="m", dataset="some/thing", **settings)
    if same:
        with pytest.raises(ConfigError, match="these are the evaluation data and the test data"):
            require_apart(all_named(config.data))
    else:
        require_apart(all_named(config.data))


def test_values_of_numpy_and_pandas_are_read_and_what_json_cannot_hold_is_left_by_its_type():
    numpy = pytest.importorskip("numpy")
    held = [
        {0: "x", "prompt": numpy.str_("a"), "label": numpy.float32(0.5), "margin": float("nan"), "when": object()},
        {"prompt": "a", "responses": numpy.array(["b", "c"]), "scores": numpy.array([1, 2])},
    ]
    (_, first), (_, second) = plain_rows(held, "rows")
    assert first == {"0": "x", "prompt": "a", "label": 0.5, "margin": None, "when": {"value of type": "object"}}
    assert second == {"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}
    assert fingerprint_of_rows(held, "rows") == fingerprint_of_rows([first, second], "rows")


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_judgements_of_preferences_may_be_numbers_of_numpy_and_torch(number):
    turns = (Message("user", "q"),), ((Message("assistant", "a"),), (Message("assistant", "b"),))

    def of(label: Any) -> Preference:
        judged = Comparison(first=0, second=1)
        object.__setattr__(judged, "label", label)  # past the tests' check of types, which users do not have
        return Preference(id="1", source="mine", prompt=turns[0], replies=turns[1], comparisons=(judged,))

    assert fingerprint_of_rows([of(number(0.5))], "rows") == fingerprint_of_rows([of(0.5)], "rows")
    ((_, row),) = plain_rows([of(number(np.nan))], "rows")
    assert math.isnan(row["comparisons"][0]["label"])  # not left out, which would make it the default


@pytest.mark.slow
def test_rows_in_memory_stay_on_no_disk_unless_a_folder_is_named(base_model, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "home"))
    config = config_for(base_model, "unused", tmp_path / "run", steps=1).replace(dataset=())
    train(config.replace(cache_dir="auto"), preferences=rows)
    assert not (tmp_path / "home" / "tokens").exists()
    named = config.replace(cache_dir=str(tmp_path / "named"), output_dir=tmp_path / "again")
    train(named, preferences=rows)
    assert list((tmp_path / "named").iterdir())


def test_rows_that_are_others_each_time_are_kept_as_they_first_were():
    class Shuffled:
        def __init__(self):
            self.times = 0

        def __iter__(self):
            self.times += 1
            return iter([{"prompt": str(self.times), "chosen": "a", "rejected": "b"}])

    source = source_of_rows(Shuffled(), "rows")
    assert fingerprint(source) == fingerprint(source)


@pytest.mark.slow
def test_patience_needs_evaluation_data_from_anywhere(base_model, rows, tmp_path):
    config = config_for(base_model, "unused", tmp_path / "run", steps=2, eval_fraction=0, early_stopping_patience=3)
    with pytest.raises(ConfigError, match="without evaluation data nothing stops the run"):
        train(config.replace(dataset=()), preferences=rows)
    train(config.replace(dataset=()), preferences=rows, eval_preferences=rows[:12])
