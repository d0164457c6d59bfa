"""Groups come back from disk as they were, from several stores, in any order; a damaged store is none."""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import numpy as np
import pytest

from rewardlab.core.types import Comparison, Message, Preference, TokenGroup
from rewardlab.data.groups import Groups, Part, num_replies, weigh
from rewardlab.data.pack import cost, costs, largest_cost, largest_groups, plan_groups, require_fit
from rewardlab.data.store import MANIFEST, DamagedError, LeftOut, StoreWriter, TokenStore, encode, open_store
from rewardlab.data.token_report import report_of

Outcome = TokenGroup | LeftOut


def outcomes(count: int, seed: int = 0) -> tuple[list[Preference], list[Outcome]]:
    """Preferences of two to five replies and what came of them, every field of its own; each fifth is left out."""
    draw = np.random.default_rng(seed)
    preferences, found = [], []
    for number in range(count):
        num_replies = int(draw.integers(2, 6))
        preference = Preference(
            id=f"fïle:{seed}:{number}",
            source="s",
            prompt=(Message("user", f"prompt {draw.integers(6)}"),),
            replies=tuple((Message("assistant", str(reply)),) for reply in range(num_replies + 1)),
            comparisons=tuple(
                Comparison(
                    first=i,
                    second=j,
                    label=float(draw.choice([0.2, 1.0])),
                    weight=float(draw.uniform(0.1, 2.0)),
                    margin=float(draw.choice([0.0, 0.7])),
                    strength=None if draw.random() < 0.5 else float(draw.uniform(0, 3)),
                )
                for i in range(num_replies)
                for j in range(i + 1, num_replies)
            ),
        )
        preferences.append(preference)
        if number % 5 == 3:
            found.append(LeftOut(str(draw.choice(["overlong", "template_refuses"])), f"{preference.id}: näme"))
            continue
        suffixes = [draw.integers(1, 99, int(draw.integers(1, 9))).astype(np.int32) for _ in range(num_replies)]
        found.append(
            TokenGroup(
                preference_id=preference.id,
                source="s",
                prompt_key=preference.key,
                shared=draw.integers(1, 99, int(draw.integers(0, 12))).astype(np.int32),
                suffixes=tuple(suffixes),
                prompt_tokens=tuple(int(n) for n in draw.integers(0, 12, num_replies)),
                truncated_tokens=tuple(int(n) for n in draw.integers(0, 3, num_replies)),
                comparisons=preference.comparisons[: int(draw.integers(1, len(preference.comparisons) + 1))],
                ranking=tuple(int(n) for n in draw.permutation(num_replies)) if draw.random() < 0.5 else None,
                numbers=tuple(sorted(map(int, draw.choice(9, num_replies, replace=False)))),
            )
        )
    return preferences, found


def write(folder: Path, preferences: list[Preference], found: list[Outcome], *, chunk: int = 7) -> TokenStore:
    """A store written in chunks and opened."""
    folder.mkdir()
    with StoreWriter(folder) as writer:
        for start in range(0, len(found), chunk):
            writer.append(encode(preferences[start : start + chunk], found[start : start + chunk]))
        writer.finish(source="s", facts={"rows": len(found)})
    return open_store(folder)


def plain(group: TokenGroup) -> tuple[object, ...]:
    """A group as values that can be compared."""
    return (
        group.preference_id,
        group.source,
        group.prompt_key,
        group.shared.tolist(),
        [suffix.tolist() for suffix in group.suffixes],
        group.prompt_tokens,
        group.truncated_tokens,
        group.comparisons,
        group.ranking,
        group.numbers,
    )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Part, list[Preference], list[Outcome]]:
    """All preferences of two stores, and the same in memory."""
    first, second = outcomes(23), outcomes(18, seed=1)
    stores = [write(tmp_path / "first", *first), write(tmp_path / "second", *second, chunk=5)]
    part = Part.join([(store, np.arange(store.num_preferences)) for store in stores])
    return part, [*first[0], *second[0]], [*first[1], *second[1]]


def test_groups_of_several_stores_come_back_as_they_were_in_any_order(two):
    part, _, found = two
    order = np.random.default_rng(0).permutation(len(found))
    kept = [found[n] for n in order if isinstance(found[n], TokenGroup)]
    groups = part.take(order).groups()
    assert [plain(group) for group in groups] == [plain(group) for group in kept]
    assert [plain(group) for group in groups[3:9:2]] == [plain(group) for group in kept[3:9:2]]
    assert plain(groups[-1]) == plain(kept[-1])
    assert plain(groups[np.int64(2)]) == plain(kept[2])
    with pytest.raises(IndexError):
        groups[len(kept)]
    with pytest.raises(ValueError, match="read-only"):
        groups[0].suffixes[0][:] = 0


def test_columns_say_what_the_groups_would(two):
    part, preferences, found = two
    groups, listed = part.groups(), [group for group in found if isinstance(group, TokenGroup)]
    assert groups.num_tokens().tolist() == [group.num_tokens for group in listed]
    assert groups.num_unshared_tokens().tolist() == [group.num_unshared_tokens for group in listed]
    assert groups.longest().tolist() == [max(group.lengths) for group in listed]
    assert groups.num_replies().tolist() == [group.num_replies for group in listed]
    assert [f"{key:016x}" for key in groups.prompt_keys()] == [group.prompt_key for group in listed]
    assert [f"{key:016x}" for key in part.prompt_keys()] == [preference.key for preference in preferences]
    for layout in ("shared", "unshared", "padded"):
        assert costs(groups, layout) == costs(listed, layout)
        assert plan_groups(groups, 300, layout=layout) == plan_groups(listed, 300, layout=layout)
        require_fit([groups], max(costs(listed, layout)), layout=layout)
        with pytest.raises(ValueError, match="--micro-token-budget"):
            require_fit([groups[:0], groups], max(costs(listed, layout)) - 1, layout=layout)


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
def test_of_stored_groups_only_the_largest_are_built_and_they_are_those_of_a_list(two, built, layout):
    part, _, found = two
    groups, listed = part.groups(), [group for group in found if isinstance(group, TokenGroup)]
    assert num_replies(groups).tolist() == num_replies(listed).tolist() == [len(group.suffixes) for group in listed]
    assert largest_cost([groups[:0], groups], layout) == largest_cost([listed], layout) == max(costs(listed, layout))
    assert largest_cost([], layout) == largest_cost([[]], layout) == 0
    assert built == []
    for count in (1, 5, len(listed), len(listed) + 3):
        built.clear()
        wanted = heapq.nlargest(count, listed, key=lambda group: cost(group, layout))
        assert [plain(group) for group in largest_groups(groups, count, layout)] == [plain(group) for group in wanted]
        assert len(built) == len(wanted)
        assert [plain(group) for group in largest_groups(listed, count, layout)] == [plain(group) for group in wanted]
    built.clear()
    require_fit([groups, groups[:0]], max(costs(listed, layout)), layout=layout)
    assert len(built) == 1
    assert largest_groups(groups[:0], 4, layout) == largest_groups([], 4, layout) == []


def test_the_report_of_a_part_counts_what_is_in_it(two):
    part, preferences, found = two
    chosen = np.random.default_rng(1).permutation(len(found))[:25]
    report = report_of(part.take(chosen))
    pairs = [(preferences[n], found[n]) for n in chosen]
    groups = [(preference, group) for preference, group in pairs if isinstance(group, TokenGroup)]
    left_out = [outcome for _, outcome in pairs if isinstance(outcome, LeftOut)]
    causes = list(dict.fromkeys(outcome.cause for outcome in left_out))
    assert (report.preferences, report.kept) == (25, len(groups))
    assert list(report.dropped) == causes == list(report.dropped_ids)
    for cause in causes:
        places = [outcome.place for outcome in left_out if outcome.cause == cause]
        assert (report.dropped[cause], report.dropped_ids[cause]) == (len(places), tuple(places[:3]))
    assert report.truncated_replies == sum(cut > 0 for _, group in groups for cut in group.truncated_tokens)
    assert report.prompts_differ_after_cut == sum(len(set(group.truncated_tokens)) > 1 for _, group in groups)
    sides = [
        sum(
            int(lost[one.first]) - int(lost[one.second])
            if one.label > 0.5
            else int(lost[one.second] > lost[one.first]) - int(lost[one.first] > lost[one.second])
            for one in group.comparisons
            if one.label != 0.5
        )
        for _, group in groups
        for lost in [np.array(group.truncated_tokens) + np.array(group.truncated_reply_tokens) > 0]
    ]
    assert report.cut_preferred == sum(side > 0 for side in sides) > 0
    assert report.cut_other == sum(side < 0 for side in sides) > 0
    assert report.replies == sum(group.num_replies for _, group in groups)
    assert report.lost_replies == len(groups)
    assert report.lost_comparisons == sum(len(p.comparisons) - len(group.comparisons) for p, group in groups)
    assert report.tokens == sum(group.num_tokens for _, group in groups)
    assert report.unshared_tokens == sum(group.num_unshared_tokens for _, group in groups)
    assert report.longest == max(max(group.lengths) for _, group in groups)


def test_weights_are_divided_when_a_group_is_asked_for(two):
    groups = two[0].groups()
    weighed = weigh(groups, by="prompt")
    assert isinstance(weighed, Groups)
    assert [plain(group) for group in weighed] == [plain(group) for group in weigh(list(groups), by="prompt")]
    assert [plain(group) for group in weighed[:4]] == [plain(group) for group in weigh(groups[:4], by="prompt")]
    assert weigh(groups, by="comparison") is groups


def test_a_store_without_groups_is_empty(tmp_path: Path) -> None:
    store = write(tmp_path / "none", [], [])
    groups = Part.join([(store, np.arange(0))]).groups()
    assert (len(groups), list(groups), groups.num_tokens().tolist()) == (0, [], [])
    assert report_of(Part.join([(store, np.arange(0))])).longest == 0


@pytest.mark.parametrize("name", ["tokens.bin", "cause.bin", "id_text.bin", MANIFEST])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_store_with_any_byte_changed_is_none(tmp_path: Path, name: str, harm: str) -> None:
    write(tmp_path / "store", *outcomes(12))
    path = tmp_path / "store" / name
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(content) if harm == "flip" else path.read_bytes()[:-1].rstrip(b"}\n"))
    with pytest.raises(DamagedError):
        open_store(tmp_path / "store")


def test_what_was_written_is_there_only_once_it_is_finished(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with StoreWriter(tmp_path / "store") as writer:
        writer.append(encode(*outcomes(9)))
    with pytest.raises(DamagedError, match=MANIFEST):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("what", ["facts", "source", "length", "no sum"])
def test_what_a_store_says_about_itself_is_under_a_checksum_too(tmp_path: Path, what: str) -> None:
    """A count of rows decides what a limit keeps: a digit that changed would train another model."""
    write(tmp_path / "store", *outcomes(12))
    path = tmp_path / "store" / MANIFEST
    manifest = json.loads(path.read_text())
    if what == "facts":
        manifest["facts"]["rows"] = 11
    elif what == "source":
        manifest["source"] = "another"
    elif what == "length":
        manifest["columns"]["tokens"]["length"] += 1
    else:
        del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match=MANIFEST):
        open_store(tmp_path / "store")


def test_a_store_may_be_named_and_counted_in_any_words(tmp_path: Path) -> None:
    facts = {"dataset": "préférences 1e-7", "share": 0.1, "none": None, "causes": {"too long": 3}}
    (tmp_path / "store").mkdir()
    with StoreWriter(tmp_path / "store") as writer:
        writer.finish(source="größe", facts=facts)
    store = open_store(tmp_path / "store")
    assert (store.source, store.facts) == ("größe", facts)
