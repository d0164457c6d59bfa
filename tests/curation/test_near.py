"""Near duplicates against all pairs compared by brute force, and the laws of their groups."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import DataError
from rewardlab.curation import near
from rewardlab.curation.files.grouping import Seen, joined
from rewardlab.curation.near import PERMUTATIONS, SHINGLE_WORDS, near_groups, numbered, signatures
from rewardlab.curation.shingles import shingle_hashes, words_of
from rewardlab.data.splits import Texts

VOCABULARY = [f"w{number}" for number in range(2_000)]


def shingle_set(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    if len(words) < SHINGLE_WORDS:
        return {tuple(words)} if words else set()
    return {tuple(words[at : at + SHINGLE_WORDS]) for at in range(len(words) - SHINGLE_WORDS + 1)}


def jaccard(first: str, second: str) -> float:
    one, other = shingle_set(first), shingle_set(second)
    return len(one & other) / len(one | other) if one or other else 0.0


def pair_of(rng: random.Random, similarity: float) -> tuple[str, str]:
    """Return two texts whose similarity is about the one asked for: the second has another end."""
    length = rng.randrange(40, 200)
    words = rng.choices(VOCABULARY, k=length)
    # A common beginning of c words and other ends: (c − 2) / (2(n − 2) − (c − 2)).
    common = round(2 * similarity * (length - 2) / (1 + similarity)) + 2
    return " ".join(words), " ".join(words[:common] + rng.choices(VOCABULARY, k=length - common))


def found(pairs: list[tuple[str, str]]) -> list[bool]:
    """Return whether the texts of each pair are in one group, all texts of all pairs at once."""
    groups = near_groups(signatures([text for pair in pairs for text in pair])).reshape(-1, 2)
    return (groups[:, 0] == groups[:, 1]).tolist()


@pytest.mark.slow
def test_pairs_of_similarity_of_at_least_nine_tenths_are_found_and_none_below_seven_tenths() -> None:
    rng = random.Random(0)
    pairs = [pair_of(rng, rng.uniform(0.3, 1.0)) for _ in range(3_000)]
    similar = np.array([jaccard(*pair) for pair in pairs])
    is_found = np.array(found(pairs))
    assert (similar >= 0.9).sum() > 300
    assert ((similar < 0.7) & (similar > 0.6)).sum() > 300
    assert is_found[similar >= 0.9].mean() > 0.99
    assert not is_found[similar < 0.7].any()


@pytest.mark.slow
def test_groups_are_the_components_of_all_pairs_compared_by_brute_force() -> None:
    rng = random.Random(1)
    texts = []
    for _ in range(40):
        # Copies with at most one other word: similarities far above or far below the threshold.
        words = rng.choices(VOCABULARY, k=120)
        for _ in range(rng.randrange(1, 5)):
            copy = list(words)
            copy[rng.randrange(len(copy))] = "other"
            texts.append(" ".join(copy))
    rng.shuffle(texts)
    wanted = list(range(len(texts)))
    for one, other in itertools.combinations(range(len(texts)), 2):
        if jaccard(texts[one], texts[other]) >= 0.8 and wanted[one] != wanted[other]:
            wanted = [wanted[one] if group == wanted[other] else group for group in wanted]
    assert near_groups(signatures(texts)).tolist() == numbered(np.array(wanted)).tolist()


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="ab \n中", max_size=12), max_size=30), st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_the_order_of_texts(texts: list[str], rng: random.Random) -> None:
    order = list(range(len(texts)))
    rng.shuffle(order)
    groups = near_groups(signatures(texts))
    shuffled = near_groups(signatures([texts[place] for place in order]))
    assert numbered(groups[order]).tolist() == shuffled.tolist()


def test_a_large_bucket_is_divided_and_its_duplicates_are_found_in_any_order() -> None:
    """1,000 prompts share 60 of 75 words, and 100 of them come twice with one other word at the end."""
    rng = random.Random(2)
    instruction = " ".join(rng.choices(VOCABULARY, k=60))
    own = [" ".join(rng.choices(VOCABULARY, k=15)) for _ in range(1_000)]
    texts = [f"{instruction} {words}" for words in own] + [f"{instruction} {words} end" for words in own[:100]]
    groups = near_groups(signatures(texts))
    assert (groups[:100] == groups[1_000:]).mean() > 0.98
    assert len(set(groups.tolist())) > 900
    order = rng.sample(range(len(texts)), len(texts))
    assert numbered(groups[order]).tolist() == near_groups(signatures([texts[place] for place in order])).tolist()


def test_many_copies_of_one_text_are_one_group() -> None:
    assert near_groups(signatures(["the same words again and again"] * 5_000 + ["other words"])).tolist() == [
        0
    ] * 5_000 + [1]


def test_short_texts_are_alike_only_if_they_are_the_same() -> None:
    texts = ["Yes", "yes", "no", "yes no", " YES\tno ", "no yes", "yes no yes"]
    assert near_groups(signatures(texts)).tolist() == [0, 0, 1, 2, 2, 3, 4]


def test_texts_without_words_stay_apart() -> None:
    assert near_groups(signatures(["", " ", "\n", "a", ""])).tolist() == [0, 1, 2, 3, 4]


def test_some_of_the_texts_are_grouped_in_place_as_a_copy_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are equal, similar, without words and apart, several batches of them, in any order and twice."""
    rng = random.Random(5)
    texts = [text for _ in range(60) for text in pair_of(rng, rng.uniform(0.3, 1.0))] + ["", " ", "once", "once"] * 3
    whole = signatures(texts)
    # A text whose first hash alone is that of a text without words.
    whole[7, 0] = whole[texts.index("")][0]
    monkeypatch.setattr(near, "_BATCH", 16)
    for seed in range(5):
        chosen = np.random.default_rng(seed).integers(0, len(texts), 90)
        kept = whole.copy()
        found = near_groups(whole, texts_T=chosen)
        assert found.tolist() == near_groups(whole[chosen]).tolist()
        empty = [place for place, text in enumerate(chosen.tolist()) if not texts[text].strip()]
        assert len(set(found[empty])) == len(empty), "each text without words is a group"
        np.testing.assert_array_equal(whole, kept)


def test_groups_of_some_texts_hold_no_copy_of_the_signatures() -> None:
    whole = np.random.default_rng(0).integers(0, 2**16 - 1, (20_000, PERMUTATIONS), dtype=np.uint16)
    chosen = np.arange(len(whole))[::-1].copy()
    near_groups(whole[:100])  # what is imported at the first call
    tracemalloc.start()
    try:
        near_groups(whole, texts_T=chosen)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < whole.nbytes


def test_chunks_are_joined_with_one_copy_of_their_signatures() -> None:
    draw = np.random.default_rng(0)
    keys = np.unique(draw.integers(0, 2**60, 4000, dtype=np.uint64))
    whole = draw.integers(0, 2**16 - 1, (len(keys), PERMUTATIONS), dtype=np.uint16)
    chunks = []
    for _ in range(10):
        own = np.sort(draw.choice(len(keys), 900, replace=False))  # prompts are in several chunks
        texts = Texts(
            prompts_P=keys[own],
            first_turns_P=keys[own],
            replies_R=keys[own],
            long_R=np.ones(len(own), bool),
            owners_R=np.arange(len(own)),
        )
        chunks.append(Seen(texts=texts, prompts_U=keys[own], signatures_UH=whole[own]))
    joined(chunks[:2])  # what is imported at the first call
    tracemalloc.start()
    try:
        found = joined([joined(chunks)])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.signatures_UH is not None
    assert most < 1.8 * found.signatures_UH.nbytes
    np.testing.assert_array_equal(found.signatures_UH, whole[np.isin(keys, found.prompts_U)])
    assert found.texts.owners_R.tolist() == list(range(9000))


def test_without_texts_there_are_no_groups() -> None:
    assert near_groups(signatures([])).tolist() == []


def test_texts_in_scripts_without_spaces_are_compared_by_characters() -> None:
    first = "近年人工智能技术快速发展,许多公司正在研究如何让模型更好地理解人类的偏好和价值观。"
    texts = [first, first.replace("许多", "很多"), "今天天气很好,我们一起去公园散步,然后去吃午饭吧。", "ก็ดีนะ", "ก็ดีมาก"]
    groups = near_groups(signatures(texts), threshold=0.7).tolist()
    assert groups == [0, 0, 1, 2, 3]
    assert words_of("GPT 模型") == ["gpt", "模", "型"]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_any_threshold_divides_pairs_above_it_from_those_below(threshold: float) -> None:
    rng = random.Random(3)
    pairs = [pair_of(rng, rng.uniform(0.05, 1.0)) for _ in range(400)]
    groups = near_groups(signatures([text for pair in pairs for text in pair]), threshold=threshold).reshape(-1, 2)
    similar = np.array([jaccard(*pair) for pair in pairs])
    is_found = groups[:, 0] == groups[:, 1]
    assert is_found[similar > threshold + 0.13].all()
    assert not is_found[similar < threshold - 0.13].any()


def test_signatures_estimate_the_similarity() -> None:
    rng = random.Random(4)
    pairs = [pair_of(rng, 0.5) for _ in range(300)]
    signatures_PTH = signatures([text for pair in pairs for text in pair]).reshape(300, 2, PERMUTATIONS)
    estimates = (signatures_PTH[:, 0] == signatures_PTH[:, 1]).mean(axis=1)
    errors = estimates - [jaccard(*pair) for pair in pairs]
    # 0.031 is the standard deviation at 0.5.
    assert abs(errors.mean()) < 4 * 0.031 / 300**0.5
    assert 0.025 < errors.std() < 0.038


def test_a_signature_does_not_depend_on_the_texts_beside_it() -> None:
    texts = ["one two three four", "", "five", "long " * 20_000]
    together = signatures(texts)
    assert all((signatures([text]) == row).all() for text, row in zip(texts, together, strict=True))


def test_shingle_hashes_are_equal_exactly_where_shingles_are() -> None:
    texts = ["a b c a b c", "B C A b", "a b", "", "a"]
    hashes, offsets = shingle_hashes(texts, 3)
    words = [words_of(text) for text in texts]
    shingles = [tuple(text[at : at + 3]) for text in words for at in range(max(len(text) - 2, min(len(text), 1)))]
    assert offsets.tolist() == [0, 4, 6, 7, 7, 8]
    for (one, first), (other, second) in itertools.combinations(zip(shingles, hashes.tolist(), strict=True), 2):
        assert (one == other) == (first == second)


@pytest.mark.slow
def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from rewardlab.curation.shingles import shingle_hashes\n"
        "print(shingle_hashes(['a b', 'é \\ud800'], 2)[0].tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{shingle_hashes(['a b', 'é ' + chr(0xD800)], 2)[0].tolist()}\n"}


def test_without_datasketch_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(DataError, match=r'pip install "rewardlab\[data\]"'):
        signatures(["a"])
