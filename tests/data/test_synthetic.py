"""Laws of the generated preferences: reproducible, honest about their noise, and not to be solved by a shortcut."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_jsonl, sha256_file
from rewardlab.data.synthetic import (
    BODIES,
    EXTRAS,
    OPENERS,
    TOPICS,
    SyntheticPair,
    ceiling,
    generate,
    num_prompts,
    reply_texts,
    topics_of,
    write_dataset,
)

# Changing any text, weight or share changes these; then say so in CHANGELOG.md and measure the quickstart again.
PINNED_SHA256 = {
    "train.jsonl": "cb224f9db07ef4e738038ca9162f3d49c17e255111e6b60a233435b155134bb7",
    "test.jsonl": "af93865a2c1284780a494ffa4d248641b1baa25d9bf6bb01e2128199e892ca27",
}


@pytest.fixture(scope="module")
def many_pairs() -> tuple[SyntheticPair, ...]:
    return generate(8000, seed=11, topics="train")


def test_the_written_dataset_is_the_same_on_every_platform(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", num_train=300, num_test=100, seed=0)
    assert {name: sha256_file(tmp_path / "data" / name) for name in PINNED_SHA256} == PINNED_SHA256


@pytest.mark.slow
def test_hash_randomisation_does_not_change_the_pairs() -> None:
    code = "from rewardlab.data.synthetic import generate; print(generate(20, seed=4, topics='test'))"
    command = [sys.executable, "-c", code]
    outputs = {
        subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_more_pairs_continue_fewer_pairs_and_another_seed_differs() -> None:
    few, more = generate(5, seed=0, topics="train"), generate(9, seed=0, topics="train")
    assert more[:5] == few
    assert generate(5, seed=1, topics="train") != few


def test_generation_needs_no_torch() -> None:
    code = "import sys, rewardlab.data.synthetic; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_train_and_test_topics_are_disjoint_and_together_are_all() -> None:
    names = [[topic.name for topic in topics_of(split)] for split in ("train", "test")]
    assert not set(names[0]) & set(names[1])
    assert sorted(names[0] + names[1]) == sorted(topic.name for topic in TOPICS)
    assert len({topic.name for topic in TOPICS}) == len(TOPICS) >= 60
    tips = [tip for topic in TOPICS for tip in topic.tips]
    assert all(len(topic.tips) >= 3 for topic in TOPICS)
    assert len(set(tips)) == len(tips)


def test_no_text_of_one_split_names_a_topic_of_the_other() -> None:
    texts = " ".join(text for pair in generate(500, seed=2, topics="test") for text in reply_texts(pair)).lower()
    tips = [tip for topic in topics_of("train") for tip in topic.tips]
    assert not [tip for tip in tips if tip.lower() in texts]


def test_no_prompt_comes_twice_before_all_have_come_once() -> None:
    prompts = [pair.preference.prompt for pair in generate(num_prompts("test") + 1, seed=0, topics="test")]
    assert len(set(prompts[:-1])) == num_prompts("test")
    assert prompts[-1] == prompts[0]


def test_a_pair_has_two_different_replies_and_prefers_the_first(many_pairs: tuple[SyntheticPair, ...]) -> None:
    for pair in many_pairs:
        chosen, rejected = reply_texts(pair)
        (comparison,) = pair.preference.comparisons
        assert chosen != rejected
        assert (comparison.first, comparison.second, comparison.label) == (0, 1, 1.0)
        assert pair.true_probability == pytest.approx(1 / (1 + math.exp(pair.utilities[1] - pair.utilities[0])))
        assert not re.search(r"[{}]|  |\.\.|\?\.", chosen + rejected)


def test_utility_is_the_sum_of_the_weights_of_the_parts(many_pairs: tuple[SyntheticPair, ...]) -> None:
    sums = {
        round(
            opener.weight + body.weight + sum(weight for weight, taken in zip(weights, bits, strict=True) if taken), 6
        )
        for opener in OPENERS
        for body in BODIES
        for weights in [[extra.weight for extra in EXTRAS]]
        for bits in np.ndindex(2, 2, 2, 2)
    }
    assert {utility for pair in many_pairs for utility in pair.utilities} <= sums
    for kinds in (OPENERS, BODIES):
        assert sum(kind.share for kind in kinds) == pytest.approx(1)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.75), (0.75, 0.9), (0.9, 0.97), (0.97, 1.0)])
def test_labels_are_as_frequent_as_their_probability_says(
    many_pairs: tuple[SyntheticPair, ...], low: float, high: float
) -> None:
    probabilities = [pair.true_probability for pair in many_pairs]
    better = [max(p, 1 - p) for p in probabilities if low < max(p, 1 - p) <= high]
    won = sum(low < p <= high for p in probabilities)
    spread = math.sqrt(sum(p * (1 - p) for p in better))
    assert len(better) > 300
    assert abs(won - sum(better)) < 4 * spread


def test_length_neither_predicts_the_label_nor_follows_the_utility(many_pairs: tuple[SyntheticPair, ...]) -> None:
    best = ceiling(many_pairs)
    assert best.longer_preferred / best.num_pairs == pytest.approx(0.5, abs=0.02)
    utilities = [utility for pair in many_pairs for utility in pair.utilities]
    lengths = [len(text.split()) for pair in many_pairs for text in reply_texts(pair)]
    assert abs(stats.pearsonr(utilities, lengths).statistic) < 0.04
    assert np.mean(lengths) < 20


def test_the_best_possible_accuracy_is_nearly_nine_in_ten(many_pairs: tuple[SyntheticPair, ...]) -> None:
    best = ceiling(many_pairs)
    assert 0.86 <= best.bayes_accuracy <= 0.90
    assert best.accuracy == pytest.approx(best.bayes_accuracy, abs=4 * 0.5 / math.sqrt(best.num_pairs))


def test_counting_words_finds_some_of_the_signal_but_stays_clearly_below_the_ceiling() -> None:
    train, test = generate(800, seed=0, topics="train"), generate(1200, seed=0, topics="test")
    vectorizer = CountVectorizer().fit([text for pair in train for text in reply_texts(pair)])

    def differences(pairs: tuple[SyntheticPair, ...]) -> np.ndarray:
        chosen, rejected = zip(*map(reply_texts, pairs), strict=True)
        return (vectorizer.transform(chosen) - vectorizer.transform(rejected)).toarray()

    features = differences(train)
    model = LogisticRegression(C=0.1, fit_intercept=False, max_iter=500)
    model.fit(np.concatenate([features, -features]), [1] * len(features) + [0] * len(features))
    logits = differences(test) @ model.coef_[0]
    accuracy = np.mean((logits > 0) + 0.5 * (logits == 0))
    assert 0.66 < accuracy < 0.78
    assert accuracy < ceiling(test).accuracy - 0.08


def test_the_ceiling_equals_brute_force() -> None:
    pairs = generate(200, seed=3, topics="test")
    best = ceiling(pairs)
    correct = bayes = nll = entropy = distance = longer = 0.0
    for pair in pairs:
        u, v = pair.utilities
        p = math.exp(u) / (math.exp(u) + math.exp(v))
        correct += 1.0 if u > v else 0.5 if u == v else 0.0
        bayes += p if p > 0.5 else 1 - p
        nll -= math.log(p)
        entropy += stats.entropy([p, 1 - p])
        distance += abs(u - v)
        words, other_words = (len(text.split()) for text in reply_texts(pair))
        longer += 1.0 if words > other_words else 0.5 if words == other_words else 0.0
    assert (best.num_pairs, best.correct, best.longer_preferred) == (200, correct, longer)
    assert best.accuracy == correct / 200
    assert [best.bayes_accuracy, best.nll, best.bayes_nll, best.mean_abs_difference] == pytest.approx(
        [bayes / 200, nll / 200, entropy / 200, distance / 200], rel=1e-12
    )


def test_written_rows_carry_the_truth(tmp_path: Path) -> None:
    write_dataset(tmp_path, num_train=3, num_test=2, seed=7)
    for split, num in (("train", 3), ("test", 2)):
        rows = [row for _, row in read_jsonl(tmp_path / f"{split}.jsonl")]
        pairs = generate(num, seed=7, topics=split)
        assert [set(row) for row in rows] == [{"prompt", "chosen", "rejected", "true_probability", "utilities"}] * num
        for row, pair in zip(rows, pairs, strict=True):
            assert (row["prompt"], (row["chosen"], row["rejected"])) == (
                pair.preference.prompt[0].content,
                reply_texts(pair),
            )
            assert row["true_probability"] == pytest.approx(pair.true_probability, abs=1e-6)
            assert row["utilities"] == list(pair.utilities)


def test_asking_for_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="at least 1 pair"):
        generate(0, seed=0, topics="train")
    with pytest.raises(DataError, match="seed ≥ 0"):
        generate(1, seed=-1, topics="train")
    with pytest.raises(DataError, match="at least 1 pair"):
        ceiling(())
