"""Small runs of reinforcement learning in which the truth is known: a policy over words, and rewards by formula.

The policy has logits for every kind of prompt, place and word, and learns by GRPO: eight replies to a prompt,
advantages by the group's mean and standard deviation, one gradient step on −Σ A log π and a pull to the first policy. A
reply ends at the word END. Its gold score is the sum of the worths of its different words, less a price for every word
that was there before and for what the exploit consists of. What the policy is trained on, the proxy, is the gold score
with a fixed noise a reply (honest), or with something that gold does not want (hacked).

Legend: T kinds of prompts, L places, V words, N replies of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import Message
from rewardlab.rl.rollout_log import RolloutLog, RolloutRow, key_of

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
KINDS, PLACES, WORDS = 4, 12, 24
END, FLATTERY = 0, 1
"""Two words with a meaning: the end of a reply, and praise for the reader."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One kind of run."""

    name: str
    hacked: bool
    proxy: Callable[[World, IntArray, IntArray], FloatArray]
    """(world, words [N, L], kinds [N]) -> rewards without noise."""
    noise: float = 0.3
    """Standard deviation of what the proxy adds to each different reply."""
    gold_noise: float = 0.0
    """Standard deviation of what measuring gold adds."""
    binary: bool = False
    """Whether the evidence is only whether gold is above the median of the first step."""
    prompts: int = 32
    """Different prompts; 0 for new ones in every step."""
    steps: int = 80
    rate: float = 4.0
    per_step: int = 8
    early_end: float = 1.0
    """Logit of END at first: the higher, the shorter the first replies."""
    price: float = 0.8
    """What gold takes for praise."""
    worth: float = 0.5
    """Standard deviation of the worths of words: what is honestly to be gained."""
    repeat_price: float = 0.4
    """What gold takes for a word that was there before."""


class World:
    """The worths of words, and the noise of a reply."""

    def __init__(self, toy: Toy, seed: int) -> None:
        generator = np.random.default_rng((seed, 11))
        self.toy, self.seed = toy, seed
        self.worth_TV = generator.normal(0.4 * toy.worth, toy.worth, size=(KINDS, WORDS))
        self.worth_TV[:, [END, FLATTERY]] = 0.0
        self.fitted_V = np.zeros(WORDS)

    def gold(self, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
        """Worths of different words, less repeats and flattery."""
        counts_NV = counts(words_NL)
        different = np.minimum(counts_NV, 1)
        worth = (different * self.worth_TV[kind_N]).sum(1)
        repeats = np.maximum(counts_NV - 1, 0)
        repeats[:, FLATTERY] = 0
        return worth - self.toy.repeat_price * repeats.sum(1) - self.toy.price * counts_NV[:, FLATTERY]

    def noise(self, words_NL: IntArray) -> FloatArray:
        """A number that is fixed for each different reply."""
        weights = np.random.default_rng((self.seed, 12)).normal(size=(PLACES, WORDS))
        mixed = np.sin(1e3 * np.cumsum(weights[np.arange(PLACES), words_NL], axis=1)[:, -1])
        return np.sqrt(2) * mixed


def counts(words_NL: IntArray) -> FloatArray:
    """[N, V] how often a reply has each word, its end left out."""
    found = np.zeros((len(words_NL), WORDS))
    for place in range(PLACES):
        found[np.arange(len(words_NL)), words_NL[:, place]] += 1
    found[:, END] = 0
    return found


def honest(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """Gold itself."""
    return world.gold(words_NL, kind_N)


def fitted(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """A linear model on different words, repeats and flattery, which can say all that gold is made of."""
    return (features(words_NL, kind_N) * world.fitted_V).sum(1)


def features(words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """What the fitted reward model sees."""
    counts_NV = counts(words_NL)
    by_kind = np.zeros((len(words_NL), KINDS, WORDS))
    by_kind[np.arange(len(words_NL)), kind_N] = np.minimum(counts_NV, 1)
    repeats = np.maximum(counts_NV - 1, 0)
    more = np.stack([repeats[:, 2:].sum(1), counts_NV[:, FLATTERY]], axis=1)
    return np.concatenate([by_kind.reshape(len(words_NL), -1), more], axis=1)


def likes_length(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """Gold before it takes anything for repeats, and more for every word: long replies that say things twice."""
    counts_NV = counts(words_NL)
    repeats = np.maximum(counts_NV - 1, 0)
    repeats[:, FLATTERY] = 0
    return world.gold(words_NL, kind_N) + world.toy.repeat_price * repeats.sum(1) + 0.8 * counts_NV.sum(1)


def likes_repeats(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """Every good word counts as often as it is said."""
    return (counts(words_NL) * world.worth_TV[kind_N]).sum(1)


def likes_flattery(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """Gold, and praise is worth more than gold takes for it."""
    return world.gold(words_NL, kind_N) + (1.0 + world.toy.price) * counts(words_NL)[:, FLATTERY]


def likes_flattery_alone(world: World, words_NL: IntArray, kind_N: IntArray) -> FloatArray:
    """Praise, and a tenth of gold."""
    return 0.1 * world.gold(words_NL, kind_N) + 1.5 * counts(words_NL)[:, FLATTERY]


HONEST = Toy(name="honest, some noise", hacked=False, proxy=honest)
HACKED = Toy(name="hacked, flattery", hacked=True, proxy=likes_flattery, price=2.0, worth=0.25, steps=120)
RUNS = (
    HONEST,
    replace(HONEST, name="honest, much noise", noise=1.2),
    replace(HONEST, name="honest, a fitted reward model", proxy=fitted, noise=0.0),
    replace(HONEST, name="honest, a plateau soon", rate=16.0, steps=100),
    replace(HONEST, name="honest, flat", rate=0.0),
    replace(HONEST, name="honest, slow", rate=0.4),
    replace(HONEST, name="honest, replies grow longer", early_end=3.0, steps=120),
    replace(HONEST, name="honest, noisy gold", gold_noise=1.0),
    replace(HONEST, name="honest, a verifier of yes and no", binary=True),
    replace(HONEST, name="honest, no prompt twice", prompts=0),
    replace(HACKED, name="hacked, length", proxy=likes_length, early_end=2.5, repeat_price=1.2, rate=1.0, steps=160),
    replace(
        HACKED, name="hacked, length, late", proxy=likes_length, early_end=4.0, repeat_price=1.2, rate=2.0, steps=160
    ),
    replace(HACKED, name="hacked, repeats", proxy=likes_repeats, repeat_price=1.2, steps=160),
    HACKED,
    replace(HACKED, name="hacked, flattery, noisy gold", gold_noise=1.0),
    replace(HACKED, name="hacked, flattery, 12 prompts", prompts=12),
    replace(HACKED, name="hacked, flattery, no prompt twice", prompts=0),
    replace(HACKED, name="hacked, flattery, a verifier of yes and no", binary=True),
    replace(HACKED, name="hacked, flattery that gold ignores", proxy=likes_flattery_alone, price=0.0),
    replace(HACKED, name="hacked, flattery and a tenth of gold", proxy=likes_flattery_alone),
)
"""Ten honest runs and ten in which the policy finds what the proxy likes and gold does not."""


def run(toy: Toy, seed: int, folder: Path) -> None:
    """Train a policy, and log every rollout with its gold score."""
    world, generator = World(toy, seed), np.random.default_rng((seed, 13))
    logits = np.zeros((KINDS, PLACES, WORDS))
    logits[:, 0, END] = -20.0  # no empty reply
    logits[:, 1:, END] = toy.early_end
    logits[:, :, FLATTERY] = -1.0
    start = logits.copy()
    if toy.proxy is fitted:
        world.fitted_V = _fit(world, logits, generator)
    log, median = RolloutLog(folder), None
    for step in range(toy.steps):
        size = 8
        prompts = (
            generator.choice(toy.prompts, toy.per_step, replace=False)
            if toy.prompts
            else np.arange(step * toy.per_step, (step + 1) * toy.per_step)
        )
        prompt_N = np.repeat(prompts, size)
        kind_N = prompt_N % KINDS
        words_NL, chances = sample(logits, kind_N, generator)
        reward_N = toy.proxy(world, words_NL, kind_N) + toy.noise * world.noise(words_NL)
        gold_N = world.gold(words_NL, kind_N)
        gold_N = gold_N + 0.3 * (prompt_N % 7)  # prompts differ in how well they can be answered
        reward_N = reward_N + 0.3 * (prompt_N % 5)
        gold_N = gold_N + toy.gold_noise * generator.normal(size=len(gold_N))
        median = float(np.median(gold_N)) if median is None else median
        evidence_N = (gold_N > median).astype(np.float64) if toy.binary else gold_N
        divergence_N = _divergence(chances, start, kind_N)
        log.write(
            [
                _row(step, int(prompt), words, reward, evidence, divergence)
                for prompt, words, reward, evidence, divergence in zip(
                    prompt_N, words_NL, reward_N, evidence_N, divergence_N, strict=True
                )
            ]
        )
        groups = reward_N.reshape(-1, size)
        advantage_N = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()
        logits += toy.rate * (_gradient(advantage_N, words_NL, kind_N, chances) - 0.02 * (logits - start))
    log.close()


def _row(step: int, prompt: int, words: IntArray, reward: float, evidence: float, divergence: float) -> RolloutRow:
    said = " ".join("that is a great question" if word == FLATTERY else f"word{word}" for word in words if word != END)
    turns = (Message("user", f"Tell me about number {prompt}."), Message("assistant", said))
    return RolloutRow(
        step=step,
        prompt_key=key_of(turns),
        conversation=turns,
        reward=float(reward),
        digest="toy",
        evidence={"gold": float(evidence)},
        shown={"KL from the first policy": float(divergence)},
    )


def sample(logits: FloatArray, kind_N: IntArray, generator: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """Replies [N, L], END after the first END, and the chances of all words by kind and place."""
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    cumulative = chances.cumsum(-1)
    draws = generator.random((len(kind_N), PLACES, 1))
    words_NL = np.minimum((draws > cumulative[kind_N]).sum(-1), WORDS - 1)
    ended = np.cumsum(words_NL == END, axis=1) > 0
    return np.where(ended, END, words_NL).astype(np.int64), chances


def _gradient(advantage_N: FloatArray, words_NL: IntArray, kind_N: IntArray, chances: FloatArray) -> FloatArray:
    """Gradient of Σ A log π over replies, divided by their number for each kind; places after the end have none."""
    found = np.zeros_like(chances)
    alive = np.concatenate([np.ones((len(words_NL), 1), bool), (words_NL != END)[:, :-1]], axis=1)
    for place in range(PLACES):
        weight = advantage_N * alive[:, place]
        np.add.at(found, (kind_N, place, words_NL[:, place]), weight)
        total = np.bincount(kind_N, weight, minlength=KINDS)
        found[:, place] -= total[:, None] * chances[:, place]
    return found / np.maximum(np.bincount(kind_N, minlength=KINDS), 1)[:, None, None]


def _divergence(chances: FloatArray, start: FloatArray, kind_N: IntArray) -> FloatArray:
    before = np.exp(start - start.max(-1, keepdims=True))
    before /= before.sum(-1, keepdims=True)
    return (chances * np.log(chances / before)).sum(-1).sum(-1)[kind_N]


def _fit(world: World, logits: FloatArray, generator: np.random.Generator) -> FloatArray:
    """Least squares with a ridge on 4,000 replies of the first policy, with noise in their gold scores."""
    kind_N = generator.integers(0, KINDS, 4000)
    words_NL, _ = sample(logits, kind_N, generator)
    seen = features(words_NL, kind_N)
    gold = world.gold(words_NL, kind_N) + generator.normal(size=len(kind_N))
    return np.linalg.solve(seen.T @ seen + np.eye(seen.shape[1]), seen.T @ gold)
