"""`rewardlab gold label`: the numbers of `rewardlab score`, whatever is killed, away or spoiled on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faulty_proxy import Faults, spoiling
from killing import killed_while_keeping, run_program
from reward_models import save_tiny, served
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError, EndpointError
from rewardlab.gold import reward_models as reward_models_module
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.run import Labelled, label
from rewardlab.gold.proxies import model_in, proxy_scores
from rewardlab.gold.scoring import ScoringConfig

NUM = 20
PLACES = [at if at in (0, 4, 9) else pytest.param(at, marks=pytest.mark.slow) for at in range(10)]
"""Results after which a run is ended: none, some in the middle and as many as are tried; the others for long."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gold") / "model")


@pytest.fixture(scope="module")
def another(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gold") / "another", seed=5)


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    rows = [
        {
            "id": f"row {number}",
            "prompt": [{"role": "user", "content": f"question {number}"}],
            "responses": [f"answer {number} {'a' * (k + 1)}" for k in range(3)] + ["the same", "the same"],
        }
        for number in range(NUM)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_models_module, "REPLIES_AT_A_TIME", 8)
    monkeypatch.setattr("rewardlab.client.http.MAX_WAIT_S", 0.01)


def config(folder: Path | str, samples: Path, output: Path, *, scoring: dict[str, Any] | None = None, **more: Any):
    return LabelConfig(
        model=str(folder),
        output=output,
        rows=InputConfig(input=(samples,)),
        scoring=ScoringConfig(**(scoring or {})),
        **more,
    )


def content(found: Labelled) -> tuple[bytes, bytes]:
    return found.place.rows.read_bytes(), found.place.twin.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(folder: Path, samples: Path, tmp_path_factory) -> tuple[bytes, bytes]:
    """What a run writes that nothing disturbs."""
    return content(label(config(folder, samples, tmp_path_factory.mktemp("whole") / "labels.jsonl")))


def numbers(path: Path) -> list[list[float]]:
    found: list[list[float]] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_the_scores_are_those_of_rewardlab_score(folder, samples, tmp_path, undisturbed) -> None:
    found = label(config(folder, samples, tmp_path / "labels.jsonl"))
    assert content(found) == undisturbed
    main(["score", "--model", str(folder), "--input", str(samples), "--output", str(tmp_path / "scored.jsonl")])
    scored = [json.loads(line)["scores"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert numbers(found.place.twin) == [pytest.approx(row, abs=1e-4) for row in scored]
    rows = list(read_gold_rows(found.place.rows, labelled=True))
    assert [list(row.gold or ()) for row in rows] == numbers(found.place.twin)
    assert all(row.gold[3] == row.gold[4] for row in rows), "equal replies have one score"
    assert len({score for row in rows for score in row.gold}) > NUM * 3


def test_all_digits_of_a_score_are_kept(undisturbed) -> None:
    scores = [score for row in json.loads(undisturbed[1]) for score in row]
    import numpy as np

    assert all(float(np.float32(score)) == score for score in scores)


PREPARATION = """
import rewardlab.gold.labelling.run, rewardlab.serve.engine.local
from rewardlab.gold import reward_models
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification
reward_models.REPLIES_AT_A_TIME = 8
"""


@pytest.mark.slow
def test_killed_again_and_again_it_writes_what_a_run_in_one_piece_writes(
    folder, samples, tmp_path, undisturbed
) -> None:
    output = tmp_path / "labels.jsonl"
    words = ["gold", "label", "--model", str(folder), "--input", str(samples), "--output", str(output)]
    killed = run_program(killed_while_keeping(PREPARATION, at=2), ["3", *words], {**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.stdout.splitlines() == [f"{-signal.SIGKILL} False"] * 3, killed.stdout + killed.stderr
    kept = (tmp_path / ".labels.jsonl.partial" / "kept.jsonl").read_text().splitlines()
    assert len(kept) >= 3 * 4
    assert content(label(config(folder, samples, output))) == undisturbed
    assert not (tmp_path / ".labels.jsonl.partial").exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", PLACES)
def test_ended_at_any_of_ten_places_it_goes_on(folder, samples, tmp_path, undisturbed, monkeypatch, at) -> None:
    from rewardlab.gold.kept_results import Kept

    add, left = Kept.add, [at]

    def ending(self, results):
        if left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt
        left[0] -= 1
        add(self, results)

    monkeypatch.setattr(Kept, "add", ending)
    with pytest.raises(KeyboardInterrupt):
        label(config(folder, samples, tmp_path / "labels.jsonl"))
    assert content(label(config(folder, samples, tmp_path / "labels.jsonl"))) == undisturbed


# --- servers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


def by(url: str, *others: str) -> dict[str, Any]:
    return {"backend": "http", "url": (url, *others)}


@pytest.mark.slow
def test_a_server_gives_the_scores_of_its_folder_and_its_tokens(folder, url, samples, tmp_path, undisturbed) -> None:
    found = label(config("", samples, tmp_path / "labels.jsonl", scoring=by(url)))
    assert found.tokens == label(config(folder, samples, tmp_path / "here.jsonl")).tokens > 20 * NUM
    assert found.tokens_per_s > 0
    wanted = json.loads(undisturbed[1])
    assert numbers(found.place.twin) == [pytest.approx(row, abs=1e-4) for row in wanted]


@pytest.mark.parametrize("fault", ["busy", "drop", "nan", "null", "short", 0.2])
def test_faults_that_pass_change_nothing(url, samples, tmp_path, undisturbed, fault) -> None:
    # The first requests are those of the canaries.
    faults = Faults(coming=[None, None, fault, None, fault])
    with spoiling(url, faults) as spoiled:
        found = label(config("", samples, tmp_path / "labels.jsonl", scoring=by(spoiled), max_error_fraction=1))
    assert found.counts["errors"] == 0 or fault == "null"
    wanted = json.loads(undisturbed[1])
    if found.counts["errors"]:
        found = label(config("", samples, tmp_path / "labels.jsonl", scoring=by(url)))
    assert numbers(found.place.twin) == [pytest.approx(row, abs=1e-4) for row in wanted]
    assert fault in faults.met


@pytest.mark.slow
def test_a_server_that_is_gone_keeps_what_is_scored(url, samples, tmp_path, undisturbed, log, monkeypatch) -> None:
    from rewardlab.client.config import ClientConfig

    monkeypatch.setattr(ClientConfig, "__init__", _with_few_attempts(ClientConfig.__init__))
    gone = Faults(coming=[None] * 5 + ["drop"] * 10_000)
    with spoiling(url, gone) as dying, pytest.raises(EndpointError, match="what is finished is kept"):
        label(config("", samples, tmp_path / "labels.jsonl", scoring=by(dying)))
    assert "results are kept in" in log.text
    found = label(config("", samples, tmp_path / "labels.jsonl", scoring=by(url)))
    assert numbers(found.place.twin) == [pytest.approx(row, abs=1e-4) for row in json.loads(undisturbed[1])]


def _with_few_attempts(init):
    return lambda self, **settings: init(self, **{**settings, "attempts": 1})


@pytest.mark.slow
def test_two_servers_of_different_models_are_refused(url, another, samples, tmp_path) -> None:
    with served(another) as other, pytest.raises(ConfigError, match="different models"):
        label(config("", samples, tmp_path / "labels.jsonl", scoring=by(url, other)))


@pytest.mark.slow
def test_two_servers_of_one_model_share_the_rows(folder, url, samples, tmp_path, undisturbed) -> None:
    with served(folder) as other:
        found = label(config("", samples, tmp_path / "labels.jsonl", scoring=by(url, other)))
    assert numbers(found.place.twin) == [pytest.approx(row, abs=1e-4) for row in json.loads(undisturbed[1])]


# --- what is asked for -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_model_is_refused_and_with_overwrite_scores_everything_anew(folder, another, samples, tmp_path) -> None:
    first = content(label(config(folder, samples, tmp_path / "labels.jsonl")))
    with pytest.raises(ConfigError, match="model was .*, now"):
        label(config(another, samples, tmp_path / "labels.jsonl"))
    assert content(label(config(another, samples, tmp_path / "labels.jsonl", overwrite=True))) != first


def test_more_rows_keep_the_scores_that_are_there(folder, samples, tmp_path, monkeypatch) -> None:
    lines = samples.read_text().splitlines(keepends=True)
    grown = tmp_path / "samples.jsonl"
    grown.write_text("".join(lines[:5]))
    label(config(folder, grown, tmp_path / "labels.jsonl"))
    grown.write_text("".join(lines[:8]))
    asked = _asked_for(monkeypatch)
    label(config(folder, grown, tmp_path / "labels.jsonl", overwrite=True))
    assert sorted(asked) == [f"question {number}" for number in (5, 6, 7)]


def _asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    ask = reward_models_module.RewardModel.ask

    async def noting(self, items):
        asked.extend(item.prompt[-1].content for item in items)
        return await ask(self, items)

    monkeypatch.setattr(reward_models_module.RewardModel, "ask", noting)
    return asked


def test_a_complete_output_loads_no_model(folder, samples, tmp_path, monkeypatch) -> None:
    label(config(folder, samples, tmp_path / "labels.jsonl"))
    asked = _asked_for(monkeypatch)
    assert label(config(folder, samples, tmp_path / "labels.jsonl")).was_complete
    assert not asked


def test_a_changed_output_is_noticed(folder, samples, tmp_path) -> None:
    found = label(config(folder, samples, tmp_path / "labels.jsonl"))
    found.place.rows.write_text(found.place.rows.read_text().replace("row 3", "row 4"))
    with pytest.raises(DataError, match="changed after it was written"):
        label(config(folder, samples, tmp_path / "labels.jsonl"))


@pytest.mark.slow
def test_a_reply_above_the_limit_is_told_and_costs_no_other(folder, samples, tmp_path) -> None:
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[2]["responses"][1] = "basil " * 200
    rows[4]["responses"][0] = None
    longer = tmp_path / "longer.jsonl"
    longer.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = label(config(folder, longer, tmp_path / "labels.jsonl", scoring={"overlong": "refuse"}))
    by_id = {row.id: row for row in read_gold_rows(found.place.rows, labelled=True)}
    assert "above the limit of 256" in by_id["row 2"].gold_errors["1"]
    assert by_id["row 4"].gold_errors == {"0": "no reply was sampled"}
    assert found.counts["errors"] == 2
    assert by_id["row 4"].gold[1:] == tuple(numbers(found.place.twin)[4][1:])


@pytest.mark.slow
def test_a_smaller_limit_is_that_of_the_labels_alone(folder, samples, tmp_path) -> None:
    found = label(config(folder, samples, tmp_path / "labels.jsonl", scoring={"max_length": 30, "overlong": "cut"}))
    whole = label(config(folder, samples, tmp_path / "whole.jsonl"))
    assert numbers(found.place.twin) != numbers(whole.place.twin)
    assert found.counts["cut"] > 0


@pytest.mark.slow
def test_parts_together_are_the_whole(folder, samples, tmp_path, undisturbed) -> None:
    for number in (1, 2, 3):
        label(config(folder, samples, tmp_path / "labels.jsonl", shard=f"{number}/3"))
    rows = [row.as_json() for row in read_gold_rows(tmp_path / "labels.jsonl")]
    assert [row["id"] for row in rows] == [f"row {number}" for number in range(NUM)]
    wanted = json.loads(undisturbed[1])
    assert [row["gold"] for row in rows] == [pytest.approx(scores, abs=1e-4) for scores in wanted]


def test_a_column_that_cannot_be_written_is_said_before_anything_is_scored(folder, tmp_path, monkeypatch) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "q", "responses": ["a", "b"], "weight": NaN}\n')
    asked = _asked_for(monkeypatch)
    with pytest.raises(DataError, match=r"samples\.jsonl:1: cannot be written as JSON"):
        label(config(folder, path, tmp_path / "labels.jsonl"))
    assert not asked


def test_replies_that_cannot_be_encoded_cost_no_other(folder, tmp_path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(
        '{"prompt": "q", "responses": ["a", "b \\ud83d"]}\n{"prompt": "q \\ud83d", "responses": ["a", "b"]}\n'
    )
    found = label(config(folder, path, tmp_path / "labels.jsonl", max_error_fraction=1))
    assert [[score is None for score in row] for row in numbers(found.place.twin)] == [[False, True], [True, True]]


def test_flags_that_would_change_nothing_are_refused(folder, samples, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--max-length: only with --backend local"):
        ScoringConfig(backend="http", url=("http://x",), max_length=512)
    with pytest.raises(ConfigError, match="--keep-answers: only with --backend chat"):
        config(folder, samples, tmp_path / "labels.jsonl", judge=JudgeConfig(keep_answers=True))


def test_files_and_flags_of_the_scripts_that_it_replaces(folder, tmp_path, capsys) -> None:
    (tmp_path / "rm_prompts.json").write_text(json.dumps(["one", "two"]))
    replies = [{"response_1": "a", "response_2": "b"}] * 2
    (tmp_path / "rm_sft.json").write_text(json.dumps(replies))
    words = ["gold", "label", "--model_name", str(folder), "--num_responses", "2", "--batch_size", "256"]
    for name in ("prompts", "responses"):
        words += [f"--{name}_path", str(tmp_path / {"prompts": "rm_prompts.json", "responses": "rm_sft.json"}[name])]
    main([*words, "--target_path", str(tmp_path / "rm_rewards.json")])
    found = numbers(tmp_path / "rm_rewards.json")
    assert [len(row) for row in found] == [2, 2]
    assert "4 gold scores of 2 prompts" in capsys.readouterr().out


@pytest.mark.slow
def test_scores_of_proxies_are_computed_or_read(folder, another, samples, tmp_path) -> None:
    labelled = label(config(folder, samples, tmp_path / "labels.jsonl"))
    rows = list(read_gold_rows(labelled.place.rows))
    sources = [f"same={folder}", f"other={another}", f"file={labelled.place.twin}", f"rows={labelled.place.rows}"]
    found = {proxy.name: proxy.scores for proxy in proxy_scores(sources, rows, tmp_path / "scores")}
    gold = tuple(row.gold for row in rows)
    assert found["file"] == found["rows"] == gold
    assert found["same"] == gold
    assert found["other"] != gold


def test_a_folder_of_a_run_may_hold_others_that_are_called_alike(tmp_path) -> None:
    for name in ("step_2", "step_10", "step_final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward_spec.json").write_text("{}")
    assert model_in(tmp_path) == tmp_path / "step_10"


@pytest.mark.slow
def test_scores_of_other_rows_are_refused(folder, samples, tmp_path) -> None:
    labelled = label(config(folder, samples, tmp_path / "labels.jsonl"))
    rows = list(read_gold_rows(labelled.place.rows))
    with pytest.raises(DataError, match="scores of 20 rows, and 19 have gold scores"):
        proxy_scores([str(labelled.place.twin)], rows[1:], tmp_path)
    with pytest.raises(DataError, match="its replies are not those of"):
        proxy_scores([str(labelled.place.rows)], rows[::-1], tmp_path)
    with pytest.raises(ConfigError, match="another proxy is called"):
        proxy_scores([str(labelled.place.rows), str(labelled.place.twin)], rows, tmp_path)
    with pytest.raises(ConfigError, match="is neither a reward-model folder"):
        proxy_scores([str(tmp_path)], rows, tmp_path)


def test_a_language_model_is_no_gold(tmp_path, samples, capsys) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for model in (tmp_path / "chat", "smollm2-135m-instruct"):
        with pytest.raises(ConfigError, match="is a language model, and gives no scores"):
            label(LabelConfig(model=str(model), output=tmp_path / "x.jsonl", rows=InputConfig(input=(samples,))))
    with pytest.raises(SystemExit):
        main(["gold", "label", "--output", str(tmp_path / "x.jsonl")])
    assert "--model is missing: name the folder of the gold reward model" in capsys.readouterr().err
