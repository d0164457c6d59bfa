"""Laws of `rewardlab data convert`: every schema reads back from what is written, and nothing is lost uncounted."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from loading import ALLOW_DROPS, load, pair, write
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Preference
from rewardlab.curation.files.config import ConvertConfig
from rewardlab.curation.files.converting import Converted, convert
from rewardlab.curation.files.writing import ENDINGS, RowFile
from written import configured, preferences_in, rows_in, told_by

USER = [{"role": "system", "content": ""}, {"role": "user", "content": "Why?"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
TURN = "\n\nHuman: Hi\n\nAssistant: "
SCHEMAS: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"prompt": "Why?", "chosen": "good", "rejected": "bad"}],
    "pairs of messages, with labels": [
        {"prompt": USER, "chosen": GOOD, "rejected": BAD, "label": label, "strength": 2.0} for label in (1, 0, 0.7, 0.5)
    ],
    "open transcripts": [{"prompt": f"{TURN}Hello\n\nHuman: And?\n\nAssistant:", "chosen": " a ", "rejected": "b"}],
    "whole conversations": [{"chosen": [*USER, *GOOD], "rejected": [*USER, *BAD]}],
    "transcripts": [{"chosen": f"{TURN}Hello!", "rejected": f"{TURN}What?"}],
    "replies of several turns": [
        {"prompt": "Why?", "chosen": [*GOOD, {"role": "user", "content": "And?"}, *BAD], "rejected": [*BAD]}
    ],
    "long form": [
        {"pair_id": 1, "role": role, "prompt": "Why?", "response": text}
        for role, text in (("rejected", "bad"), ("chosen", "good"))
    ],
    "K-wise": [
        {"prompt": "Why?", "responses": ["a", "b", "c", "c"], "scores": [1, 3, 2, 2]},
        {"prompt": "Why?", "responses": ["a", "b", "c"], "ranking": [2, 0, 1]},
        {"prompt": "Why?", "responses": ["a", "b", "c"], "scores": [1, 1, 2]},
    ],
    "SHP": [
        {"history": "Why?", "human_ref_A": "a", "human_ref_B": "b", "labels": label, "score_ratio": 3.0}
        for label in (0, 1)
    ],
    "judged": [
        {
            "prompt": "Why?",
            "replies": ["a", "b", "c"],
            "ranking": [1, 0, 2],
            "comparisons": [
                {"first": 0, "second": 1, "label": 0.2, "weight": 2, "margin": 0.5, "strength": 3},
                {"first": 0, "second": 2},
            ],
        }
    ],
}


def same(ours: Sequence[Preference], theirs: Sequence[Preference]) -> bool:
    """Whether preferences are the same, their places aside."""
    return [replace(one, id="", source="") for one in ours] == [replace(one, id="", source="") for one in theirs]


def run(tmp_path: Path, *names: Path, output: str = "out.jsonl", **settings: Any) -> Converted:
    """`convert`, to a file beside."""
    return convert(configured(ConvertConfig, *names, output=tmp_path / output, **settings))


class TestOwnForm:
    @pytest.mark.parametrize("ending", ENDINGS)
    @pytest.mark.parametrize("schema", SCHEMAS)
    def test_every_schema_reads_back_to_the_same_preferences(self, tmp_path: Path, schema: str, ending: str) -> None:
        path = write(tmp_path / "in.jsonl", SCHEMAS[schema])
        done = run(tmp_path, path, output=f"out{ending}")
        before, after = preferences_in(path), preferences_in(done.output)
        assert same(before, after)
        assert done.rows == done.preferences == len(before)

    @pytest.mark.parametrize("how", [{"strength_as": "weight"}, {"strength_as": "margin"}, {"strength_as": "soft"}])
    def test_what_flags_make_of_a_row_is_written(self, tmp_path: Path, how: dict[str, str]) -> None:
        row = {"prompt": "Why?", "chosen": "a", "rejected": "b", "strength": 0.75}
        path = write(tmp_path / "in.jsonl", [row])
        done = run(tmp_path, path, **how)
        assert same(preferences_in(path, **how), preferences_in(done.output))

    def test_id_and_source_are_written_and_kept_through_further_files(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(k) for k in range(3)])
        first = run(tmp_path, path, output="first.jsonl")
        second = run(tmp_path, first.output, output="second.parquet")
        third = run(tmp_path, second.output, output="third.jsonl", to="trl")
        for done in (first, third):
            assert [row["id"] for row in rows_in(done.output)] == ["in.jsonl:1", "in.jsonl:2", "in.jsonl:3"]
            assert {row["source"] for row in rows_in(done.output)} == {"in"}

    def test_what_is_dropped_is_in_the_manifest_with_everything_else(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(0), {**pair(1), "chosen": ""}, pair(2), {**pair(3), "label": 7}])
        done = run(tmp_path, path, seed=3, **ALLOW_DROPS)
        told = told_by(done.output)
        assert (told["tool"], told["seed"], told["settings"]["to"]) == ("rewardlab data convert", 3, "rewardlab")
        assert (told["rows_read"], told["kept"], told["used"]) == (4, 2, 2)
        (source,) = told["sources"]
        assert source["dropped"] == {"empty_reply": 1, "bad_label": 1}
        assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        content = done.output.read_bytes()
        assert told["outputs"] == [
            {"file": "out.jsonl", "rows": 2, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        ]
        assert told["provenance"]["command"]
        assert told["provenance"]["packages"]["zstandard"]

    def test_columns_that_are_not_written_are_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", logger="rewardlab")
        rows = [
            {**pair(k), "id": f"mine-{k}", "topic": 0, "question": "?", "empty": None, "label": 1} for k in range(2)
        ]
        first = run(tmp_path, write(tmp_path / "in.jsonl", rows), output="first.jsonl")
        (line,) = (record.getMessage() for record in caplog.records if "not written" in record.getMessage())
        assert line.endswith("not written, since they are no part of a preference: the columns id, topic, question")
        caplog.clear()
        run(tmp_path, first.output, output="second.jsonl")
        assert not [record for record in caplog.records if "not written" in record.getMessage()]

    def test_the_format_that_was_found_is_in_the_manifest(self, tmp_path: Path) -> None:
        source = write(tmp_path / "shp.jsonl", SCHEMAS["SHP"])
        convert(configured(ConvertConfig, source, output=tmp_path / "out.jsonl"))
        (told,) = told_by(tmp_path / "out.jsonl")["sources"]
        assert told["format"] == "SHP, by the columns history, human_ref_A, human_ref_B, labels"

    @pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
    def test_names_with_half_a_surrogate_pair_are_written_escaped(self, tmp_path: Path, ending: str) -> None:
        votes = [{"first": 0, "second": 1, "annotator": "ann\ud800"}]
        judged = {"id": "\ud800", "source": "s", "prompt": "Why?", "replies": ["a", "b"], "comparisons": votes}
        labelled = {**pair(0), "labels": {"bob\udfff": 1}}
        for name, row, who in (("a", judged, r"ann\ud800"), ("b", labelled, r"bob\udfff")):
            out = tmp_path / f"{name}-out{ending}"
            convert(configured(ConvertConfig, write(tmp_path / f"{name}.jsonl", [row]), output=out))
            (read,) = preferences_in(out)
            assert [one.annotator for one in read.comparisons] == [who]

    def test_too_many_dropped_rows_write_nothing(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(0), {**pair(1), "chosen": ""}])
        with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
            run(tmp_path, path)
        assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]

    def test_a_limit_draws_as_training_does(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(k) for k in range(40)])
        done = run(tmp_path, path, limit=9, seed=5)
        drawn = sorted(int(row.id.partition(":")[2]) for row in load(path, limit=9, seed=5).preferences)
        assert [int(row["id"].partition(":")[2]) for row in rows_in(done.output)] == drawn
        assert told_by(done.output)["sources"][0]["unused_by_limit"] == 31

    def test_the_same_rows_give_the_same_bytes(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(k) for k in range(9)])
        for ending in ENDINGS:
            files = [run(tmp_path, path, output=f"{name}{ending}").output for name in ("a", "b")]
            assert files[0].read_bytes() == files[1].read_bytes()


class TestTrl:
    @pytest.mark.parametrize("to", ["trl", "trl-implicit"])
    @pytest.mark.parametrize("ending", [".jsonl.gz", ".parquet"])
    def test_pairs_read_back_to_the_same_comparisons(self, tmp_path: Path, to: str, ending: str) -> None:
        path = write(tmp_path / "in.jsonl", [pair(k) for k in range(5)])
        done = run(tmp_path, path, output=f"out{ending}", to=to)
        assert same(preferences_in(path), preferences_in(done.output))

    @pytest.mark.parametrize("to", ["trl", "trl-implicit"])
    def test_datasets_reads_them_with_one_schema_and_trl_finds_the_prompt(self, tmp_path: Path, to: str) -> None:
        rows = [*SCHEMAS["pairs of messages, with labels"][:2], {**pair(7), "strength": 4.0}]
        done = run(tmp_path, write(tmp_path / "in.jsonl", rows), to=to)
        with done.output.open() as file:
            table = datasets.Dataset.from_list([json.loads(line) for line in file])
        wanted = {"id", "source", "chosen", "rejected"} | ({"prompt"} if to == "trl" else set())
        assert set(table.column_names) == wanted
        utils = pytest.importorskip("trl.data_utils", reason="TRL is the oracle of its own formats")
        for row, original in zip(table, rows, strict=True):
            assert utils.is_conversational(row)
            found = row if to == "trl" else utils.extract_prompt(row)
            prompt = original["prompt"] if isinstance(original["prompt"], list) else [
                {"role": "user", "content": original["prompt"]}
            ]  # fmt: skip
            assert found["prompt"] == prompt
            swapped = original.get("label") == 0
            assert found["rejected" if swapped else "chosen"][0]["content"] in ("good", "good 7")

    def test_kwise_rows_become_all_their_pairs_with_ids_of_their_own(self, tmp_path: Path) -> None:
        row = {"prompt": "Why?", "responses": ["a", "b", "c"], "scores": [1, 3, 2]}
        done = run(tmp_path, write(tmp_path / "in.jsonl", [row]), to="trl")
        texts = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows_in(done.output)]
        assert sorted(texts) == [("b", "a"), ("b", "c"), ("c", "a")]
        assert [row["id"] for row in rows_in(done.output)] == [f"in.jsonl:1#{k}" for k in range(3)]
        assert (done.rows, done.preferences) == (3, 1)

    def test_what_pairs_cannot_hold_stops_with_counts_and_writes_nothing(self, tmp_path: Path) -> None:
        rows = [{**pair(k), "label": label} for k, label in enumerate([1, 0.5, 0.7, 0.8])]
        path = write(tmp_path / "in.jsonl", rows)
        with pytest.raises(DataError) as caught:
            run(tmp_path, path, to="trl")
        message = str(caught.value)
        assert "pairs cannot hold 3 of 4 judgements" in message
        assert "a label between 0 and 1: 2, for example in in.jsonl:3" in message
        assert "a tie (label 0.5): 1, for example in in.jsonl:2" in message
        assert "--inexpressible drop" in message
        assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]
        dropped = run(tmp_path, path, to="trl", inexpressible="drop")
        assert dropped.rows == 1
        assert told_by(dropped.output)["judgements"]["left_out"] == {"tie": 1, "soft_label": 2}
        hardened = run(tmp_path, path, to="trl", inexpressible="harden", overwrite=True)
        assert hardened.rows == 3
        assert told_by(hardened.output)["judgements"]["hardened"] == {"soft_label": 2}

    def test_margins_are_written_where_a_flag_asks_for_them(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [{**pair(0), "gap": 1.5}])
        done = run(tmp_path, path, to="trl", margin_column="gap")
        assert rows_in(done.output)[0]["margin"] == 1.5


class TestOutputs:
    @pytest.mark.parametrize("name", ["out.csv", "out", "out.zst", "out.gz", ".jsonl"])
    def test_unknown_endings_are_an_error(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"unknown ending.*\.jsonl\.zst"):
            run(tmp_path, write(tmp_path / "in.jsonl", [pair(0)]), output=name)

    def test_what_exists_and_what_is_read_is_not_replaced(self, tmp_path: Path) -> None:
        path = write(tmp_path / "in.jsonl", [pair(0)])
        (tmp_path / "link.jsonl").symlink_to(path)
        for name in ("in.jsonl", "link.jsonl"):
            with pytest.raises(ConfigError, match="is one of the datasets"):
                run(tmp_path, path, output=name, overwrite=True)
        run(tmp_path, path)
        with pytest.raises(ConfigError, match=r"exists\..*--overwrite"):
            run(tmp_path, path)
        (tmp_path / "out.jsonl").write_text("old")
        assert len(rows_in(run(tmp_path, path, overwrite=True).output)) == 1

    @pytest.mark.parametrize("there", ['{"mine": 1}', "[]", "not JSON", "a folder", "a broken link"])
    def test_only_a_manifest_of_ours_is_replaced(self, tmp_path: Path, there: str) -> None:
        path, manifest = write(tmp_path / "in.jsonl", [pair(0)]), tmp_path / "out.jsonl.manifest.json"
        if there == "a folder":
            manifest.mkdir()
        elif there == "a broken link":
            manifest.symlink_to(tmp_path / "nothing")
        else:
            manifest.write_text(there)
        with pytest.raises(ConfigError, match=r"its manifest goes to .*out\.jsonl\.manifest\.json, .*Move that away"):
            run(tmp_path, path, overwrite=True)
        assert not (tmp_path / "out.jsonl").exists()
        assert manifest.is_dir() or manifest.is_symlink() or manifest.read_text() == there

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=str
    )
    def test_a_signal_leaves_nothing_behind(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        number: signal.Signals,
        status: int,
    ) -> None:
        path = write(tmp_path / "in.jsonl", [pair(0)])
        monkeypatch.setattr(RowFile, "write", lambda *_: signal.raise_signal(number))
        with pytest.raises(SystemExit) as ended:
            main(["data", "convert", str(path), "--output", str(tmp_path / "out.jsonl")])
        assert ended.value.code == status
        how = "interrupted" if status == 130 else f"stopped by {number.name}"
        assert capsys.readouterr().err.strip() == f"{how}. The same command begins anew."
        assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]

    def test_a_file_that_changes_while_it_is_read_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "in.jsonl", [pair(0)])
        told = iter(["one", "another"])
        monkeypatch.setattr("rewardlab.curation.files.reading.fingerprint", lambda _: next(told))
        with pytest.raises(DataError, match=r"in\.jsonl changed while it was read"):
            run(tmp_path, path)

    def test_the_header_of_gzip_holds_neither_time_nor_name(self, tmp_path: Path) -> None:
        done = run(tmp_path, write(tmp_path / "in.jsonl", [pair(0)]), output="out.jsonl.gz")
        content = done.output.read_bytes()
        assert content[3:8] == bytes(5)
        assert gzip.decompress(content).endswith(b"}\n")
