"""Every JSON file of a folder, damaged in every field: refused in words, or without an effect on any score."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import save
from rewardlab.artifact import canaries
from rewardlab.artifact.load import load, require_files
from rewardlab.artifact.seal import seal
from rewardlab.core.errors import ArtifactError, RewardlabError
from rewardlab.core.files import sha256_text
from rewardlab.core.schema import MAX_BYTES, MAX_DEPTH, Refusal, read_object, typed
from rewardlab.core.spec import (
    DAMAGED,
    MAX_CANARIES,
    MAX_CANARY_TOKENS,
    SPEC_FILE,
    RendererSpec,
    RewardSpec,
    part_digests,
    parts_by_default,
    read_spec,
)
from rewardlab.serve.verifying.folder import verify
from sealing import seal_again, write_spec

DELETED = object()
HUGE = 10**30
DEEP: Any = "deep"
for _ in range(30):
    DEEP = [DEEP]
VALUES: list[Any] = [DELETED, None, True, "x", "", -1, 0, 3, 2.5, HUGE, 1e308, [], {}, [1], {"a": 1}, DEEP]
FEW: list[Any] = [DELETED, None, "x", -1, HUGE, [1]]
SOME_OR_ALL = pytest.mark.parametrize(
    "values", [FEW[::2], pytest.param(FEW, marks=pytest.mark.soak)], ids=["deleted, text, huge", "all"]
)
"""A value that is gone, of another kind or out of range; and a few more of the same."""
CONVERSATIONS = [
    [{"role": "user", "content": "How? " * 20}, {"role": "assistant", "content": "So. " * times}] for times in (1, 15)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder, with few canaries, since it is loaded some hundred times."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("damaged") / "rm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canaries, "CONVERSATIONS", canaries.CONVERSATIONS[:2])
        save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def scores(saved: Path) -> list[float]:
    """What the sound folder gives."""
    return load(saved).score(CONVERSATIONS)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of lists the first item alone."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for name, item in inner:
        yield (*place, name)
        yield from places(item, (*place, name))


def damaged(sound: Any, values: list[Any]) -> Iterator[tuple[str, Any]]:
    """(what was done, the damaged JSON value) for every place and every value that differs; few in long tables."""
    for place in places(sound):
        for value in values if place[0] not in ("digests", "files", "provenance") else FEW[:3]:
            changed = json.loads(json.dumps(sound))
            inner = changed
            for name in place[:-1]:
                inner = inner[name]
            if value is DELETED:
                del inner[place[-1]]
            elif inner[place[-1]] == value and isinstance(inner[place[-1]], bool) == isinstance(value, bool):
                continue
            else:
                inner[place[-1]] = value
            yield f"{'.'.join(map(str, place))} = {'deleted' if value is DELETED else repr(value)[:40]}", changed


def outcome(do: Callable[[], Any]) -> Any:
    """What comes of it, or the error in words; a traceback is a failure of the test."""
    try:
        return do()
    except RewardlabError as error:
        return str(error) if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"


def renew(folder: Path) -> bool:
    """Make all hashes and digests fit the damage; False for a spec that cannot be read at all."""
    try:
        seal_again(folder)
    except RewardlabError:
        return False
    return True


@pytest.mark.slow
def test_a_spec_with_any_field_damaged_is_refused_or_says_the_same(copy, saved):
    sound, values = read_spec(saved), json.loads((saved / SPEC_FILE).read_text())

    def read() -> RewardSpec:
        spec = read_spec(copy)
        require_files(copy, spec)
        return spec

    count = 0
    for what, changed in damaged(values, VALUES):
        write_spec(copy, changed)
        found = outcome(read)
        if isinstance(found, str):
            assert found.startswith(str(copy)), (what, found)
            assert found.rstrip(".").endswith(("again", "wrote it")), (what, found)
        else:
            assert found.to_dict() == sound.to_dict(), what
        count += 1
    assert count > 500


def loads_as_before(folder: Path, what: str, scores: Any) -> bool:
    """Whether a damaged folder loads, and then gives its scores; otherwise it is refused by name."""
    found = outcome(lambda: load(folder, attention="padded").score(CONVERSATIONS))
    if isinstance(found, str):
        assert found.startswith(str(folder)), (what, found)
        return False
    assert found == pytest.approx(scores, abs=1e-5), what
    return True


@pytest.mark.slow
@SOME_OR_ALL
def test_a_spec_damaged_together_with_its_hashes_is_no_traceback(copy, saved, scores, values):
    """Whoever renews all hashes may change what is not in the canaries; the rest is refused, in words."""
    sound = json.loads((saved / SPEC_FILE).read_text())
    loaded = set()
    for what, changed in damaged(sound, values):
        if what.startswith(("digests", "provenance", "files")):  # written anew
            continue
        if isinstance(changed.get("renderer"), dict) and isinstance(changed["renderer"].get("chat_template"), str):
            changed["renderer"]["template_hash"] = sha256_text(changed["renderer"]["chat_template"])
        write_spec(copy, changed)
        if not renew(copy):
            continue
        if loads_as_before(copy, what, scores):
            loaded.add(what.split(" ")[0].split(".")[0])
    assert "max_rounding_error" not in loaded, "negative, or no number"
    assert "renderer" in loaded, "what is not in the canaries"


@pytest.mark.slow
@SOME_OR_ALL
def test_a_configuration_damaged_together_with_its_hashes_is_refused_or_changes_no_score(copy, saved, scores, values):
    sound = json.loads((saved / "config.json").read_text())
    loaded = 0
    for what, changed in damaged(sound, values):
        (copy / "config.json").write_text(json.dumps(changed))
        if not renew(copy):
            continue
        loaded += loads_as_before(copy, what, scores)
    assert loaded > 10


TEXTS: dict[str, tuple[Callable[[str], str], str]] = {
    "a list": (lambda text: f"[{text}]", "expected an object, found a list"),
    "null": (lambda text: "null", "expected an object, found null"),
    "nothing": (lambda text: "", "not valid JSON"),
    "cut off": (lambda text: text[: len(text) // 2], "not valid JSON"),
    "NaN": (lambda text: text.replace("{", '{"new": NaN,', 1), "holds NaN, which JSON does not allow"),
    "infinity": (lambda text: text.replace("{", '{"new": 1e999,', 1), "holds 1e999, which is too large"),
    "a name twice": (lambda text: text.replace("{", '{"new": 1, "new": 2,', 1), "'new': appears twice"),
    "half a character": (lambda text: text.replace("{", '{"new": "\\ud800",', 1), "holds a lone surrogate"),
    "deep": (lambda text: text.replace("{", f'{{"new": {"[" * 70}{"]" * 70},', 1), f"more than {MAX_DEPTH} levels"),
    "deeper": (lambda text: text.replace("{", f'{{"new": {"[" * 99999}', 1), "not valid JSON"),
    "digits": (lambda text: text.replace("{", f'{{"new": {"9" * 9999},', 1), "not valid JSON"),
    "huge": (lambda text: text + " " * MAX_BYTES, f"at most {MAX_BYTES} are read"),
}


@pytest.mark.parametrize("file", [SPEC_FILE, "config.json"])
@pytest.mark.parametrize("case", TEXTS)
def test_a_file_that_is_no_plain_json_object_is_refused_by_name(copy, file, case):
    change, said = TEXTS[case]
    (copy / file).write_text(change((copy / file).read_text()))
    for check in (load, verify):
        with pytest.raises(ArtifactError) as refused:
            check(copy)
        assert str(refused.value).startswith(f"{copy / file}: ")
        assert said in str(refused.value)
        assert "save the model again" in str(refused.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("case", TEXTS)
def test_a_damaged_tokenizer_whose_hashes_fit_is_no_traceback(copy, file, case, scores):
    (copy / file).write_text(TEXTS[case][0]((copy / file).read_text()))
    seal_again(copy)
    try:
        found = load(copy, attention="padded").score(CONVERSATIONS)
    except RewardlabError:
        return
    assert found == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec["canaries"].extend(spec["canaries"][:1] * MAX_CANARIES), "canaries: expected at most 64"),
        (lambda spec: spec["canaries"][0].update(token_ids=[1] * (MAX_CANARY_TOKENS + 1)), "token_ids: expected 1 to"),
        (lambda spec: spec["canaries"][0].update(token_ids=[2, None]), "[1]: expected a whole number, found null"),
        (lambda spec: spec["canaries"][0].update(score=None), "canaries[0].score: expected a number, found null"),
        (lambda spec: spec["canaries"][0].update(score="1"), "[0].score: expected a number, found a text, '1'"),
        (lambda spec: spec["canaries"][0]["decoys"].update(sigmoid=[]), "sigmoid: expected a number, found a list"),
        (lambda spec: spec["canaries"][1].pop("messages"), "canaries[1].messages: is missing; expected a list"),
        (lambda spec: spec["canaries"][1]["messages"][0].pop("role"), "canaries[1].messages: expected one message or"),
        (lambda spec: spec.update(betta=1.0), "betta: unknown field. Did you mean 'beta'?"),
        (lambda spec: spec.update(beta=True), "beta: expected a number, found true"),
        (lambda spec: spec.update(beta=-1.0), "beta: expected above 0, found -1.0"),
        (lambda spec: spec.update(affine=[1.0]), "expected a list of 2: a number, a number or null, found a list"),
        (lambda spec: spec["renderer"].update(max_length=HUGE), "max_length: expected a whole number, found"),
        (lambda spec: spec["renderer"].update(final_token_id="2"), "a whole number or null, found a text, '2'"),
        (lambda spec: spec["renderer"].update(truncation="newest"), "truncation: expected one of oldest_turns_first, "),
    ],
)  # fmt: skip
def test_a_wrong_field_is_told_with_what_was_found_and_what_was_expected(copy, change, said):
    values = json.loads((copy / SPEC_FILE).read_text())
    change(values)
    write_spec(copy, values)
    with pytest.raises(ArtifactError) as refused:
        load(copy)
    assert str(refused.value).startswith(f"{copy / SPEC_FILE}: ")
    assert said in str(refused.value)


@pytest.mark.slow
def test_140000_canaries_are_refused_before_any_is_computed(copy, monkeypatch):
    values = json.loads((copy / SPEC_FILE).read_text())
    values["canaries"] = [values["canaries"][0] | {"messages": [], "token_ids": [1]}] * 140_000
    write_spec(copy, values)
    with pytest.raises(ArtifactError, match=r"(canaries: expected at most 64, found '140000|at most \d+ are read)"):
        load(copy)


# --- fields that come later ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Later(RendererSpec):
    """A renderer with one more field."""

    new: bool = False


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Something with a part."""

    part: Later
    more: dict[str, list[int]] = field(default_factory=dict)


def test_the_check_knows_the_fields_of_the_dataclass_and_a_new_one_with_a_default_may_be_absent(saved):
    renderer = json.loads((saved / SPEC_FILE).read_text())["renderer"]
    del renderer["template_hash"]
    read = typed(Whole, {"part": renderer}, where="here", refusal=DAMAGED)
    assert (read.part.new, read.more) == (False, {})
    read = typed(Whole, {"part": renderer | {"new": True}, "more": {"a": [1]}}, where="here", refusal=DAMAGED)
    assert (read.part.new, read.more) == (True, {"a": [1]})
    with pytest.raises(ArtifactError, match=r"here: part.new: expected true or false, found a whole number, 1\."):
        typed(Whole, {"part": renderer | {"new": 1}}, where="here", refusal=DAMAGED)


def test_a_folder_from_before_a_field_loads_while_the_field_has_its_default(copy, monkeypatch):
    """As it is for a field that this version adds: the older folder has neither the field nor its digest."""
    values = json.loads((copy / SPEC_FILE).read_text())
    for part, name in ((values, "exported_from"), (values["renderer"], "template_arguments")):
        del part[name]
    for name in ("exported_from", "renderer.template_arguments"):
        del values["digests"][name]
    write_spec(copy, values)
    monkeypatch.setattr("rewardlab.artifact.seal.OF_THE_RUN", ())
    spec = read_spec(copy)
    assert {"exported_from", "renderer.template_arguments"} <= parts_by_default(spec)
    assert spec.digests.keys() < part_digests(spec).keys()
    # The digest of the digests stands in the other files, as it would have been written then.
    write_spec(copy, as_sealed_without(copy, {"exported_from", "renderer.template_arguments"}))
    assert load(copy).beta == 1.5


def as_sealed_without(folder: Path, names: set[str]) -> dict[str, Any]:
    """The spec as a version wrote it that did not know these parts."""
    import rewardlab.artifact.seal as module

    own = module.part_digests

    def fewer(spec: RewardSpec) -> dict[str, str]:
        return {name: digest for name, digest in own(spec).items() if name not in names}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "part_digests", fewer)
        values = seal(folder, read_spec(folder)).to_dict()
    values.pop("exported_from")
    values["renderer"].pop("template_arguments")
    return values


def test_other_files_are_refused_in_the_words_of_their_reader(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(RewardlabError, match=r"a.json: expected an object, found a list. Look at it."):
        read_object(tmp_path / "a.json", Refusal(error=RewardlabError, remedy="Look at it."))
