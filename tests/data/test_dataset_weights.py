"""Laws of weights: the shares are the ones asked for, up to a row, and no row is used twice."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loading import pair, places, prepared, settings_of_run, write
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import to_json
from rewardlab.data.config import ReadingConfig
from rewardlab.data.dataset_names import all_named, require_readable, require_sources
from rewardlab.data.finding import find_sources
from rewardlab.data.weights import counts_by_share, split_weights


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Files of 100 and 20 rows."""
    a = write(tmp_path / "a.jsonl", [pair(k) for k in range(100)])
    b = write(tmp_path / "b.jsonl", [pair(k) for k in range(100, 120)])
    return str(a), str(b)


class TestNames:
    def test_a_weight_is_a_number_after_the_last_colon(self) -> None:
        weighted = split_weights(["a.jsonl:0.7", "org/name:small:0.2", "org/name:0.7@v1:1e-1"], "--dataset")
        assert weighted is not None
        assert weighted.names == ("a.jsonl", "org/name:small", "org/name:0.7@v1")
        assert weighted.shares == (Fraction(7, 10), Fraction(2, 10), Fraction(1, 10))

    @pytest.mark.parametrize("names", [["org/name:2023"], ["org/a:small", "org/b@v1:x"], ["org/a:0.7@main", "b.jsonl"]])
    def test_other_names_have_none(self, names: list[str]) -> None:
        assert split_weights(names, "--dataset") is None

    def test_an_existing_file_of_that_name_is_taken_as_it_is(self, tmp_path: Path) -> None:
        odd = str(write(tmp_path / "odd.jsonl:0.7", [pair(0)]))
        assert split_weights([odd, "b.jsonl"], "--dataset") is None
        weighted = split_weights([f"{odd}:2", "b.jsonl:1"], "--dataset")
        assert weighted is not None
        assert weighted.names == (odd, "b.jsonl")

    def test_some_weights_are_an_error_that_says_how_to_name_a_configuration(self) -> None:
        with pytest.raises(ConfigError, match=r"org/a:7 has the weight 7, and org/b has none.*org/a:7@main"):
            split_weights(["org/b", "org/a:7"], "--dataset")

    @pytest.mark.parametrize("weight", ["0", "-1", "1e400", "2e9"])
    def test_weights_out_of_range_are_an_error(self, weight: str) -> None:
        with pytest.raises(ConfigError, match=r"must be above 0 and at most"):
            split_weights([f"a.jsonl:{weight}", "b.jsonl:1"], "--dataset")


class TestCounts:
    @given(data=st.data())
    def test_shares_hold_up_to_a_row_and_one_more_row_would_be_too_many(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(2, 5))
        available = data.draw(st.lists(st.integers(50, 10_000), min_size=number, max_size=number))
        weights = data.draw(st.lists(st.integers(1, 20), min_size=number, max_size=number))
        shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
        most = data.draw(st.none() | st.integers(200, 5000))
        counts = counts_by_share(available, shares, ["x"] * number, most)
        total = sum(counts)
        assert all(abs(count - total * share) < 1 for count, share in zip(counts, shares, strict=True))
        assert all(0 < count <= there for count, there in zip(counts, available, strict=True))
        fits = all((total + 1) * share <= there for share, there in zip(shares, available, strict=True))
        assert total == most or not fits

    def test_a_share_of_no_row_is_an_error_that_names_the_scarcest(self) -> None:
        with pytest.raises(DataError, match=r"b: its share of 0\.01 would be not one row of 5\. a has 5 rows"):
            counts_by_share([5, 100], (Fraction(99, 100), Fraction(1, 100)), ["a", "b"])


class TestTraining:
    def test_the_scarcest_decides_how_many_rows_are_used(
        self, two: tuple[str, str], log: pytest.LogCaptureFixture
    ) -> None:
        done = prepared(f"{two[0]}:0.6", f"{two[1]}:0.4")
        used = places(done)
        assert len(used) == len(set(used)) == 50
        assert sum(name.startswith("b.jsonl") for name in used) == 20
        told = json.loads(to_json(done.reports["weights"]))["train"]
        assert told["rows"] == 50
        assert told["datasets"][0] == {
            "name": "a", "weight": 0.6, "share_wanted": 0.6, "share": 0.6, "rows": 30, "of": 100
        }  # fmt: skip
        assert [one["kept"] for one in done.reports["train"]] == [100, 20]
        assert "weights: 50 rows: a 0.6000 (30 of 100 rows; wanted 0.6000), b 0.4000 (20 of 20 rows" in log.text

    def test_the_seed_draws_the_rows_and_a_limit_makes_them_fewer(self, two: tuple[str, str]) -> None:
        names = f"{two[0]}:3", f"{two[1]}:1"
        first, again, other = (places(prepared(*names, seed=seed)) for seed in (0, 0, 1))
        assert first == again
        assert sorted(first) != sorted(other)
        limited = prepared(*names, limit=12)
        assert len(limited.train) == 16
        assert set(places(limited)) <= set(first)
        assert [one["rows"] for one in limited.reports["weights"]["train"]["datasets"]] == [12, 4]

    @pytest.mark.parametrize("limit", [None, 12])
    def test_a_control_leaves_which_rows_are_drawn_and_held_out_as_it_was(
        self, two: tuple[str, str], limit: int | None
    ) -> None:
        names = [f"{two[0]}:0.75", f"{two[1]}:0.25"]
        wanted = {"eval_fraction": 0.25, "limit": limit}
        plain = prepared(*names, **wanted)
        made = prepared(*names, diagnostic_mode="label_shuffle", **wanted)
        for part, same in ((made.train, plain.train), (made.eval, plain.eval)):
            assert [one.preference_id for one in part.groups()] == [one.preference_id for one in same.groups()]
        assert made.train.changed().any()
        assert not made.eval.changed().any()
        assert made.reports["weights"] == plain.reports["weights"]

    def test_without_weights_nothing_is_said_or_left_out(self, two: tuple[str, str]) -> None:
        done = prepared(*two)
        assert len(done.train) == 120
        assert "weights" not in done.reports

    def test_evaluation_data_are_not_taken_from_names_with_weights(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            for split, count in (("train", 8), ("test", 3)):
                write(tmp_path / name / f"{split}.jsonl", [pair(k) for k in range(count)])
        names = [f"{tmp_path / name}:1" for name in ("a", "b")]
        config = settings_of_run(*names, test_split="test")
        require_sources(config.data)
        _, test = all_named(config.data)
        assert test.names == (str(tmp_path / "a"), str(tmp_path / "b"))
        assert test.weighted is None

    @pytest.mark.parametrize("flag", ["eval_dataset", "test_dataset"])
    def test_evaluation_data_take_no_weights(self, two: tuple[str, str], flag: str) -> None:
        config = settings_of_run(two[0], **{flag: [f"{two[1]}:0.5", f"{two[0]}:0.5"]})
        with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')} .*these data take no weights"):
            require_sources(config.data)
        config = settings_of_run(two[0], **{flag: [f"{two[1]}:0.5"]})
        with pytest.raises(DataError, match=r"0\.5 is a weight\. Weights are for several training datasets"):
            require_sources(config.data)

    def test_nor_does_what_is_judged(self, two: tuple[str, str]) -> None:
        with pytest.raises(ConfigError, match="take no weights"):
            require_readable([f"{two[0]}:1", f"{two[1]}:1"], "test", ReadingConfig())

    def test_a_single_dataset_has_nothing_to_be_weighed_against(self, two: tuple[str, str]) -> None:
        with pytest.raises(DataError, match=r"0\.7 is a weight.*name .*a\.jsonl alone"):
            find_sources([f"{two[0]}:0.7"], "train")
