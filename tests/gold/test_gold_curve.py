"""`rewardlab gold curve` from files to files: what is used, what is left out and said, and what is written."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from reward_models import save_tiny
from rewardlab.analysis.best_of_n import Candidates, curves_of, points_of
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.files import claim, write
from rewardlab.gold.curving.pictures import charts_of
from rewardlab.gold.curving.pools import largest_size, pool_of, used, with_ensemble
from rewardlab.gold.curving.report import COLUMNS, csv_report, json_report, text_report
from rewardlab.gold.curving.run import IN, OUT, Result, curve, curve_of
from rewardlab.gold.curving.sizes import sizes_of
from rewardlab.gold.curving.words import headline, interval
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.proxies import Proxy, proxy_scores


def rows_of(gold: list[list[float | None]], name: str = "q") -> list[GoldRow]:
    return [
        GoldRow(
            id=str(p),
            prompt=(Message("user", f"{name} {p}"),),
            responses=tuple(f"reply {k}" for k in range(len(own))),
            gold=tuple(own),
        )
        for p, own in enumerate(gold)
    ]


def planted(folder: Path, *, bend: float, seed: int = 0, name: str = "in", prompts: int = 40) -> None:
    """Write rows and the scores of two proxies: `good` follows gold, `bad` is liked more than it is worth."""
    generator = np.random.default_rng(seed)
    bad = generator.normal(size=(prompts, 16))
    gold = bad - bend * np.maximum(bad, 0) ** 2 + 0.3 * generator.normal(size=bad.shape)
    good = gold + 0.3 * generator.normal(size=bad.shape)
    rows = rows_of(gold.tolist(), name)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row.as_json()) + "\n" for row in rows), encoding="utf-8")
    for proxy, scores in (("good", good), ("bad", bad)):
        (folder / f"{name}-{proxy}.json").write_text(json.dumps(scores.tolist()), encoding="utf-8")


def config_of(folder: Path, **settings: object) -> CurveConfig:
    given: dict[str, object] = {
        "input": (str(folder / "in.jsonl"),),
        "proxies": (f"good={folder / 'in-good.json'}", f"bad={folder / 'in-bad.json'}"),
        "output_dir": str(folder / "out"),
        "most": 8,
    }
    return CurveConfig.of(**(given | settings))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CurveConfig, Result]:
    folder = tmp_path_factory.mktemp("curve")
    planted(folder, bend=0.3)
    planted(folder, bend=3.0, seed=1, name="ood")
    config = config_of(
        folder,
        ood=(str(folder / "ood.jsonl"),),
        ood_proxies=(f"bad={folder / 'ood-bad.json'}", f"good={folder / 'ood-good.json'}"),
    )
    return folder, config, curve(config)


def test_a_planted_turn_over_is_found_where_it_is_and_not_elsewhere(found: tuple[Path, CurveConfig, Result]) -> None:
    _, _, result = found
    assert [(one.proxy, one.prompts) for one in result.curves] == [
        ("good", IN), ("bad", IN), ("good", OUT), ("bad", OUT),
    ]  # fmt: skip
    assert [one.verdict for one in result.curves] == ["no turn-over"] * 3 + ["turns over"]
    assert result.curves[3].turn.may_be == (1,)
    assert not any(one.overlap for one in result.sets)
    worse = [one for one in result.contrasts if one.prompts == OUT]
    assert [(one.first, one.second) for one in worse] == [("good", "bad")]
    assert worse[0].difference.high < 0
    assert worse[0].adjusted < 0.05
    text = text_report(result)
    assert "TURNS OVER: gold falls before n = 8 in 1 of 4 curves: bad (out of distribution)." in text
    assert "Gold falls from the start: no n is better than a single reply." in text
    assert "good is better" in text


def test_points_are_those_of_best_of_n_on_the_same_scores(found: tuple[Path, CurveConfig, Result]) -> None:
    folder, _, result = found
    gold = [json.loads(line)["gold"] for line in (folder / "in.jsonl").read_text(encoding="utf-8").splitlines()]
    bad = json.loads((folder / "in-bad.json").read_text(encoding="utf-8"))
    candidates = [Candidates(prompt=str(p), proxy_K=bad[p], gold_K=gold[p]) for p in range(40)]
    wanted = points_of(curves_of(candidates, most=8))
    assert result.of(IN)[1].points == wanted


def test_everything_is_written_and_agrees(found: tuple[Path, CurveConfig, Result]) -> None:
    folder, config, result = found
    claim(config)
    assert [path.name for path in write(result, config)] == ["curve.json", "curve.md", "curve.html", "curve.csv"]
    values = json.loads((folder / "out" / "curve.json").read_text(encoding="utf-8"))
    assert [one["verdict"] for one in values["curves"]] == [one.verdict for one in result.curves]
    assert {name: list(files) for name, files in values["inputs"].items()} == {IN: ["in.jsonl"], OUT: ["ood.jsonl"]}
    assert values["kl"] == "upper bound of the KL divergence, nats"
    rows = list(csv.DictReader(io.StringIO((folder / "out" / "curve.csv").read_text(encoding="utf-8"))))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 4 * 8
    for row, point in zip(rows[8:16], result.curves[1].points, strict=True):
        assert (row["proxy"], int(row["n"])) == ("bad", point.n)
        assert float(row["kl_upper_bound"]) == point.kl_bound
        assert point.gold is not None
        assert [float(row[f"gold{end}"]) for end in ("", "_low", "_high")] == [
            point.gold.value, point.gold.low, point.gold.high,
        ]  # fmt: skip
    page = (folder / "out" / "curve.html").read_text(encoding="utf-8")
    assert page.count('<figure class="chart">') == 2 + 2 * 4
    assert "upper bound of the KL divergence, nats" in page
    markdown = (folder / "out" / "curve.md").read_text(encoding="utf-8")
    assert "## Where gold turns over" in markdown
    claim(config)  # its own files may be replaced


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "curve.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"curve\.csv is there, and `rewardlab gold curve` did not write it"):
        claim(config_of(tmp_path))
    claim(config_of(tmp_path, overwrite=True))


def test_replies_without_a_score_and_prompts_with_too_few_are_left_out_and_counted() -> None:
    generator = np.random.default_rng(0)
    gold: list[list[float | None]] = [list(own) for own in generator.normal(size=(30, 8)).tolist()]
    scores: list[list[float | None]] = [list(own) for own in generator.normal(size=(30, 8)).tolist()]
    gold[0][2] = None
    scores[0][5] = None
    gold[1][0] = None
    gold[2][:5] = [None] * 5
    pool = pool_of(IN, rows_of(gold), [Proxy(name="a", scores=tuple(map(tuple, scores)))])
    assert (pool.without_gold, pool.without_proxy) == (7, 1)
    assert [len(one.gold_K) for one in pool.replies[:4]] == [6, 7, 3, 8]
    assert pool.replies[0].gold_K.tolist() == [gold[0][k] for k in (0, 1, 3, 4, 6, 7)]
    assert pool.replies[0].proxy_K["a"].tolist() == [scores[0][k] for k in (0, 1, 3, 4, 6, 7)]
    # Three in thirty may be left out for a larger n.
    assert largest_size([pool]) == 8
    kept = used(pool, 7)
    assert (len(kept.replies), kept.too_few) == (28, 2)
    config = CurveConfig.of(input=("rows.jsonl",), proxies=("a=a.json",), most=7)
    text = " ".join(text_report(curve_of([pool], config)).split())
    assert "replies left out: 7 without a gold score, 1 without the score of some proxy" in text
    assert "rows left out: 2 of 30, which have fewer than 7 replies" in text
    with pytest.raises(DataError, match="no prompt has 9 replies with the scores of gold and of every proxy"):
        used(pool, 9)


def test_a_size_above_half_of_the_replies_is_marked() -> None:
    generator = np.random.default_rng(0)
    pool = pool_of(
        IN, rows_of(generator.normal(size=(12, 8)).tolist()),
        [Proxy(name="a", scores=tuple(map(tuple, generator.normal(size=(12, 8)).tolist())))],
    )  # fmt: skip
    given = {"input": ("rows.jsonl",), "proxies": ("a=a.json",)}
    wide, narrow = (curve_of([pool], CurveConfig.of(**given, most=most)) for most in (6, 4))
    marked = [row["n"] for row in csv.DictReader(io.StringIO(csv_report(wide))) if row["above_half_of_replies"] == "1"]
    assert marked == ["5", "6"]
    assert any("a curve beyond n = 4 depends on" in note for note in wide.notes)
    assert any("For n up to 6 sample 12 to 24." in note for note in wide.notes)
    assert not narrow.notes
    three = pool_of(IN, rows_of([[1, 2, 3]] * 12), [Proxy(name="a", scores=((1, 2, 3),) * 12)])
    (note,) = (one for one in curve_of([three], CurveConfig.of(**given)).notes if "beyond" in one)
    assert "with 3 replies to a prompt, a curve beyond n = 1 depends on" in note, "not 1.5, which is no size"
    assert curve_of([pool], CurveConfig.of(**given)).most == 8


def test_replies_that_repeat_and_tie_are_told_and_prompts_of_both_sets() -> None:
    rows = [replace(row, responses=("a", "a", "b", "c")) for row in rows_of([[0.0, 0.0, 1.0, 2.0]] * 12)]
    pools = [pool_of(name, rows, [Proxy(name="a", scores=((1.0, 1.0, 1.0, 2.0),) * 12)]) for name in (IN, OUT)]
    result = curve_of(pools, CurveConfig.of(input=("rows.jsonl",), proxies=("a=a.json",), most=2))
    assert result.sets[0].texts.value == 0.75
    assert result.sets[0].levels["a"].value == 0.5
    assert (result.sets[0].overlap, result.sets[1].overlap) == (0, 12)
    assert any("12 of its 12 prompts are in distribution too" in note for note in result.notes)


def test_few_prompts_have_no_verdict_and_say_so() -> None:
    generator = np.random.default_rng(0)
    pool = pool_of(
        IN, rows_of(generator.normal(size=(9, 8)).tolist()),
        [Proxy(name=name, scores=tuple(map(tuple, generator.normal(size=(9, 8)).tolist()))) for name in "ab"],
    )  # fmt: skip
    result = curve_of([pool], CurveConfig.of(input=("rows.jsonl",), proxies=("a=a.json", "b=b.json"), most=4))
    assert [one.verdict for one in result.curves] == ["undecided"] * 2
    text = text_report(result)
    assert "UNDECIDED: too few prompts" in text
    assert "too few prompts (9)" in text
    assert "below 10 there are no intervals" in text


def test_gold_that_ties_all_replies_is_told_and_not_called_few_prompts() -> None:
    scores = tuple(map(tuple, np.random.default_rng(0).normal(size=(40, 4)).tolist()))
    pool = pool_of(IN, rows_of([[1.0] * 4] * 40), [Proxy(name="a", scores=scores)])
    result = curve_of([pool], CurveConfig.of(input=("rows.jsonl",), proxies=("a=a.json",), most=2))
    assert headline(result) == (
        "UNDECIDED: gold is the same at every n for every prompt. It gives all replies to a prompt the same score, or "
        "the proxies do."
    )


def test_an_ensemble_is_three_more_proxies_on_one_scale() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(2, 12, 4))
    proxies = [
        Proxy(name="a", scores=tuple(map(tuple, scores[0].tolist()))),
        Proxy(name="b", scores=tuple(map(tuple, (100 * scores[1] + 1000 * np.arange(12)[:, None]).tolist()))),
    ]
    pool = with_ensemble(
        pool_of(IN, rows_of(generator.normal(size=(12, 4)).tolist()), proxies), ("a", "b"), penalty=0.5
    )
    assert pool.names == ("a", "b", "ensemble mean", "ensemble minimum", "ensemble lower")
    own = scores - scores.mean(axis=2, keepdims=True)
    own /= np.sqrt(np.square(own).sum(axis=(1, 2), keepdims=True) / 36)
    mean = np.stack([one.proxy_K["ensemble mean"] for one in pool.replies])
    assert mean == pytest.approx(own.mean(0), abs=1e-9)
    assert np.stack([one.proxy_K["ensemble minimum"] for one in pool.replies]) == pytest.approx(own.min(0), abs=1e-9)
    lower = np.stack([one.proxy_K["ensemble lower"] for one in pool.replies])
    assert lower == pytest.approx(own.mean(0) - 0.5 * own.std(0, ddof=1), abs=1e-9)
    with pytest.raises(ConfigError, match=r"--ensemble c: there is no proxy of this name; there are a, b"):
        with_ensemble(pool_of(IN, rows_of([[0.0] * 4] * 12), proxies), ("a", "c"), penalty=1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"input": ()}, "--input is missing"),
        ({"proxies": ()}, "--proxies is missing"),
        ({"most": 1}, "--most 1: must be at least 2"),
        ({"ensemble": ("a",)}, "--ensemble: name two proxies or more"),
        ({"ensemble": ("a", "a")}, "--ensemble: a proxy is named twice"),
        ({"ood_proxies": ("a=b",)}, "--ood-proxies: only with --ood"),
        ({"ood": ("x.jsonl",), "ood_proxies": ("b",)}, "--ood-proxies b: wanted NAME=FILE"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, **settings)


def test_a_proxy_of_the_second_set_alone_is_refused(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.3)
    config = config_of(tmp_path, ood=(str(tmp_path / "in.jsonl"),), ood_proxies=("new=x.json",))
    with pytest.raises(ConfigError, match="--ood-proxies new: --proxies has no proxy of this name"):
        curve(config)


def test_rows_with_one_reply_have_no_curve() -> None:
    pool = pool_of(IN, rows_of([[0.5]] * 12), [Proxy(name="a", scores=((1.0,),) * 12)])
    with pytest.raises(DataError, match="one in ten prompts has fewer than two replies"):
        largest_size([pool])


def test_numbers_have_the_digits_that_their_limits_bear() -> None:
    generator = np.random.default_rng(0)
    candidates = [Candidates(prompt=str(p), proxy_K=generator.normal(size=3)) for p in range(12)]
    points = points_of(curves_of(candidates))
    estimate = points[0].proxy
    told = replace(estimate, value=-0.123456, low=-0.2, high=0.1)
    assert interval(told) == "−0.12 [−0.20, 0.10]"
    assert interval(replace(told, value=123.456, low=100.0, high=180.0)) == "123 [100, 180]"
    assert interval(replace(told, value=0.0004, low=0.0001, high=0.0009)) == "0.00040 [0.00010, 0.00090]"
    assert interval(replace(told, low=math.nan, high=math.nan)) == "−0.123 [—]"


def test_a_fall_that_could_not_be_seen_is_undecided() -> None:
    generator = np.random.default_rng(3)
    gold = generator.normal(size=(12, 8))
    scores = {"blind": generator.normal(size=gold.shape), "sees": gold + 0.1 * generator.normal(size=gold.shape)}
    proxies = [Proxy(name=name, scores=tuple(map(tuple, own.tolist()))) for name, own in scores.items()]
    result = curve_of([pool_of(IN, rows_of(gold.tolist()), proxies)], CurveConfig.of(input=("x",), proxies=("a", "b")))
    blind, sees = result.curves
    assert (blind.verdict, sees.verdict) == ("undecided", "no turn-over")
    assert blind.turn.fall.high >= blind.gain.value
    text = " ".join(text_report(result).split())
    assert "any fall is ruled out at 95%. Undecided: blind (in distribution)." in text
    assert "is not ruled out at 95%, and the most that it gained is" in text
    alone = replace(result, curves=(blind,))
    assert headline(alone) == (
        "UNDECIDED within n ≤ 8: no fall of gold is shown, nor is one of all that it gained ruled out."
    )


def test_a_band_that_the_picture_cuts_is_said_to_go_on(tmp_path: Path) -> None:
    """An axis makes room for limits only as far as the line stays readable."""
    told, noise = set(), np.random.default_rng(5).normal(size=(30, 16)).tolist()
    planted(tmp_path, bend=0.3, prompts=30)
    for sees_gold in (True, False):
        if not sees_gold:
            for proxy in ("good", "bad"):
                (tmp_path / f"in-{proxy}.json").write_text(json.dumps(noise), encoding="utf-8")
        result = curve(config_of(tmp_path))
        for chart in charts_of(result, result.sets[0]):
            heights = [y for area in chart.bands for _, y in area.outline]
            is_cut = min(heights) < chart.y.low - 1e-9 or max(heights) > chart.y.high + 1e-9
            assert ("reaches the upper or lower edge goes on beyond it" in chart.words) == is_cut
            told.add(is_cut)
    assert told == {True, False}


def test_a_line_that_still_rises_has_one_number_in_its_words(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.0, prompts=30)
    result = curve(config_of(tmp_path))
    for chart in charts_of(result, result.sets[0]):
        assert f"good: highest at the largest n, {result.most}, with " in chart.words
        assert f"good: highest at n = {result.most} " not in chart.words


# --- sizes -----------------------------------------------------------------------------------------------------


def test_proxies_are_ordered_by_the_weights_that_were_trained_and_shown_with_them(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.45)
    files = {name: str(tmp_path / f"in-{name}.json") for name in ("good", "bad")}
    assert list(sizes_of(files)) == ["good", "bad"], "nothing is known of files of scores"
    config = config_of(tmp_path, sizes=("good=134500000", "bad=1200000"))
    result = curve(config)
    assert [one.proxy for one in result.curves] == ["bad", "good"]
    assert "bad (1.2M trained), in distribution" in text_report(result)
    told = {row["proxy"]: row["trained_weights"] for row in csv.DictReader(io.StringIO(csv_report(result)))}
    assert told == {"bad": "1200000", "good": "134500000"}
    assert json_report(result, config)["sizes"]["good"] == {"num": 134_500_000, "is_trained": True}
    legends = [name for chart in charts_of(result, result.sets[0]) for _, name in chart.legend]
    assert set(legends) == {"bad (1.2M trained)", "good (134M trained)"}


def test_a_size_is_what_the_run_trained_else_all_weights_of_the_model(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.45)
    for run in ("adapters", "bare"):
        save_tiny(tmp_path / run / "best")
    (tmp_path / "adapters" / "manifest.json").write_text(json.dumps({"parameters": {"trainable": 7000, "total": 9000}}))
    places = {"all": tmp_path / "bare" / "best", "few": tmp_path / "adapters", "file": tmp_path / "in-bad.json"}
    found = sizes_of({name: str(place) for name, place in places.items()})
    assert list(found) == ["few", "all", "file"]
    assert (str(found["few"]), found["file"]) == ("7K trained", None)
    whole = found["all"]
    assert whole is not None
    assert not whole.is_trained
    assert whole.num == sum(one.numel() for one in load_file(tmp_path / "bare" / "best" / "model.safetensors").values())


def test_a_size_of_no_proxy_is_refused(tmp_path: Path) -> None:
    planted(tmp_path, bend=0.45)
    with pytest.raises(ConfigError, match="--sizes other: --proxies has no proxy of this name"):
        curve(config_of(tmp_path, sizes=("other=3",)))
    for size in ("large", "0", "9" * 400, str(10**15 + 1)):
        with pytest.raises(ConfigError, match=r"--sizes good=\w+: wanted NAME=NUMBER, a number of weights from 1 to"):
            config_of(tmp_path, sizes=(f"good={size}",))
    with pytest.raises(ConfigError, match="--sizes good: is given twice"):
        config_of(tmp_path, sizes=("good=1", "good=2"))
    assert config_of(tmp_path, sizes=(f"good={10**15}",)).curving.sizes


def test_score_rows_a_line_are_read_from_a_json_file(tmp_path: Path) -> None:
    rows = rows_of([[1.0, 2.0], [3.0, 4.0]], "in")
    path = tmp_path / "scored.json"
    path.write_text("".join(json.dumps(row.as_json()) + "\n" for row in rows), encoding="utf-8")
    (found,) = proxy_scores([f"a={path}"], rows, tmp_path / "kept")
    assert found.scores == ((1.0, 2.0), (3.0, 4.0))
