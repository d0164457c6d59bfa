"""Several models judged on one data set, scores used again, slices by columns, and the worst mistakes with texts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from common import make_model, make_tokenizer, write_pairs
from rewardlab.analysis.judgement import Judgement, judge_rows
from rewardlab.analysis.mistakes import margin_of, worst_mistakes
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.commands.parsing import parse_command
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.files import read_jsonl, write_text
from rewardlab.core.types import Comparison, Message, Preference, ScoreRow
from rewardlab.data.config import RenderingConfig
from rewardlab.data.originals import Original
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation import evaluate as evaluate_module
from rewardlab.evaluation import saved as saved_module
from rewardlab.evaluation.config import CalibrateConfig, EvalConfig
from rewardlab.evaluation.evaluate import evaluate_folder
from rewardlab.evaluation.models import judge_folders, names_of
from rewardlab.evaluation.records import TURNS, slices_of
from rewardlab.report.evaluations import read_columns
from rewardlab.report.folder import read_folder
from rewardlab.report.judged import slice_table


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one backbone; the second prefers what the first does not."""
    folder = tmp_path_factory.mktemp("models")
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    for name, sign in (("one", 1), ("other", -1)):
        model = make_model()
        with torch.no_grad():
            model.head.weight.mul_(sign)
        save_reward_model(folder / name / "best", model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return {name: folder / name / "best" for name in ("one", "other")}


@pytest.fixture
def own_cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups were computed, at each call."""
    counts: list[int] = []
    own = saved_module.score_groups

    def counted(model, groups, **settings):
        counts.append(len(groups))
        return own(model, groups, **settings)

    monkeypatch.setattr(saved_module, "score_groups", counted)
    return counts


def config_for(model: Path, data: Path, out: Path, **settings: object) -> EvalConfig:
    """Without a precision card, which tests that are about it ask for."""
    return EvalConfig.of(
        **{"model": str(model), "dataset": (str(data),), "output_dir": out, "precision_card": False, **settings}
    )


@pytest.mark.slow
def test_models_that_come_first_are_judged_in_folders_of_their_own(models, pairs_file, tmp_path, capsys):
    out = tmp_path / "judged"
    main(["eval", *map(str, models.values()), "--dataset", str(pairs_file), "--output-dir", str(out)])
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["one-best", "other-best"]
    metrics = json.loads((out / "models.json").read_text())
    accuracies = [metrics[name]["metrics"]["all"]["estimates"]["eval_accuracy"]["value"] for name in metrics]
    assert sum(accuracies) == pytest.approx(1), "one ranks every pair the other way round"
    for name, accuracy in zip(metrics, accuracies, strict=True):
        assert f"{name}" in printed
        assert f"{accuracy:.3f} [" in printed
        own = json.loads((out / name / "eval.metrics.json").read_text())
        assert own["all"] == metrics[name]["metrics"]["all"]
        assert (own["beta"], own["calibrated"]) == (metrics[name]["beta"], metrics[name]["calibrated"])
    assert printed.count("pairs[all rows]: 40 rows read") == 1
    with pytest.raises(SystemExit):
        main(["eval", *map(str, models.values()), "--dataset", str(pairs_file), "--output-dir", str(out)])
    assert "already holds an evaluation" in capsys.readouterr().err


def test_data_on_which_a_model_is_clearly_worse_than_a_coin_are_told(models, pairs_file, tmp_path, log):
    scorer, rows = load(models["one"]), [row for _, row in read_jsonl(pairs_file)]
    for row in rows:
        first, second = scorer.score_replies(row["prompt"], [row["chosen"], row["rejected"]])
        if first < second:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    write_text(tmp_path / "own.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    for name, path in models.items():
        log.clear()
        evaluate_folder(config_for(path, tmp_path / "own.jsonl", tmp_path / name))
        told = [line for line in log.messages if line.startswith("the accuracy of ")]
        if name == "one":
            assert told == []
        else:
            (line,) = told
            assert line.startswith(f"the accuracy of {path} is 0.000 [0.000, 0.088] on own, below 0.5 by ")
            assert "mean the same reply by `chosen`" in line


@pytest.mark.slow
def test_one_model_that_comes_first_is_the_model_of_the_flag(models, pairs_file, tmp_path):
    folder, data = str(models["one"]), str(pairs_file)
    main(["eval", folder, "--dataset", data, "--output-dir", str(tmp_path / "first")])
    main(["eval", "--model", folder, "--dataset", data, "--output-dir", str(tmp_path / "flag")])
    for name in ("eval.scores.jsonl", "eval.metrics.json", "eval.mistakes.jsonl"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "flag" / name).read_bytes()
    configs = [json.loads((tmp_path / name / "manifest.json").read_text())["config"] for name in ("first", "flag")]
    assert [config.pop("output_dir") for config in configs] == [str(tmp_path / "first"), str(tmp_path / "flag")]
    assert configs[0] == configs[1]
    assert configs[0]["model"] == folder


@pytest.mark.parametrize(
    ("line", "model", "models"),
    [
        ("a --dataset d", "a", ()),
        ("a b --dataset d", "", ("a", "b")),
        ("a --model b --dataset d", "b", ("a",)),
        ("a --models=b --dataset d", "", ("a", "b")),
        ("--model b --dataset d", "b", ()),
    ],
)
def test_no_model_that_is_named_is_lost(line, model, models):
    run = parse_command(EvalConfig, line.split(), "eval").run
    assert (run.model, run.models) == (model, models)


def test_a_second_model_flag_is_refused_where_it_would_take_the_first_ones_place():
    with pytest.raises(
        ConfigError, match="^--model is given 2 times, and takes one model. Name several as --models A B."
    ):
        parse_command(EvalConfig, ["--model", "a", "--dataset", "d", "--model=b"], "eval")


def test_calibrate_takes_one_model():
    assert parse_command(CalibrateConfig, ["a", "--dataset", "d"], "calibrate").run.model == "a"
    with pytest.raises(ConfigError, match="--model a b: takes one value"):
        parse_command(CalibrateConfig, ["a", "b", "--dataset", "d"], "calibrate")


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a/best", "runs/b/best"], ["a-best", "b-best"]),
        (["runs/a/best", "runs/a/step_10"], ["best", "step_10"]),
        (["/x/a/best", "/y/a/best"], ["x-a-best", "y-a-best"]),
        (["odd name/!"], ["_"]),
    ],
)
def test_models_are_named_by_the_parts_that_tell_them_apart(folders, names):
    assert names_of(folders) == dict(zip(names, folders, strict=True))


def test_a_model_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="b/: the model is named twice. Name it once"):
        EvalConfig.of(ensemble=("a", "b", "b/"), dataset="pairs.jsonl")
    with pytest.raises(ConfigError, match="the model is named twice"):
        EvalConfig.of(models=("a", "a"), dataset=("d",))


def test_the_same_model_and_tokens_are_not_scored_again(models, pairs_file, tmp_path, own_cache, scored, log):
    first, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "a", cache_dir=own_cache))
    again, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "b", cache_dir=own_cache))
    assert scored == [40]
    assert list(again.rows) == list(first.rows)
    assert "has scored these 80 replies in fp32 before, so they are not computed again" in log.text
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text())["config"] for name in "ab"]
    assert manifests[0] | {"output_dir": ""} == manifests[1] | {"output_dir": ""}, "also how it was computed"


@pytest.fixture(scope="module")
def asked(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Pairs, and a cache that has the scores that the first model gives them."""
    folder = tmp_path_factory.mktemp("asked")
    data, cache = write_pairs(folder / "pairs.jsonl", 20), str(folder / "cache")
    evaluate_folder(config_for(models["one"], data, folder / "out", cache_dir=cache))
    return data, cache


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("changes", [{"reuse": False}, {"precision": "bf16"}, {"attention": "padded"}, {"limit": 19}])
def test_another_question_is_computed(models, asked, tmp_path, scored, changes):
    data, cache = asked
    evaluate_folder(config_for(models["one"], data, tmp_path / "other", cache_dir=cache, **changes))
    assert len(scored) == 1


@pytest.mark.slow
def test_nothing_is_kept_where_the_cache_is_off(models, pairs_file, tmp_path, scored):
    for name in "ab":
        evaluate_folder(config_for(models["one"], pairs_file, tmp_path / name, cache_dir="none"))
    assert scored == [40, 40]


@pytest.mark.slow
def test_damaged_scores_are_computed_again(models, pairs_file, tmp_path, own_cache, scored, log):
    first, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "a", cache_dir=own_cache))
    (entry,) = Path(own_cache, "scores").glob("*.json")
    text = entry.read_text()
    place = text.index('"scores": "') + len('"scores": "')
    entry.write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])
    again, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "b", cache_dir=own_cache))
    assert scored == [40, 40]
    assert "is damaged" in log.text
    assert list(again.rows) == list(first.rows)


def test_kept_scores_are_no_way_around_a_model_that_was_changed(models, pairs_file, tmp_path, own_cache):
    copy = Path(shutil.copytree(models["one"], tmp_path / "copy"))
    evaluate_folder(config_for(copy, pairs_file, tmp_path / "a", cache_dir=own_cache))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ArtifactError, match="model.safetensors was changed"):
        evaluate_folder(config_for(copy, pairs_file, tmp_path / "b", cache_dir=own_cache))


def test_every_bit_of_a_score_is_kept():
    import numpy as np

    scores = [np.array([1 / 3, np.nan], np.float32), np.array([-np.inf, 1e-40, 2.5], np.float32)]
    again = saved_module._unpacked(saved_module._packed(scores), [2, 3])
    assert [own.tobytes() for own in again] == [own.tobytes() for own in scores]
    with pytest.raises(ValueError, match="5 scores for 6 replies"):
        saved_module._unpacked(saved_module._packed(scores), [2, 4])


def test_the_worst_mistakes_come_with_their_texts(models, pairs_file, tmp_path):
    result, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "out"))
    mistakes = [row for _, row in read_jsonl(tmp_path / "out/eval.mistakes.jsonl")]
    lines = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    wrong = result.overall.sums.decided - result.overall.sums.correct
    assert 0 < len(mistakes) == wrong, "no ties, and fewer than fifty"
    margins = [row["margin"] for row in mistakes]
    assert margins == sorted(margins)
    assert all(margin < 0 for margin in margins)
    for row in mistakes:
        line = lines[int(row["preference_id"].rsplit(":", 1)[1]) - 1]
        assert row["prompt"] == [{"role": "user", "content": line["prompt"]}]
        assert row["preferred"]["messages"] == [{"role": "assistant", "content": line["chosen"]}]
        assert row["other"]["messages"] == [{"role": "assistant", "content": line["rejected"]}]
        assert row["preferred"]["score"] - row["other"]["score"] == row["margin"]


def row(number: int, reply: int, score: float, label: float = 1.0) -> ScoreRow:
    comparisons = (Comparison(first=0, second=1, label=label),) if reply == 0 else ()
    return ScoreRow(
        preference_id=f"{number}", source="s", prompt_key=f"{number}", reply=reply, score=score, num_tokens=2,
        prompt_tokens=1, truncated_tokens=0, comparisons=comparisons,
    )  # fmt: skip


def test_a_label_below_one_half_prefers_the_second_and_ties_are_no_mistakes():
    scores = [(0.0, 1.0, 1.0), (2.0, 0.0, 0.2), (0.0, 5.0, 0.5), (float("nan"), 0.0, 1.0), (1.0, 1.0, 1.0)]
    rows = [row(n, r, (a, b)[r], label) for n, (a, b, label) in enumerate(scores) for r in (0, 1)]
    worst = worst_mistakes(rows, most=9)
    assert [(margin_of(one), one.preference_id) for one in worst.comparisons] == [(-2.0, "1"), (-1.0, "0")]
    first = worst_mistakes(rows, most=1)
    assert (first.comparisons, first.num_wrong) == (worst.comparisons[:1], 2)


def originals(values: list[object], column: str = "kind") -> list[Original]:
    return [
        Original(
            preference=Preference(
                id=str(n), source="s", prompt=(Message("user", "How?"),),
                replies=((Message("assistant", "a"),), (Message("assistant", "b"),)), comparisons=(),
            ),
            columns={column: value, "list": [1]},
        )
        for n, value in enumerate(values)
    ]  # fmt: skip


def test_a_column_has_a_value_for_every_judged_preference_and_none_where_its_row_has_none():
    rows = originals(["code", "a  long\ntext " * 20, None, 3])
    slices = slices_of(rows, ["kind", "source"], judged={original.key for original in rows[:4]})
    assert list(slices) == [TURNS, "kind"], "that by source needs no column"
    first, second, *others = slices["kind"].values()
    assert (first, others) == ("code", [None, 3])
    assert str(second).startswith("a long text a long")
    assert len(str(second)) == 80
    assert set(slices[TURNS].values()) == {2}
    assert len(slices_of(rows, ["kind"], judged={("s", "0")})["kind"]) == 1, "what is not judged is not counted"


def test_a_column_that_is_called_like_a_slicing_without_one_stands_beside_it():
    rows = originals(["code", "prose"], column="source")
    slices = slices_of(rows, ["source"], judged={original.key for original in rows})
    assert list(slices) == [TURNS, "column source"]
    assert list(slices["column source"].values()) == ["code", "prose"]


def test_a_column_that_is_called_like_a_slicing_without_one_is_the_one_that_is_printed():
    rows = [row(n, reply, n - reply) for n in range(4) for reply in (0, 1)]
    column = {("s", f"{n}"): "code" if n % 2 else "prose" for n in range(4)}
    of_data, plain = judge_rows(rows, beta=1.0, slices={"column source": column}), judge_rows(rows, beta=1.0)
    first, _, *lines = slice_table({"one": of_data}, "source").splitlines()
    assert first.startswith("column source")
    assert [line.split()[0] for line in lines[:2]] == ["code", "prose"]
    assert slice_table({"one": plain}, "source").splitlines()[2].split()[0] == "s", "data that have no such column"


def test_columns_that_cannot_divide_are_refused():
    rows = originals(["a"])
    with pytest.raises(ConfigError, match="--slice kinds: no row has this column. Did you mean 'kind'?"):
        slices_of(rows, ["kinds"], judged={("s", "0")})
    with pytest.raises(ConfigError, match="it holds lists or mappings"):
        slices_of(rows, ["list"], judged={("s", "0")})


@pytest.mark.slow
def test_slices_are_written_beside_scores_that_stay_as_they_are(models, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 20)
    rows = [json.loads(line) | {"kind": "ab"[n % 2]} for n, line in enumerate(data.read_text().splitlines())]
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    evaluate_folder(config_for(models["one"], data, tmp_path / "plain"))
    evaluate_folder(config_for(models["one"], data, tmp_path / "sliced", slice=("kind",)))
    for name in ("eval.scores.jsonl", "eval.metrics.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "sliced" / name).read_bytes()
    assert list(read_columns(read_folder(tmp_path / "plain").evaluations["eval"])) == [TURNS]
    slices = read_columns(read_folder(tmp_path / "sliced").evaluations["eval"])
    assert list(slices["kind"].values()) == ["a", "b"] * 10
    judged = Judgement.from_dict(json.loads((tmp_path / "sliced/eval.judgement.json").read_text()))
    assert [(one.label, one.num_comparisons) for one in judged.slices["kind"]] == [("a", 10), ("b", 10)]


def test_the_judgement_of_a_folder_is_that_of_its_rows(models, pairs_file, tmp_path):
    result, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / "out", thresholds=(0.0, 1.5)))
    written = Judgement.from_dict(json.loads((tmp_path / "out/eval.judgement.json").read_text()))
    again = judge_rows(result.rows, beta=1.0, thresholds=(0.0, 1.5))
    assert written.estimates.keys() == again.estimates.keys()
    for name, estimate in again.estimates.items():
        assert written[name].value == pytest.approx(estimate.value, nan_ok=True), name
    assert written["accuracy"].value == result.overall.estimates["eval_accuracy"].value
    assert "eval_fpr@1.5" in written.estimates
    assert [one.label for one in written.slices[TURNS]] == ["2"]


def test_a_model_that_is_missing_is_told_before_the_first_is_scored(models, pairs_file, tmp_path, scored):
    config = EvalConfig.of(models=(str(models["one"]), str(tmp_path / "nosuch")), dataset=str(pairs_file))
    with pytest.raises(Exception, match="nosuch"):
        judge_folders(config.replace(output_dir=tmp_path / "out"))
    assert scored == []


@pytest.mark.slow
def test_slices_and_thresholds_that_are_asked_for_are_printed(models, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl", 24)
    rows = [json.loads(line) | {"kind": "ab"[n % 2]} for n, line in enumerate(data.read_text().splitlines())]
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    line = ["eval", *map(str, models.values()), "--dataset", str(data), "--slice", "kind", "--thresholds", "0.5"]
    main([*line, "--output-dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    for start in ("a one-best", "b other-best", "0.5 one-best"):
        assert re.search(rf"^{start} +\d\.\d\d\d \[", printed, re.MULTILINE), start
    assert "too few pairs to say. At least 40 prompts are needed, and 24 have pairs" in " ".join(printed.split())


@pytest.mark.slow
def test_every_model_of_several_is_told_in_which_precision_it_may_be_served(models, pairs_file, tmp_path, capsys):
    line = ["eval", *map(str, models.values()), "--dataset", str(pairs_file)]
    main([*line, "--output-dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said.count("In which precision may it be served?") == 2
    for name in ("one-best", "other-best"):
        card = json.loads((tmp_path / "out" / name / "precision.json").read_text())
        assert [verdict["precision"] for verdict in card["verdicts"]] == ["bf16", "nearest bf16"]
        assert {verdict["answer"] for verdict in card["verdicts"]} <= {"may be served", "may not be served"}
        page = (tmp_path / "out/report.md").read_text()
        assert all(f"{verdict['precision']}: {verdict['answer']}" in page for verdict in card["verdicts"])
    main([*line, "--output-dir", str(tmp_path / "without"), "--no-precision-card"])
    assert "may it be served" not in capsys.readouterr().out
    assert not list((tmp_path / "without").rglob("precision.json"))


@pytest.mark.slow
def test_a_card_is_not_computed_again_and_needs_no_model_then(models, pairs_file, tmp_path, own_cache, monkeypatch):
    for precision in ("fp32", "bf16"):
        settings = {"cache_dir": own_cache, "precision": precision, "precision_card": True}
        first, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / f"{precision}1", **settings))
        with monkeypatch.context() as patched:
            patched.setattr(saved_module, "load", None)
            again, *_ = evaluate_folder(config_for(models["one"], pairs_file, tmp_path / f"{precision}2", **settings))
        assert again.card == first.card
        assert first.card is not None


def test_a_card_that_does_not_fit_is_left_out_with_a_warning(models, pairs_file, tmp_path, monkeypatch, log):
    def full(*given: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(evaluate_module, "load", full)
    result, *_ = evaluate_folder(
        config_for(models["one"], pairs_file, tmp_path / "out", precision="bf16", precision_card=True)
    )
    assert result.card is None
    assert "no precision card (--no-precision-card leaves it out): no room" in log.text
