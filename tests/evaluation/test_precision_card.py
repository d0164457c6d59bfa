"""Runs in half precision close with a precision card, and say in which precision every number was computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import runs
from common import write_pairs
from rewardlab.analysis.precision import MEASURES, PrecisionCard
from rewardlab.artifact import save as save_module
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ModelError
from rewardlab.core.files import read_jsonl
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.distributed.ranks import Ranks
from rewardlab.evaluation import precision as precision_module
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import EvalResult, evaluate_folder
from rewardlab.score import Scorer
from rewardlab.training import closing, closing_card
from rewardlab.training.loop.selection import Selection
from rewardlab.training.run import train

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=4, eval_every=2, baselines=False)


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "held-out.jsonl", 60, offset=500)


def test_a_run_in_bf16_closes_with_a_card_of_its_saved_model(base_model, pairs_file, held_out, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", precision="bf16", test_dataset=(str(held_out),))
    result = train(config)
    assert result.card is not None
    assert list(result.card.measures) == ["float32", "bf16", "nearest bf16"]
    assert result.card.num_preferences == 60, "the test data, all of them"
    accuracy = result.card.measures["float32"]["accuracy"]
    assert accuracy.value == result.test.overall.estimates["eval_accuracy"].value
    written = json.loads((tmp_path / "run/evals/precision.json").read_text())
    assert written["measures"]["bf16"]["margin error"]["value"] == result.card.measures["bf16"]["margin error"].value
    assert 0 < result.card.measures["bf16"]["margin error"].value < 0.2
    assert result.computed_in["before"] == "bf16, as it trains"
    assert result.computed_in["after"] == "float32"


@pytest.mark.slow
def test_a_short_run_in_float32_has_one_if_it_is_asked_for(base_model, pairs_file, tmp_path, monkeypatch):
    """And a run that is resumed without it has none of the model that it had chosen before."""
    config = config_for(base_model, pairs_file, tmp_path / "run", precision_card="always")
    result = train(config)
    assert list(result.card.measures) == ["float32", "bf16", "nearest bf16"]
    assert 0 < result.card.measures["bf16"]["margin error"].value < 0.2
    assert result.computed_in["before"] == "float32"
    assert (tmp_path / "run/evals/precision.json").exists()
    again = train(config.replace(precision_card="auto", resume="auto"))
    assert again.card is None
    assert not (tmp_path / "run/evals/precision.json").exists()
    enough = 4 * config.run.batch_size
    monkeypatch.setattr(closing, "CARD_WORTH", enough)
    assert closing.wants_card(config.replace(precision_card="auto"), 4)
    assert not closing.wants_card(config.replace(precision_card="auto"), 3)
    assert not closing.wants_card(config.replace(precision_card="never"), 4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ModelError("no range")])
def test_a_run_whose_card_cannot_be_made_ends_well_without_one(
    base_model, pairs_file, tmp_path, monkeypatch, log, error
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(closing_card, "judge_precisions", fail)
    result = train(config_for(base_model, pairs_file, tmp_path / "run", precision_card="always", steps=1))
    assert result.card is None
    assert result.selected is not None
    assert (
        f"no precision card of the chosen model (--precision-card never leaves it out): {type(error).__name__}: {error}"
        in log.text
    )


@dataclass(frozen=True, kw_only=True)
class Threads(Ranks):
    """Ranks that are threads of this process."""

    barrier: Barrier
    board: dict[int, object]

    def gather(self, thing: Any) -> list[Any]:
        self.board[self.rank] = thing
        self.barrier.wait(timeout=60)
        things = [self.board[rank] for rank in range(self.size)]
        self.barrier.wait(timeout=60)
        return things


@pytest.mark.parametrize("before", [None, 0, 1, 2])
def test_a_rank_that_cannot_make_its_card_tells_the_others(base_model, pairs_file, tmp_path, monkeypatch, log, before):
    """Before either exchange of scores, or after the last; None: no rank fails."""

    def made(*_: object, ranks: Any, **__: object) -> Any:
        for number in range(3):
            if ranks.rank == 1 and number == before:
                raise torch.OutOfMemoryError("no room")
            if number < 2:
                assert ranks.gather(ranks.rank) == [0, 1]
        return Mock(spec=PrecisionCard)

    monkeypatch.setattr(closing_card, "judge_precisions", made)
    monkeypatch.setattr(closing_card, "write_card", lambda *_: None)
    config = config_for(base_model, pairs_file, tmp_path / "run")
    barrier, board = Barrier(2), {}
    given = (config, Mock(spec=Scorer), [], Mock(spec=EvalResult, rows=[]), "float32")
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(
                closing_card.card_of_chosen,
                *given,
                Threads(rank=rank, size=2, barrier=barrier, board=board),
                is_sharded=False,
            )
            for rank in range(2)
        ]
        cards = [one.result() for one in waiting]
    assert [card is None for card in cards] == [before is not None] * 2
    assert log.text.count("leaves it out): OutOfMemoryError: no room") == (before is not None)


@pytest.mark.slow
def test_a_precision_that_is_another_model_is_a_warning_in_log_record_and_result(
    base_model, pairs_file, held_out, tmp_path, monkeypatch, log
):
    real = precision_module.computing_in

    @contextmanager
    def ruined(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """As if half precision took everything that was learned."""
        with real(model, dtype), torch.no_grad():
            model.head.weight.mul_(-3)
            yield
            model.head.weight.div_(-3)

    monkeypatch.setattr(precision_module, "computing_in", ruined)
    settings = {"precision": "bf16", "test_dataset": (str(held_out),), "steps": 10, "lr": 1e-2}
    result = train(config_for(base_model, pairs_file, tmp_path / "run", **settings))
    assert result.warnings[-1].name == "other_precision"
    assert "in bf16 (root mean square)" in result.warnings[-1].text
    assert result.warnings[-1].step == 10
    assert "WARNING  other_precision: margins are off by" in log.text
    recorded = [row for _, row in read_jsonl(tmp_path / "run/warnings.jsonl")]
    assert recorded == [sign.as_dict() for sign in result.warnings]


@pytest.mark.slow
def test_the_report_says_the_precision_of_every_number(base_model, pairs_file, held_out, tmp_path, capsys):
    flags = f"--model {base_model} --dataset {pairs_file} --test-dataset {held_out} --output-dir {tmp_path / 'run'}"
    more = "--max-seq-len 128 --steps 2 --precision bf16 --report-to none --save-dtype bfloat16"
    main(["train", *flags.split(), *more.split()])
    report = " ".join(capsys.readouterr().out.split())
    live = "computed: length only and bag of words in float64; before in bf16, as it trains;"
    assert report.count(f"{live} after in float32 by the saved bfloat16 weights") == 2, "one a table"
    assert (
        "Precision card: the saved model, whose weights are bf16, in float32 and in bf16 (all 60 preferences)" in report
    )


@pytest.mark.slow
def test_eval_draws_a_sample_for_its_card_with_its_seed(base_model, tmp_path, monkeypatch, capsys):
    from common import make_model

    renderer = build_renderer(load_tokenizer(str(base_model)), RenderingConfig(max_seq_len=128))
    save_reward_model(tmp_path / "rm", make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    many = write_pairs(tmp_path / "many.jsonl", 40)
    monkeypatch.setattr(precision_module, "MOST", 12)
    line = f"eval --model {tmp_path / 'rm'} --dataset {many} --output-dir {tmp_path / 'out'}"
    main([*line.split(), "--seed", "5"])
    said = capsys.readouterr().out
    assert "(12 of 40 preferences, drawn with seed 5)" in " ".join(said.split())
    assert "computed in fp32" in said
    first = json.loads((tmp_path / "out/precision.json").read_text())
    assert set(first["measures"]["nearest bf16"]) == set(MEASURES)
    for seed, same in ((5, True), (6, False)):
        config = EvalConfig.of(
            model=str(tmp_path / "rm"), dataset=(str(many),), output_dir=tmp_path / "again",
            precision="bf16", seed=seed, overwrite=True,
        )  # fmt: skip
        evaluate_folder(config)
        again = json.loads((tmp_path / "again/precision.json").read_text())
        assert (again["measures"] == first["measures"]) == same


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        {"save_dtype": "bfloat16"},
        pytest.param({"precision": "bf16", "lora": True, "lr": 1e-2}, marks=pytest.mark.slow),
    ],
)
def test_the_evaluations_on_the_way_are_compared_with_the_saved_model(base_model, pairs_file, tmp_path, changes):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", eval_fraction=0.3, **changes))
    assert result.live is not None
    (name,) = set(result.live.measures) - {"float32"}
    assert name == {"bf16": "bf16, as it trains", "fp16": "fp16, as it trains"}.get(
        changes.get("precision"), "float32, as it trains"
    )
    # The other numbers are those of the step's own evaluation, and of the closing table.
    step = 4 if result.best_step is None else result.best_step
    on_the_way = json.loads((tmp_path / f"run/evals/step_{step}.metrics.json").read_text())["all"]["estimates"]
    assert result.live.measures[name]["NLL"].value == pytest.approx(on_the_way["eval_loss"]["value"], abs=1e-12)
    closing = result.selected.overall.estimates["eval_accuracy"].value
    assert result.live.measures["float32"]["accuracy"].value == closing
    assert 0 < result.live.measures[name]["margin error"].value < 0.2
    written = json.loads((tmp_path / "run/evals/live.json").read_text())
    assert written["preferences"] == written["available"] == result.live.num_preferences
    assert name in written["measures"]


@pytest.mark.slow
def test_live_numbers_of_another_model_than_the_saved_one_are_a_warning(
    base_model, pairs_file, held_out, tmp_path, monkeypatch, log
):
    """To the nearest, the forward pass hardly sees what was learned."""
    from rewardlab.training.loop.reward_judge import RewardJudge

    real = RewardJudge._judge

    def blind(judge, groups, budget, progress):
        with torch.no_grad():
            judge.model.head.weight.mul_(-1)
        try:
            return real(judge, groups, budget, progress)
        finally:
            with torch.no_grad():
                judge.model.head.weight.mul_(-1)

    monkeypatch.setattr(RewardJudge, "_judge", blind)
    settings = {"precision": "bf16", "eval_dataset": (str(held_out),), "steps": 10, "lr": 1e-2}
    result = train(config_for(base_model, pairs_file, tmp_path / "run", **settings))
    assert "live_differs" in [sign.name for sign in result.warnings]
    assert "other_precision" not in [sign.name for sign in result.warnings]
    assert "in bf16, as it trains (root mean square)" in log.text


@pytest.mark.slow
def test_the_report_shows_the_live_numbers_beside_the_saved_models(base_model, pairs_file, tmp_path, capsys):
    flags = f"--model {base_model} --dataset {pairs_file} --output-dir {tmp_path / 'run'} --eval-fraction 0.3"
    more = "--max-seq-len 128 --steps 2 --precision bf16 --report-to none"
    main(["train", *flags.split(), *more.split()])
    report = " ".join(capsys.readouterr().out.split())
    assert "Live evaluation: the model as it was judged on the way (bf16, as it trains), beside its" in report


@pytest.mark.slow
def test_the_dtype_is_that_of_the_chosen_folder_whatever_the_run_was_told_later(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", eval_fraction=0.3, save_dtype="bfloat16")
    assert train(config).live is not None
    again = train(config.replace(save_dtype="float32", resume="auto"))  # a finished run is judged again
    assert again.live is not None
    assert again.computed_in["after"] == "float32 by the saved bfloat16 weights"
    assert (tmp_path / "run/evals/live.json").is_file()


@pytest.mark.slow
def test_a_live_model_of_which_nothing_was_chosen_is_compared_at_the_last_step(
    base_model, pairs_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(Selection, "offer", lambda *_, **__: False)
    result = train(config_for(base_model, pairs_file, tmp_path / "run", eval_fraction=0.3, precision="bf16"))
    assert result.best is None
    (name,) = set(result.live.measures) - {"float32"}
    last = json.loads((tmp_path / "run/evals/step_4.metrics.json").read_text())["all"]["estimates"]
    assert result.live.measures[name]["NLL"].value == pytest.approx(last["eval_loss"]["value"], abs=1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("moved", "told"), [(0.05, False), (0.3, True)])
def test_live_and_saved_scores_are_told_apart_beyond_what_the_arithmetic_leaves_open(
    base_model, pairs_file, tmp_path, monkeypatch, log, moved, told
):
    real = save_module.live_scores
    monkeypatch.setattr(save_module, "live_scores", lambda *given: [score + moved for score in real(*given)])
    train(config_for(base_model, pairs_file, tmp_path / "run", precision="bf16", attention_backend="segments"))
    assert ("saved scores differ from the live ones by up to" in log.text) == told
