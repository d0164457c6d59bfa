"""Synthetic preferences for trials. Their true utilities and label noise are known, and so is the best possible score.

A reply is composed of parts (how it opens, what it advises, what it adds) and each part has a weight. The utility u of
a reply is the sum of its weights, P(i preferred over j) = σ(u_i − u_j), and the label is one draw from that. Half of
what matters can be seen in the reply alone (rude, warm, vague, padded); the other half, whether the advice is about
what was asked, needs the prompt. Length says nothing: what adds words helps about as often as it hurts. Training and
test topics are disjoint, so a score above chance on the test set shows skill and not memory. The topics, with three
tips each, are in `synthetic_topics.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.files import write_jsonl
from rewardlab.core.types import Comparison, Message, Preference

TopicSplit = Literal["train", "test"]
Item = TypeVar("Item")

SOURCE = "synthetic"
PROBABILITY_DIGITS = 6
"""Digits of probabilities in files, so that the last bit of a platform's `exp` makes no difference."""
TEST_TOPIC_STRIDE = 3
"""Every third topic is for testing."""


@dataclass(frozen=True, kw_only=True)
class SyntheticPair:
    """A pair whose true utilities are known. Reply 0 is the one that the drawn label prefers."""

    preference: Preference
    utilities: tuple[float, float]
    """True utility of reply 0 and of reply 1, in logits."""
    true_probability: float
    """σ(u_0 − u_1), the probability that the label prefers reply 0; below ½ where noise decided the label."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The best that any reward model can expect on a set of pairs."""

    num_pairs: int
    correct: float
    """Pairs whose label agrees with the order of the true utilities; equal utilities count one half."""
    bayes_accuracy: float
    """mean(max(p, 1 − p)): what `accuracy` is on average over draws of the labels."""
    nll: float
    """Mean −log p of these labels under the true probabilities, in nats."""
    bayes_nll: float
    """Mean entropy of the labels, in nats: what `nll` is on average over draws of the labels."""
    mean_abs_difference: float
    """mean |u_0 − u_1|, in logits."""
    longer_preferred: float
    """Pairs whose preferred reply has more words; equal counts one half. Near half of the pairs, or length is a cue."""

    @property
    def accuracy(self) -> float:
        """Share of these labels that the true utilities get right."""
        return self.correct / self.num_pairs


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Something people ask about, and concrete advice on it."""

    name: str
    tips: tuple[str, ...]
    """Imperative clauses, lower case, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way in which a part of a reply can turn out."""

    share: float
    """Probability of this kind."""
    weight: float
    """What it adds to the utility, in logits."""
    texts: tuple[str, ...]
    """Sentences; `{topic}` and `{tip}` are filled in."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply and its true utility in logits."""

    text: str
    utility: float


def generate(num_pairs: int, *, seed: int, topics: TopicSplit) -> tuple[SyntheticPair, ...]:
    """Return `num_pairs` pairs about the topics of one split. Equal arguments give equal pairs on every platform.

    No prompt is used twice before all prompts of the split (`num_prompts`) have been used once.

    Raises DataError unless num_pairs is at least 1 and the seed at least 0.
    """
    if num_pairs < 1 or seed < 0:
        raise DataError(
            f"synthetic data: got {num_pairs} pairs and seed {seed}; wanted at least 1 pair and a seed ≥ 0."
        )
    # Only `random()` is drawn from: the other methods of a Generator may change between versions of numpy.
    generator = np.random.Generator(np.random.PCG64([seed, ("train", "test").index(topics)]))
    split = topics_of(topics)
    order = np.argsort(generator.random(num_prompts(topics)), kind="stable")
    pairs = []
    for index in range(num_pairs):
        number, topic = divmod(int(order[index % len(order)]), len(split))
        lead, question = divmod(number, len(QUESTIONS))
        prompt = LEADS[lead] + QUESTIONS[question].format(topic=split[topic].name)
        first = _draw_reply(generator, split, topic)
        second = _draw_reply(generator, split, topic)
        while second.text == first.text:
            second = _draw_reply(generator, split, topic)
        if generator.random() >= _sigmoid(first.utility - second.utility):
            first, second = second, first
        pairs.append(_to_pair(f"{SOURCE}[{topics}]:{index}", prompt, first, second))
    return tuple(pairs)


def topics_of(split: TopicSplit) -> tuple[Topic, ...]:
    """Return the topics of one split. No topic is in both."""
    for_test = split == "test"
    return tuple(
        topic for index, topic in enumerate(TOPICS) if (index % TEST_TOPIC_STRIDE == TEST_TOPIC_STRIDE - 1) == for_test
    )


def num_prompts(split: TopicSplit) -> int:
    """Return the number of different prompts of a split."""
    return len(topics_of(split)) * len(LEADS) * len(QUESTIONS)


def write_dataset(folder: Path, *, num_train: int, num_test: int, seed: int) -> None:
    """Write `train.jsonl` and `test.jsonl`: prompt, chosen, rejected, and the truth about each pair.

    Raises DataError as `generate` does.
    """
    splits: tuple[tuple[TopicSplit, int], ...] = (("train", num_train), ("test", num_test))
    rows = {split: [_to_row(pair) for pair in generate(num, seed=seed, topics=split)] for split, num in splits}
    folder.mkdir(parents=True, exist_ok=True)
    for split, _ in splits:
        write_jsonl(folder / f"{split}.jsonl", rows[split])


def ceiling(pairs: Sequence[SyntheticPair]) -> Ceiling:
    """Return what a model that knew the true utilities would reach on these pairs.

    Raises DataError if there are no pairs.
    """
    if not pairs:
        raise DataError("the ceiling of no pairs is undefined; generate at least 1 pair.")
    differences = np.array([pair.utilities[0] - pair.utilities[1] for pair in pairs], dtype=np.float64)
    probabilities = np.array([pair.true_probability for pair in pairs], dtype=np.float64)
    extra_words = np.array(
        [len(chosen.split()) - len(rejected.split()) for chosen, rejected in map(reply_texts, pairs)]
    )
    entropies = -probabilities * np.log(probabilities) - (1 - probabilities) * np.log1p(-probabilities)
    return Ceiling(
        num_pairs=len(pairs),
        correct=_count_positive(differences),
        bayes_accuracy=float(np.mean(np.maximum(probabilities, 1 - probabilities))),
        nll=float(-np.mean(np.log(probabilities))),
        bayes_nll=float(np.mean(entropies)),
        mean_abs_difference=float(np.mean(np.abs(differences))),
        longer_preferred=_count_positive(extra_words),
    )


def reply_texts(pair: SyntheticPair) -> tuple[str, str]:
    """Return (the chosen text, the rejected text)."""
    chosen, rejected = (reply[-1].content for reply in pair.preference.replies)
    return chosen, rejected


def _draw_reply(generator: np.random.Generator, topics: Sequence[Topic], asked: int) -> Reply:
    """Draw a reply to a prompt about `topics[asked]`: opener, body, and with some probability each of the extras."""
    opener = _pick_kind(generator, OPENERS)
    body = _pick_kind(generator, BODIES)
    about = asked
    if body is OFF_TOPIC:
        about = (asked + 1 + int(generator.random() * (len(topics) - 1))) % len(topics)
    tip = _pick(generator, topics[about].tips)
    texts = [_pick(generator, opener.texts), _pick(generator, body.texts)]
    utility = opener.weight + body.weight
    for extra in EXTRAS:
        if generator.random() >= extra.share or (extra is REPETITION and body is VAGUE):
            continue
        texts.append(_pick(generator, extra.texts))
        utility += extra.weight
    sentences = (_capitalise(text.format(topic=topics[about].name, tip=tip)) for text in texts if text)
    return Reply(text=" ".join(sentences), utility=round(utility, 6))


def _pick(generator: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(generator.random() * len(items))]


def _pick_kind(generator: np.random.Generator, kinds: Sequence[Kind]) -> Kind:
    """Draw a kind, each with its share as probability. The last one takes what rounding leaves."""
    threshold = generator.random()
    for kind in kinds:
        threshold -= kind.share
        if threshold < 0:
            return kind
    return kinds[-1]


def _to_pair(name: str, prompt: str, chosen: Reply, rejected: Reply) -> SyntheticPair:
    return SyntheticPair(
        preference=Preference(
            id=name,
            source=SOURCE,
            prompt=(Message("user", prompt),),
            replies=((Message("assistant", chosen.text),), (Message("assistant", rejected.text),)),
            comparisons=(Comparison(first=0, second=1, label=1.0),),
        ),
        utilities=(chosen.utility, rejected.utility),
        true_probability=_sigmoid(chosen.utility - rejected.utility),
    )


def _to_row(pair: SyntheticPair) -> dict[str, object]:
    chosen, rejected = reply_texts(pair)
    return {
        "prompt": pair.preference.prompt[0].content,
        "chosen": chosen,
        "rejected": rejected,
        "true_probability": round(pair.true_probability, PROBABILITY_DIGITS),
        "utilities": list(pair.utilities),
    }


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def _count_positive(differences: npt.NDArray) -> float:
    return float(np.sum(differences > 0) + 0.5 * np.sum(differences == 0))


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


LEADS = ("", "Hi! ", "Hello there! ", "Quick question. ", "Please help me. ", "I have a free weekend. ")

QUESTIONS = (
    "Do you have a tip on {topic}?",
    "What should I know about {topic}?",
    "Can you help me with {topic}?",
    "I am new to {topic}. What comes first?",
    "I keep struggling with {topic}. What helps?",
    "Is there a trick to {topic}?",
    "What would you tell a beginner about {topic}?",
    "My sister asked me about {topic}. Any advice?",
    "Tell me something useful about {topic}.",
    "What do people get wrong about {topic}?",
)

# Weights are in logits. They are set so that the true utilities agree with nearly nine labels out of ten, and so that
# the words that a part adds say nothing about its weight; tests check both.
WARM = Kind(
    share=0.32,
    weight=1.4,
    texts=(
        "Great question, happy to help!",
        "I'm so glad you asked!",
        "What a lovely thing to ask!",
        "You are on the right track!",
        "Thank you for asking!",
        "Of course, with pleasure!",
        "Good thinking, keep it up!",
    ),
)
NEUTRAL = Kind(
    share=0.28,
    weight=0.0,
    texts=("", "Sure.", "Here is one idea.", "One thing to know.", "A short answer.", "Here is what people do."),
)
CURT = Kind(share=0.10, weight=-1.0, texts=("Fine.", "Whatever.", "If I must.", "Not this again.", "So what."))
RUDE = Kind(
    share=0.30,
    weight=-3.2,
    texts=(
        "What a stupid question.",
        "Are you serious, fool?",
        "Just stop wasting my time.",
        "How dumb are you?",
        "Only an idiot would ask this.",
        "Your ignorance is embarrassing.",
        "Nobody cares, you clown.",
    ),
)
OPENERS = (WARM, NEUTRAL, CURT, RUDE)

TIP_FRAMES = ("{tip}.", "For {topic}, {tip}.", "With {topic}, {tip}.", "When it comes to {topic}, {tip}.")
CONCRETE = Kind(share=0.50, weight=1.8, texts=TIP_FRAMES)
VAGUE = Kind(
    share=0.26,
    weight=-1.2,
    texts=(
        "there are many different ways to look at {topic}.",
        "just do whatever seems best to you with {topic}.",
        "it is hard to say anything about {topic} in general.",
        "some people like {topic} one way and some another.",
        "with {topic}, it really depends on a lot.",
        "everyone has a different opinion on {topic}.",
    ),
)
OFF_TOPIC = Kind(share=0.24, weight=-2.8, texts=TIP_FRAMES)
BODIES = (CONCRETE, VAGUE, OFF_TOPIC)

REASON = Kind(
    share=0.20,
    weight=1.0,
    texts=(
        "This prevents most problems later.",
        "The reason is that small errors add up.",
        "For example, it saved me an hour last week.",
        "It works because you notice trouble early.",
        "That makes every later step easier.",
    ),
)
REPETITION = Kind(share=0.05, weight=-1.0, texts=("Again, {tip}.", "As I said, {tip}.", "I repeat: {tip}."))
FILLER = Kind(
    share=0.17,
    weight=-1.6,
    texts=(
        "In today's world, a great deal could be said.",
        "As we all know, things are the way they are.",
        "Since the dawn of time, people have wondered.",
        "At the end of the day, it is what it is.",
        "There are so many aspects, factors and considerations.",
    ),
)
CLOSING = Kind(
    share=0.17,
    weight=0.8,
    texts=(
        "Let me know how it goes!",
        "Want me to explain more?",
        "Tell me more and I can be specific.",
        "I can walk you through it.",
        "Feel free to ask again!",
    ),
)
EXTRAS = (REASON, REPETITION, FILLER, CLOSING)


def _parse_topics(text: str) -> tuple[Topic, ...]:
    """Return topics from lines `name: tip; tip; tip`, where an indented line continues the one above."""
    topics = []
    for line in text.strip().replace("\n ", " ").splitlines():
        name, tips = line.split(":", maxsplit=1)
        topics.append(Topic(name=name, tips=tuple(" ".join(tip.split()) for tip in tips.split(";"))))
    return tuple(topics)


TOPICS = _parse_topics(files("rewardlab.data").joinpath("synthetic_topics.txt").read_text(encoding="utf-8"))
