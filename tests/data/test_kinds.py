"""Evaluation and test data of another kind than the training data are told; data drawn alike never are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import make_tokenizer
from loading import write
from rewardlab.data.kinds import Kinds, script_of, unlike
from rewardlab.data.prepare import load_data
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig


def rows(count: int, *, reply: str = "Water it", system: bool = False) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Why {n} {reply}?", "chosen": f"{reply} {n}.", "rejected": f"No {n}."}
        | ({"system": "Be kind."} if system else {})
        for n in range(count)
    ]


def told(
    folder: Path, caplog: pytest.LogCaptureFixture, train: list[Any], test: list[Any], **settings: Any
) -> list[str]:
    """What is said of training and test data that are of other kinds."""
    names = {"dataset": write(folder / "a.jsonl", train), "test_dataset": write(folder / "b.jsonl", test)}
    given = {name: (str(path),) for name, path in names.items()} | {"cache_dir": str(folder / "cache"), **settings}
    config = RewardTrainerConfig.of(model="m", eval_fraction=0.0, num_workers=1, **given)
    caplog.clear()
    load_data(config.data, build_renderer(make_tokenizer(), config.data.rendering), seed=0)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [line for line in lines if "training row" in line]


def test_a_system_turn_in_training_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_one, without = rows(40, system=True), rows(30)
    for _ in ("read", "from the cache"):
        (line,) = told(tmp_path, caplog, with_one, without)
        assert line.startswith("data: 0 of 30 test rows have a system turn, and 40 of 40 training rows: the model")
    (line,) = told(tmp_path, caplog, without, with_one)
    assert line.startswith("data: 40 of 40 test rows have a system turn, and 0 of 30 training rows: the model")
    assert not told(tmp_path, caplog, with_one, without, system_prompt="Be kind."), "then all have one"
    assert not told(tmp_path, caplog, with_one, without[:19]), "too few to say"
    assert not told(tmp_path, caplog, with_one, [*without, *with_one[:10]]), "some have one"


def test_other_letters_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    latin, russian = rows(40), rows(30, reply="Полей его")
    (line,) = told(tmp_path, caplog, latin, russian)
    assert line.startswith("data: 30 of 30 test rows with letters are in Cyrillic letters, and 0 of 40 training rows: ")
    assert not told(tmp_path, caplog, [*latin, *russian[:4]], russian), "training has some"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Water it.", "Latin"),
        ("Žluťoučký kůň", "Latin"),
        ("Ποτίστε το", "Greek"),
        ("用水浇它，every day", "Latin"),
        ("每天用水浇它，ok", "Han"),
        ("水をやってください", "Hiragana"),
        ("물을 주세요", "Hangul"),
        ("اسقها", "Arabic"),
        ("इसे पानी दो", "Devanagari"),
        ("42 + 1", None),
        ("→ ∀", None),
        ("a" + "й" * 99 + "z" * 999, "Cyrillic"),
    ],
)
def test_the_script_is_that_of_most_letters_at_the_beginning(text: str, script: str | None) -> None:
    assert script_of(text) == script


@pytest.mark.parametrize(
    ("train", "other"),
    [
        pytest.param({"Latin": 15}, {"Latin": 300}, id="training replies are numbers, nearly all"),
        pytest.param({"Hiragana": 700, "Han": 10}, {"Han": 30, "Hiragana": 20}, id="Japanese"),
    ],
)
def test_one_language_is_not_taken_for_another(train: dict[str, int], other: dict[str, int]) -> None:
    kinds = [Kinds(rows=1_000, scripts=Counter(scripts)) for scripts in (train, other)]
    assert not list(unlike(*kinds, "test", fills_system=False))


def test_data_drawn_alike_are_never_told() -> None:
    draw = np.random.default_rng(0)
    for _ in range(2_000):
        share, letters = draw.choice([0.0, 0.05, 0.5, 0.9, 1.0]), draw.dirichlet([0.3, 0.3, 0.3])
        train, other = (
            Kinds(
                rows=int(size),
                system_turns=int(draw.binomial(size, share)),
                scripts=Counter(
                    dict(zip(("Latin", "Greek", "Thai"), map(int, draw.multinomial(size, letters)), strict=True))
                ),
            )
            for size in draw.integers(20, 60, 2)
        )
        assert not list(unlike(train, other, "test", fills_system=False)), (train, other)
