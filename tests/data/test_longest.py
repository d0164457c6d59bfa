"""A bound on the characters of a token holds for every text, and is not claimed where there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import make_tokenizer
from rewardlab.data.longest import longest_token

BYTES = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
    "\u2581": 256,
    "a": 257,
    "aa": 258,
    "\u2581aa": 259,
    "?": 260,
}


def byte_level(**parts: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(BYTES | {"aa": 256, "aaa": 257}, [("a", "a"), ("aa", "a")]))
    backend.pre_tokenizer = parts.pop("pre_tokenizer", None) or pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def pieces(*, normalizer: Any = None, **settings: Any) -> PreTrainedTokenizerFast:
    given = {"byte_fallback": True, "unk_token": "?", "fuse_unk": True} | settings
    backend = Tokenizer(models.BPE(PIECES, [("a", "a"), ("\u2581", "aa")], **given))
    backend.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BOUNDED = {
    "of the tests": make_tokenizer(),
    "byte level": byte_level(),
    "composing": byte_level(normalizer=normalizers.NFC()),
    "splitting": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    ),
    "pieces": pieces(),
    "pieces, unknown apart": pieces(byte_fallback=False, fuse_unk=False),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text(st.sampled_from("aA \n\u1f82\u0301\u0313\u0345\u0300\u03b1\u6f22\U0001f642")))
@settings(max_examples=100, deadline=None)
def test_no_token_stands_for_more_characters(name, text):
    tokenizer = BOUNDED[name]
    longest = longest_token(tokenizer)
    assert longest is not None
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(text) <= longest * len(token_ids)


def test_the_bound_is_the_longest_name():
    assert longest_token(byte_level()) == 3
    assert longest_token(byte_level(normalizer=normalizers.NFC())) == 4 * 3
    assert longest_token(pieces()) == len("<0x00>")
    added = byte_level()
    added.add_tokens([AddedToken("a long name", normalized=False)])
    assert longest_token(added) == len("a long name")


def absorbing() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<m>", lstrip=True)])
    return tokenizer


def of_words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))


@pytest.mark.parametrize(
    "make",
    [
        absorbing,
        of_words,
        lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        lambda: byte_level(normalizer=normalizers.NFKC()),
        lambda: byte_level(normalizer=normalizers.Strip()),
        lambda: byte_level(normalizer=normalizers.Replace("aa", "a")),
        lambda: pieces(byte_fallback=False),
        lambda: pieces(byte_fallback=False, unk_token=None),
        object,
    ],
)
def test_where_a_token_may_stand_for_any_number_no_bound_is_told(make):
    assert longest_token(make()) is None
