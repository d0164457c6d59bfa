"""The most characters that a token of a tokenizer can stand for, where its parts show that there is such a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

COMPOSED: Final = 4
"""Most characters of which NFC makes one."""
KEEPING: Final = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Pre-tokenizers that keep every character, unless their `behavior` is `Removed`."""


def longest_token(tokenizer: Any) -> int | None:
    """Return the most characters of a text for which one token can stand; None if that is unknown or without limit.

    It is known for BPE (the tokenizers of nearly all language models), where every character becomes part of a token's
    name. Tokens of other kinds may stand for any number: for words that are unknown, or for white space around them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    composed = _most_composed(content["normalizer"])
    added = content["added_tokens"]
    if (
        composed is None
        or content["model"]["type"] != "BPE"
        or not all(map(_keeps, _parts(content["pre_tokenizer"], "pretokenizers")))
        or not _knows_all(content)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    names = [*content["model"]["vocab"], *(token["content"] for token in added)]
    return composed * max(map(len, names), default=1)


def _parts(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence, or the part itself."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[name]:
        yield from _parts(one, name)


def _most_composed(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return the most characters that the normalizer makes one of; None if that is unknown."""
    most = 1
    for part in _parts(normalizer, "normalizers"):
        kind = part["type"]
        if kind == "NFC":
            most *= COMPOSED
        elif kind == "Replace":
            old = part["pattern"].get("String")
            if old is None or len(part["content"]) < len(old):
                return None
        elif kind not in ("ByteLevel", "Lowercase", "NFD", "Prepend"):
            return None
    return most


def _keeps(pretokenizer: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer keeps every character."""
    return pretokenizer["type"] in KEEPING and pretokenizer.get("behavior") != "Removed"


def _knows_all(content: Mapping[str, Any]) -> bool:
    """Return whether no run of unknown characters becomes one token, or none."""
    model = content["model"]
    parts = [*_parts(content["pre_tokenizer"], "pretokenizers"), *_parts(content["normalizer"], "normalizers")]
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        if all(letter in model["vocab"] for letter in ByteLevel.alphabet()):
            return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")
