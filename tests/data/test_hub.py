"""Laws of datasets of the hub: revisions are passed on and written down, and a stream is read no further than asked."""

from __future__ import annotations

import logging
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loading import THREE_CONTENTS, contents, load, pair, places, prepared, settings_of_run
from rewardlab.core.errors import DataError
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.run import audit_rows
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.inspecting.run import inspect_datasets
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.reading import read_data
from rewardlab.data.config import ReadingConfig
from rewardlab.data.dataset_names import first_rows_of
from rewardlab.data.finding import find_sources
from rewardlab.data.hub import CONVERTED, commit_of, load_hub, parse_hub_name
from rewardlab.data.judgements import Rules
from rewardlab.data.sources import draw_streamed, open_units

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for `datasets` that counts what it is asked for."""

    def __init__(self, rows: int) -> None:
        self.asked: list[dict[str, Any]] = []
        self.given = 0
        self.rows = rows
        self.content: list[Any] | None = None
        """The rows themselves, in place of as many made ones."""
        self.fails_at: int | None = None
        self.script: str | None = None
        """The name of the script that makes the dataset, which the package refuses to run."""
        self.converted = True

    def load_dataset(self, name: str, configuration: str | None, *, split: str, **options: Any) -> Any:
        self.asked.append({"name": name, "configuration": configuration, "split": split, **options})
        if self.script and options.get("revision") != CONVERTED:
            raise RuntimeError(f"Dataset scripts are no longer supported, but found {self.script}")
        if self.script and not self.converted:
            raise FileNotFoundError("no such branch")
        rows = [pair(k) for k in range(self.rows)] if self.content is None else self.content
        if not options.get("streaming"):
            whole = types.SimpleNamespace(download_checksums={f"hf://datasets/{name}@{COMMIT}/train.parquet": {}})
            listed = type("Listed", (list,), {"info": whole, "_fingerprint": "abc"})
            return listed(rows)
        return self._stream(rows)

    def _stream(self, rows: list[Any]) -> Iterator[Any]:
        for number, row in enumerate(rows):
            if number == self.fails_at:
                raise ConnectionResetError("gone\nand more")
            self.given += 1
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The stand-in, in place of the package."""
    hub = Hub(3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=hub.load_dataset))
    return hub


class TestNames:
    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("org/name", ("org/name", None, None)),
            ("org/name:small", ("org/name", "small", None)),
            ("org/name@v1.0", ("org/name", None, "v1.0")),
            ("org/name:small@refs/pr/3", ("org/name", "small", "refs/pr/3")),
            ("org/name:0.7@main", ("org/name", "0.7", "main")),
        ],
    )
    def test_a_configuration_and_a_revision_follow_the_name(
        self, name: str, parts: tuple[str, str | None, str | None]
    ) -> None:
        parsed = parse_hub_name(name)
        assert (parsed.repository, parsed.configuration, parsed.revision) == parts
        assert find_sources([name], "train")[0].is_on_hub

    @pytest.mark.parametrize("name", ["org/name@", "org/name:", "org/name@v1:small", "@v1"])
    def test_a_part_that_is_empty_or_at_the_wrong_place_is_an_error(self, name: str) -> None:
        with pytest.raises(DataError, match="not the name of a dataset on the hub"):
            parse_hub_name(name)

    @pytest.mark.parametrize("name", ["prefs", "prefs:small", "prefs@v1"])
    def test_a_name_without_an_organisation_is_never_asked_for(self, hub: Hub, name: str) -> None:
        with pytest.raises(DataError, match=r"no such file\..*On the hub, a dataset is named organisation/name\."):
            load(name)
        assert not hub.asked

    def test_a_revision_is_asked_for_and_only_if_there_is_one(self, hub: Hub) -> None:
        assert contents(load("org/name:small@v2")) == THREE_CONTENTS
        assert hub.asked == [{"name": "org/name", "configuration": "small", "split": "train", "revision": "v2"}]
        load("org/name")
        assert "revision" not in hub.asked[-1]

    def test_revision_and_commit_are_written_down(self, hub: Hub) -> None:
        (report,) = prepared("org/name@v2").reports["train"]
        assert report["hub"] == {"revision": "v2", "streamed": False, "commit": COMMIT}

    def test_a_commit_is_told_only_if_all_files_agree_on_it(self) -> None:
        def of(*addresses: str) -> str | None:
            info = types.SimpleNamespace(download_checksums={address: {} for address in addresses})
            return commit_of(types.SimpleNamespace(info=info))

        here, other = (f"hf://datasets/org/name@{commit}/a.parquet" for commit in (COMMIT, COMMIT[::-1]))
        assert of(here, here.replace("a.", "b.")) == COMMIT
        assert of(here, other) is of() is of("https://files.org/a") is None
        assert commit_of(object()) is None


class TestScripts:
    @pytest.mark.parametrize("streaming", [False, True])
    def test_rows_come_from_the_hubs_conversion_and_this_is_told(
        self, hub: Hub, log: pytest.LogCaptureFixture, streaming: bool
    ) -> None:
        hub.script = "name.py"
        assert len(list(load_hub("org/name:small", "train", streaming=streaming))) == 3
        assert [one.get("revision") for one in hub.asked] == [None, CONVERTED]
        assert hub.asked[1] == {**hub.asked[0], "revision": CONVERTED}
        (line,) = [record for record in log.records if record.levelno == logging.WARNING]
        assert line.getMessage() == (
            "dataset org/name:small: read from refs/convert/parquet, since a script makes its main branch"
        )

    def test_where_there_is_none_the_files_can_be_had(self, hub: Hub) -> None:
        hub.script, hub.converted = "name.py", False
        with pytest.raises(
            DataError, match=r"found name\.py, and the hub gives no rows .* hf download org/name --repo"
        ):
            load_hub("org/name", "train")

    def test_a_revision_that_was_asked_for_is_never_another(self, hub: Hub) -> None:
        hub.script = "name.py"
        with pytest.raises(DataError, match="the hub did not give it"):
            load_hub("org/name@v1", "train")
        assert [one["revision"] for one in hub.asked] == ["v1"]


class TestStreams:
    def test_without_a_limit_all_rows_come_in_their_order(self, hub: Hub) -> None:
        done = prepared("org/name", streaming=True, shuffle_buffer=1)
        assert places(done) == [f"org/name[train]:{k}" for k in (1, 2, 3)]
        assert all(asked["streaming"] for asked in hub.asked)
        assert done.reports["train"][0]["hub"] == {"revision": None, "streamed": True, "shuffle_buffer": None}

    def test_a_limit_reads_no_further_than_its_buffer_and_says_so(
        self, hub: Hub, log: pytest.LogCaptureFixture
    ) -> None:
        hub.rows = 1000
        done = prepared("org/name", streaming=True, shuffle_buffer=50, limit=10)
        (report,) = done.reports["train"]
        assert (len(done.train), report["rows_read"], report["kept"]) == (10, 10, 10)
        assert report["hub"] == {"revision": None, "streamed": True, "shuffle_buffer": 50}
        # The rows that fill the buffer, one for each that was drawn, and one to see the columns.
        assert hub.given <= 50 + 10 + 1
        (line,) = [record for record in log.records if record.levelno == logging.WARNING and "streamed" in record.msg]
        assert "the limit 10 drew each row among 50 rows of the stream" in line.getMessage()
        again = prepared("org/name", streaming=True, shuffle_buffer=50, limit=10)
        assert places(again) == places(done)

    def test_donors_of_a_control_are_of_the_rows_that_were_drawn(self, hub: Hub) -> None:
        hub.rows = 1000
        control = {"diagnostic_mode": "random_negatives", "diagnostic_splits": ("train",)}
        done = prepared("org/name", streaming=True, shuffle_buffer=50, limit=10, **control)
        assert done.reports["control"]["counts"]["train"][0]["changed"] == 10
        assert hub.given <= 50 + 10 + 1

    def test_rows_keep_their_numbers_and_dropped_ones_do_not_count_for_the_limit(self, hub: Hub) -> None:
        (source,) = find_sources(["org/name"], "train", streaming=True)
        rules = Rules(source="org/name", reading=ReadingConfig(shuffle_buffer=4), seed=0)
        rows = hub.content = [pair(k) if k % 2 else {**pair(k), "chosen": ""} for k in range(40)]
        schema, units = open_units(source, rules)
        drawn, tally = draw_streamed(source, schema, units, rules=rules, limit=8)
        assert len(drawn) == tally.kept == 8
        assert all(number % 2 == 0 and content[0] == rows[number - 1] for number, content in drawn)
        assert set(tally.dropped) == {"empty_reply"}
        assert len({number for number, _ in drawn}) == 8

    def test_every_row_is_drawn_about_as_often_within_the_buffer(self, hub: Hub) -> None:
        hub.rows = 6
        (source,) = find_sources(["org/name"], "train", streaming=True)
        counts: Counter[int] = Counter()
        for seed in range(600):
            rules = Rules(source="org/name", reading=ReadingConfig(shuffle_buffer=6), seed=seed)
            drawn, _ = draw_streamed(source, *open_units(source, rules), rules=rules, limit=2)
            counts.update(number for number, _ in drawn)
        # 200 expected each, with a standard deviation of 11.5.
        assert set(counts) == set(range(1, 7))
        assert all(140 < count < 260 for count in counts.values())

    def test_a_stream_that_breaks_off_is_an_error_with_the_row(self, hub: Hub) -> None:
        hub.fails_at = 2
        with pytest.raises(DataError, match=r"split 'train': the hub gave no more rows after row 2 .*gone\)"):
            prepared("org/name", streaming=True)

    def test_a_control_draws_replies_of_the_rows_that_were_drawn_and_reads_no_further(self, hub: Hub) -> None:
        hub.rows = 1000
        control = {"diagnostic_mode": "random_negatives"}
        done = prepared("org/name", streaming=True, shuffle_buffer=50, limit=10, **control)
        assert len(done.train) == 10
        assert done.reports["control"]["counts"]["train"][0]["changed"] == 10
        assert hub.given <= 50 + 10 + 1

    def test_the_first_rows_are_looked_at_without_a_download(self, hub: Hub) -> None:
        config = settings_of_run("org/name", streaming=True, test_dataset=["org/other"])
        assert [name for name, _ in first_rows_of(config.data)] == ["org/name[train]", "org/other[test]"]
        assert [asked["streaming"] for asked in hub.asked] == [True, True]
        assert hub.given == 2


class TestTools:
    def test_inspecting_and_searching_read_no_more_of_a_stream_than_the_limit_needs(
        self, hub: Hub, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub.content = [pair(0), {"prompt": "p"}, *(pair(k) for k in range(1, 500))]
        rows = {"dataset": ("org/name",), "limit": 60, "streaming": True, "shuffle_buffer": 30, "num_workers": 1}
        drawn = set()
        with caplog.at_level(logging.WARNING, logger="rewardlab"):
            (found,) = inspect_datasets(InspectConfig.of(**rows, samples=60, languages=0))
            assert hub.given < 100
            drawn.add(frozenset(sample.place for sample in found.samples))
            searched = read_data(MislabelsConfig.of(**rows, model="m", output_dir=Path("out")))
        assert hub.given < 200
        assert (found.used, searched.reports[0].kept) == (60, 60)
        assert found.kept + sum(found.dropped.values()) == found.rows_read
        drawn.add(frozenset(one.id for one in searched.preferences))
        assert len(drawn) == 1, "one seed, one draw"
        assert [f"org/name[train]:{place + 1}" for place in searched.positions] == [
            one.id for one in searched.preferences
        ]
        assert caplog.text.count("(--shuffle-buffer), not among all rows") == 2

    def test_an_audit_reads_all_of_a_stream_and_says_so(self, hub: Hub) -> None:
        hub.rows = 300
        reading = ReadingConfig(streaming=True, shuffle_buffer=30, num_workers=1)
        found = audit_rows(AuditConfig(dataset=("org/name",), limit=20, reading=reading)).audit
        assert len(found.numbers_U) == 20
        assert max(found.numbers_U) > 60
        assert any("streams are read whole" in note for note in found.notes)
