"""The output of a stage: what it may replace, and what becomes of it if a run ends at an odd place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chat_server import ChatServer, chatting
from killing import ended_process
from reward_models import save_tiny
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.gold import stage as stage_module
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.kept_results import Kept
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.run import Labelled, label
from rewardlab.gold.sampling.config import DrawConfig, SampleConfig, SamplerConfig
from rewardlab.gold.sampling.run import sample
from rewardlab.gold.scoring import ScoringConfig
from rewardlab.gold.stage import Place, claimed
from rewardlab.serve.file_scoring import backends


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gold") / "model")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    rows = [{"prompt": f"question {number}", "responses": [f"a {number}", "b"]} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def url() -> Iterator[str]:
    with chatting(ChatServer()) as address:
        yield address


def labels(folder: Path, samples: Path, output: str = "labels.jsonl", **more) -> LabelConfig:
    return LabelConfig(model=str(folder), output=samples.parent / output, rows=InputConfig(input=(samples,)), **more)


def content(found: Labelled) -> tuple[bytes, bytes]:
    return found.place.rows.read_bytes(), found.place.twin.read_bytes()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("failing", ["rewardlab.gold.labelling.run.write_rewards", "write_summed_json"])
@pytest.mark.parametrize("had_errors", [False, True])
def test_ended_between_its_files_it_goes_on(folder, samples, monkeypatch, failing, had_errors) -> None:
    whole = content(label(labels(folder, samples, "whole.jsonl")))
    if had_errors:
        with monkeypatch.context() as patched:
            patched.setattr("rewardlab.serve.file_scoring.backends.entry", lambda *_, **__: "not today")
            label(labels(folder, samples, max_error_fraction=1))

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failing if "." in failing else f"{stage_module.__name__}.{failing}", ended)
        with pytest.raises(KeyboardInterrupt):
            label(labels(folder, samples))
    assert content(label(labels(folder, samples))) == whole
    assert label(labels(folder, samples)).was_complete
    assert not Place.of(samples.parent / "labels.jsonl").partial.exists()


def test_an_interrupt_while_finished_work_is_opened_costs_nothing(tmp_path, monkeypatch) -> None:
    place = Place.of(tmp_path / "x.jsonl")
    with claimed(place) as kept:
        kept.add([("a", {"score": 1.0})])
        kept.is_done = False

    def interrupted(_: Kept) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Kept, "_open", interrupted)
        with pytest.raises(KeyboardInterrupt), claimed(place):
            pass
    with claimed(place) as kept:
        assert kept.get("a") == {"score": 1.0}


def test_a_changed_output_can_be_made_again_and_is_not_taken_over(folder, samples) -> None:
    whole = content(label(labels(folder, samples)))
    path = samples.parent / "labels.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["gold"] = [100.0, -100.0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"labels\.jsonl: it was changed .*--overwrite"):
        label(labels(folder, samples))
    assert content(label(labels(folder, samples, overwrite=True))) == whole


def test_a_changed_twin_is_noticed(folder, samples) -> None:
    label(labels(folder, samples)).place.twin.write_text("[[1, 2]]")
    with pytest.raises(DataError, match=r"labels\.json: it was changed"):
        label(labels(folder, samples))


def test_files_of_somebody_else_are_not_replaced(folder, samples) -> None:
    theirs = samples.parent / "rewards.json"
    theirs.write_text("[[1, 2]]")
    with pytest.raises(ConfigError, match=r"rewards\.json: exists"):
        label(labels(folder, samples, "rewards.json"))
    assert theirs.read_text() == "[[1, 2]]"
    label(labels(folder, samples, "rewards.json", overwrite=True))
    assert len(json.loads(theirs.read_text())) == 4


def test_what_is_read_is_never_replaced(folder, samples, url, tmp_path) -> None:
    before = samples.read_bytes()
    with pytest.raises(ConfigError, match=r"samples\.jsonl: is read"):
        label(labels(folder, samples, "samples.json", overwrite=True))
    assert samples.read_bytes() == before

    (tmp_path / "prompts.json").write_text('["one", "two"]')
    (tmp_path / "replies.json").write_text('[{"response_1": "a", "response_2": "b"}]')
    read = InputConfig(prompts_path=tmp_path / "prompts.json", responses_path=tmp_path / "replies.json")
    with pytest.raises(ConfigError, match=r"replies\.json: is read"):
        label(LabelConfig(model=str(folder), output=tmp_path / "replies.jsonl", rows=read, overwrite=True))
    with pytest.raises(ConfigError, match=r"prompts\.json: is read"):
        sample(
            SampleConfig(
                prompts=str(tmp_path / "prompts.json"),
                output=tmp_path / "prompts.jsonl",
                draw=DrawConfig(max_tokens=4),
                sampler=SamplerConfig(backend="http", url=(url,)),
            )
        )


def test_a_folder_in_place_of_the_output_is_said_before_any_work(folder, samples) -> None:
    (samples.parent / "labels.json").mkdir()
    with pytest.raises(ConfigError, match=r"labels\.json: is a folder"):
        label(labels(folder, samples, overwrite=True))


def test_what_was_cut_is_counted_after_errors_too(folder, samples, monkeypatch) -> None:
    before = [{"role": "user", "content": "basil " * 300}, {"role": "assistant", "content": "Well."}]
    asked = {"role": "user", "content": "question"}
    rows = [{"prompt": [*before, asked], "responses": ["a", "b"]}, {"prompt": [asked], "responses": ["a", "b"]}]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scoring, entry = ScoringConfig(overlong="cut"), backends.entry
    with monkeypatch.context() as patched:
        patched.setattr(
            backends, "entry", lambda score, *cut, spread=None: entry(score, *cut) if any(cut) else "not today"
        )
        first = label(labels(folder, samples, scoring=scoring, max_error_fraction=1))
    assert (first.counts["errors"], first.counts["cut"]) == (2, 2)
    then = label(labels(folder, samples, scoring=scoring))
    assert (then.counts["errors"], then.counts["cut"]) == (0, 2)


def test_what_a_kill_left_of_the_files_of_an_output_goes_and_of_others_stays(tmp_path) -> None:
    place, gone = Place.of(tmp_path / "labels.jsonl"), ended_process()
    torn = [tmp_path / f".{path.name}.tmp-{gone}" for path in (place.rows, place.twin, place.manifest, place.partial)]
    others = [tmp_path / f"{name}.tmp-{gone}" for name in (".labels-00001-of-00002.jsonl", ".other.jsonl")]
    for path in (*torn, *others):
        path.touch()
    with claimed(place):
        pass
    assert [path for path in torn if path.exists()] == []
    assert all(path.exists() for path in others)


def test_what_another_run_kept_stays_where_the_output_is_complete(folder, samples) -> None:
    """Such as of one with other settings and --overwrite that was killed."""
    config = labels(folder, samples)
    label(config)
    place = Place.of(config.output)
    place.partial.mkdir()
    (place.partial / "kept.jsonl").write_text("paid for")
    assert label(config).was_complete
    assert (place.partial / "kept.jsonl").read_text() == "paid for"
