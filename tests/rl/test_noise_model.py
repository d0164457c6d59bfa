"""The noise floor on a saved model: bfloat16 in different batches and layouts, and float32."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from common import CHATML, make_model, make_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.rl import RULES, Noise, advantages

GROUP, GROUPS, DRAWS = 5, 24, 20
WORDS = [
    "yes",
    "no",
    "maybe",
    "certainly",
    "never",
    "water",
    "soil",
    "light",
    "dry",
    "basil",
    "Paris",
    "of",
    "the",
    "is",
]


def conversations() -> list[list[dict[str, str]]]:
    """Five replies to each prompt, as a policy samples them: they differ in some words."""
    generator = np.random.default_rng(0)
    return [
        [
            {"role": "user", "content": f"Question {prompt}?"},
            {"role": "assistant", "content": " ".join(generator.choice(WORDS, size=generator.integers(1, 9)))},
        ]
        for prompt in range(GROUPS)
        for _ in range(GROUP)
    ]


@pytest.fixture(scope="module")
def scorings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Who computed them -> scores of the same conversations, by one saved model, in groups drawn from all of them.

    Which advantages of a prompt's own group are near 0 depends on the processor; of so many groups some always are.
    """
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("noise") / "rm"
    model = make_model()
    with torch.no_grad():
        model.head.weight.mul_(1.0)  # groups of which some are further apart than the noise, and some are not
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    save_reward_model(folder, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    asked = conversations()
    generator = np.random.default_rng(1)
    drawn = np.concatenate([generator.permutation(len(asked)) for _ in range(DRAWS)])
    found = {}
    for name, precision, layout, budget in (
        ("bf16, together", "bf16", "shared", 8192),
        ("bf16, each alone", "bf16", "shared", 1),
        ("bf16, padded", "bf16", "padded", 400),
        ("float32", "fp32", "shared", 8192),
    ):
        scorer = load(folder, precision=precision, attention=layout, check=False)
        scorer.token_budget = budget
        found[name] = np.array(scorer.score(asked))[drawn]
    return found


def signs(scores: np.ndarray, rule: str, noise: Noise | None) -> np.ndarray:
    groups = np.arange(len(scores)) // GROUP
    bounds = None if noise is None else noise.between_scorings(scores)
    return np.sign(advantages(scores, groups, rule=rule, noise_R=bounds).advantages_R)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES])
def test_no_advantage_that_counts_has_another_sign_in_another_batch_or_precision(scorings, rule) -> None:
    noise = Noise(tolerance=SCORE_TOLERANCE["bfloat16"], source="bfloat16, by the artifact")
    found = {name: signs(scores, rule, noise) for name, scores in scorings.items()}
    for one, other in combinations(found, 2):
        assert not (found[one] * found[other] < 0).any(), (one, other)
        share = float(np.mean((found[one] != 0) & (found[other] != 0)))
        assert 0.05 < share < 0.95, share  # the model tells some replies apart, and not all


def test_without_the_floor_some_signs_do_depend_on_who_computes_the_scores(scorings) -> None:
    plain = [signs(scores, "trl", None) for scores in scorings.values()]
    assert any((one * other < 0).any() for one, other in combinations(plain, 2))


def test_scorings_are_no_further_apart_than_their_noise(scorings) -> None:
    noise = Noise(tolerance=SCORE_TOLERANCE["bfloat16"], source="bfloat16, by the artifact")
    for one, other in combinations(scorings.values(), 2):
        assert (np.abs(one - other) <= noise.between_scorings(one)).all()
