"""`rewardlab data inspect`: every number against a count by hand, every row accounted for, no text obeyed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import CHATML, write_base_model
from rewardlab.analysis.json_form import encode
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.core.spec import SPEC_FILE
from rewardlab.curation.inspecting import run
from rewardlab.curation.inspecting.columns import KINDS, join, summarise
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.rows import walk
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import CAUSES
from rewardlab.data.scripts import count_scripts
from rewardlab.report.inspection import inspection_report, label_notes
from rewardlab.report.inspection_page import inspection_page


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def inspected(path: Path, **settings_of_it):
    (found,) = run.inspect_datasets(InspectConfig.of(dataset=(str(path),), num_workers=1, **settings_of_it))
    return found


def words(text: str) -> int:
    return len(text.split())


def pairs(count: int, *, seed: int = 0) -> list[dict[str, object]]:
    """Longer replies are better in three of four; each prompt has two rows, half of the prompts a system turn."""
    draw = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"question {number // 2} of many"}]
        if number // 2 % 2:
            prompt.insert(0, {"role": "system", "content": "" if number % 4 == 2 else "Be kind."})
        short, long = (" ".join(draw.choice(["a", "b", "c", "d", "e"], size)) for size in (3, 9))
        better, other = (long, short) if draw.random() < 0.75 else (short, long)
        rows.append({"prompt": prompt, "chosen": f"{better} {number}", "rejected": f"{other} {number}"})
    return rows


def test_replies_that_are_left_out_beside_others_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "Why?", "responses": ["a", 7, "b b"], "scores": [1, 2, 3]}
    path = write_rows(tmp_path / "a.jsonl", row, {**row, "responses": ["a", "b", "c"]})
    said = "Replies: 1 reply is left out, and the others of their rows kept: reply_not_text 1"
    for texts, example in ((True, ", for example a.jsonl:1: reply 1 of all, counted from 0: got 7"), (False, "\n")):
        found = inspected(path, texts=texts)
        assert f"{said}{example}" in inspection_report(found, CAUSES).replace("\n  ", " ")
        assert said in inspection_page([found], CAUSES)
        assert ("got 7" in inspection_page([found], CAUSES)) is texts
    assert "Replies:" not in inspection_report(inspected(write_rows(tmp_path / "b.jsonl", *pairs(2))), CAUSES)
    assert not caplog.messages, "not twice, and no text in the log"


def test_counts_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = pairs(60)
    path = write_rows(
        tmp_path / "a.jsonl", *rows, {"prompt": "x", "chosen": "y"}, {"prompt": "x", "chosen": "y", "rejected": "y"}
    )
    found = inspected(path)
    assert (found.rows_read, found.kept, dict(found.dropped)) == (62, 60, {"missing_field": 1, "identical_replies": 1})
    (example,) = found.examples["missing_field"]
    assert example.startswith("a.jsonl:61: no 'rejected'; its nearest formats: pairs lacks 'rejected'")
    assert found.format == "pairs"
    # A system turn that is empty is another prompt than one with text.
    assert found.prompts == len({json.dumps(row["prompt"]) for row in rows})
    assert found.num_replies == {2: 60}
    assert found.turns == {1: 60}
    contents = [row["prompt"][0]["content"] for row in rows if len(row["prompt"]) == 2]
    assert found.system == {
        "none": 60 - len(contents),
        "with text": sum(map(bool, contents)),
        "empty": contents.count(""),
    }
    replies = sorted(words(row[side]) for row in rows for side in ("chosen", "rejected"))
    assert (found.lengths.replies.lowest, found.lengths.replies.highest) == (replies[0], replies[-1])
    assert found.lengths.replies.quantiles["50%"] == replies[59]
    assert sum(found.lengths.replies.histogram.counts) + found.lengths.replies.histogram.beyond == 120
    prompts = [sum(words(turn["content"]) for turn in row["prompt"]) for row in rows]
    assert found.lengths.unshared == 2 * sum(prompts) + sum(replies)
    assert found.lengths.unshared - found.lengths.computed == sum(prompts)
    longer = [words(row["chosen"]) > words(row["rejected"]) for row in rows]
    assert found.labels.longer_is_better.value == pytest.approx(np.mean(longer))
    assert found.labels.longer_is_better.n == found.roots
    assert found.labels.first_is_better is None


def test_a_baseline_finds_what_is_planted_on_rows_that_it_did_not_see(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{n}", "chosen": f"sure thing {n} {n % 7}", "rejected": f"no thing {n} {n % 5}"}
        for n in range(120)
    ]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows))
    assert found.baselines.accuracy["bag of words"].value > 0.98
    # All replies have four words.
    assert found.baselines.accuracy["length only"].value == 0.5
    alike = [{"prompt": f"q{n}", "chosen": f"w{n * 2}", "rejected": f"w{n * 2 + 1}"} for n in range(60)]
    assert inspected(write_rows(tmp_path / "b.jsonl", *alike)).baselines.accuracy["bag of words"].value == 0.5


def test_strengths_that_count_down_are_told(tmp_path: Path) -> None:
    # Of the pairs that are called strong, words find the better reply in every second; of the weak ones always.
    rows = [
        {
            "prompt": f"q{n}",
            "chosen": f"sure thing {n}" if n % 4 else f"no thing {n}",
            "rejected": f"no thing {n}" if n % 4 else f"sure thing {n}",
            "strength": 1 + n % 2,
        }
        for n in range(240)
    ]
    found = inspected(write_rows(tmp_path / "down.jsonl", *(row | {"strength": 3 - row["strength"]} for row in rows)))
    (low, weaker), (high, stronger) = found.baselines.by_strength
    assert (low, high) == ("strength up to 1", "strength above 1")
    assert (weaker.value, weaker.n, stronger.n) == (1.0, 120, 120)
    assert stronger.value == 0.5
    (said,) = [line for line in label_notes(found) if "wrong way round" in line]
    assert "strength above 1 0.500 [0.4" in said
    upwards = inspected(write_rows(tmp_path / "up.jsonl", *rows))
    assert not upwards.baselines.strengths_are_reversed
    assert not any("wrong way round" in line for line in label_notes(upwards))
    alike = inspected(write_rows(tmp_path / "alike.jsonl", *(row | {"strength": 1} for row in rows)))
    assert alike.baselines.by_strength == ()
    bare = [{name: text for name, text in row.items() if name != "strength"} for row in rows]
    assert inspected(write_rows(tmp_path / "bare.jsonl", *bare)).baselines.by_strength == ()


def test_rows_of_one_conversation_are_in_one_fold(tmp_path: Path) -> None:
    # Each prompt has a secret word that is in the better reply of its four rows, and in no other: who saw one of the
    # four knows the rest.
    rows = [
        {"prompt": f"q{n // 4}", "chosen": f"secret{n // 4} x{n}", "rejected": f"other{n // 4} y{n}"}
        for n in range(160)
    ]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows))
    assert found.baselines.accuracy["bag of words"].value == 0.5
    assert found.baselines.accuracy["bag of words"].n == 40


def test_the_place_of_the_better_reply_is_told_where_the_format_does_not_name_it(tmp_path: Path) -> None:
    kwise = [{"prompt": f"q{n}", "responses": ["a a", "b", "c"], "scores": [3, 2, 1]} for n in range(12)]
    found = inspected(write_rows(tmp_path / "a.jsonl", *kwise))
    assert found.labels.first_is_better is not None
    assert found.labels.first_is_better.value == 1
    shp = [
        {
            "history": f"q{n}",
            "human_ref_A": f"a{n}",
            "human_ref_B": f"b{n}",
            "labels": int(n % 4 == 0),
            "score_ratio": 2.0,
        }
        for n in range(40)
    ]
    found = inspected(write_rows(tmp_path / "b.jsonl", *shp))
    assert found.labels.first_is_better is not None
    assert found.labels.first_is_better.value == 0.25
    assert found.strengths is not None
    assert {one.origin for one in found.judges.ceilings} == {"strength votes"}


def test_repeated_judgements_give_agreement_and_a_ceiling(tmp_path: Path) -> None:
    def row(number: int, first: float, second: float) -> dict[str, object]:
        judged = [{"first": 0, "second": 1, "label": first}, {"first": 1, "second": 0, "label": 1 - second}]
        return {"prompt": f"q{number}", "replies": ["a", "b"], "comparisons": judged}

    rows = [row(number, 1.0, float(number % 4 > 0)) for number in range(40)]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows)).judges
    assert (found.repeated, found.repeated_elsewhere) == (40, 0)
    assert found.ceilings[0].origin == "repeats"
    assert found.ceilings[0].agreement is not None
    assert found.ceilings[0].agreement.value == 0.75
    # In both orders nothing but agreement counts: 1 − (1 − 0.75)·2, with α's correction for 160 values.
    alpha = found.alpha["which reply is better, in one row (nominal)"]
    assert alpha.value == pytest.approx(1 - 0.5 * 159 / 160)


def test_the_same_pair_in_another_row_is_a_repeat_whichever_side_it_is_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n // 2}", "chosen": f"a{n // 2}", "rejected": f"b{n // 2}"} for n in range(40)]
    for number in range(0, 40, 8):
        rows[number]["chosen"], rows[number]["rejected"] = rows[number]["rejected"], rows[number]["chosen"]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows)).judges
    assert (found.repeated, found.repeated_elsewhere) == (0, 20)
    (ceiling,) = found.ceilings
    assert ceiling.origin == "other rows"
    assert ceiling.agreement is not None
    assert ceiling.agreement.value == 0.75


def test_scores_of_a_text_that_stands_twice_in_a_row_are_no_two_judgements(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "responses": ["a", "a", "b"], "scores": [3, 2, 1]} for n in range(20)]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows)).judges
    assert (found.repeated, found.repeated_elsewhere, found.ceilings, dict(found.alpha)) == (0, 0, (), {})
    # In a second row they are one judgement, not two.
    found = inspected(write_rows(tmp_path / "b.jsonl", *rows, *rows)).judges
    assert (found.repeated, found.repeated_elsewhere) == (0, 20)
    assert found.ceilings[0].num_judgements == 40


def test_a_limit_looks_at_as_many_rows_and_counts_all(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *pairs(60))
    found = inspected(path, limit=7)
    assert (found.rows_read, found.kept, found.used) == (60, 60, 7)
    assert sum(found.num_replies.values()) == 7
    assert found.lengths.replies.count == 14
    assert found.baselines.rows == 7


def test_how_rows_are_cut_into_chunks_makes_no_difference(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *pairs(30), {"prompt": "x"}, *pairs(20, seed=1))
    (source,) = find_sources([str(path)], "train")
    rows = list(walk(source, Rules(source="a", reading=ReadingConfig(), seed=0)))
    whole = join([summarise(rows, renderer=None)])
    parts = join(summarise(rows[start : start + 7], renderer=None) for start in range(0, len(rows), 7))
    assert all(np.array_equal(whole[name], parts[name], equal_nan=name == "strength_C") for name in KINDS)
    assert whole.tally == parts.tally
    assert whole.scripts == parts.scripts


def test_what_a_reward_model_has_itself_is_not_asked_for_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *pairs(3))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / SPEC_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="is a reward model, which has its own template, limit and truncation"):
        inspected(path, model=str(tmp_path / "model"), max_seq_len=40)
    with pytest.raises(ConfigError, match="give the number of tokens"):
        inspected(path, tokenizer=str(write_base_model(tmp_path / "base")), max_seq_len="model")


def test_tokens_are_those_that_training_reads(tmp_path: Path) -> None:
    from rewardlab.data.chat import load_tokenizer
    from rewardlab.data.config import RenderingConfig
    from rewardlab.data.templates import build_renderer

    base = write_base_model(tmp_path / "base")
    rows = pairs(12)
    path = write_rows(tmp_path / "a.jsonl", *rows)
    found = inspected(path, model=str(base), max_seq_len=40, samples=1)
    renderer = build_renderer(load_tokenizer(str(base)), RenderingConfig(max_seq_len=100_000))
    (source,) = find_sources([str(path)], "train")
    groups = [
        renderer.group(row.preference) for row in walk(source, Rules(source="a", reading=ReadingConfig(), seed=0))
    ]
    lengths = [length for group in groups for length in group.lengths]
    assert found.lengths.unit == "tokens"
    assert found.lengths.conversations.mean == pytest.approx(np.mean(lengths))
    assert found.lengths.overlong == sum(length > 40 for length in lengths)
    assert found.lengths.computed == sum(group.num_tokens for group in groups)
    assert found.lengths.unshared == sum(lengths)
    (sample,) = found.samples
    assert all("⟦reply⟧" in text for text in sample.rendered)


REFUSING = "{% if 'zz' in messages[-1].content %}{{ raise_exception('no zz') }}{% endif %}" + CHATML
"""Refuses a conversation that ends in these letters."""


def test_a_refused_reply_takes_no_lengths_from_the_others_of_its_row(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base", template=REFUSING)
    three = {"prompt": "what now?", "responses": ["one", "one two", "zz zz"], "scores": [3, 2, 1]}
    none_left = [
        {"prompt": "and now?", "chosen": "zz", "rejected": "a long one"},
        {"prompt": "again?", "responses": ["zz", "a zz", "some"], "scores": [2, 1, 0]},
    ]
    kwise = write_rows(tmp_path / "k.jsonl", three, none_left[1])
    found = inspected(kwise, model=str(base), max_seq_len=100)
    lengths = found.lengths
    assert (lengths.unrendered, lengths.unrendered_replies) == ({"template_refuses": 1}, {"template_refuses": 1})
    assert (lengths.prompts.count, lengths.replies.count) == (1, 2)
    alone = write_rows(tmp_path / "two.jsonl", three | {"responses": three["responses"][:2], "scores": [3, 2]})
    kept = inspected(alone, model=str(base), max_seq_len=100)
    assert replace(lengths, unrendered={}, unrendered_replies={}) == kept.lengths
    assert found.labels.difference == kept.labels.difference
    said = " ".join(inspection_report(found, {}).split())
    assert "Not rendered: 1 row (template refuses); it has no lengths." in said
    assert "Not rendered: 1 reply (template refuses) of rows that keep others to compare; it has no lengths" in said

    pair = write_rows(tmp_path / "p.jsonl", none_left[0], *pairs(3))
    own = inspected(pair, model=str(base), max_seq_len=100).lengths
    assert (own.unrendered, own.unrendered_replies) == ({"template_refuses": 1}, {})
    assert (own.prompts.count, own.replies.count) == (3, 6)


def test_letters_are_counted_by_script() -> None:
    assert count_scripts(["Hi, Ωmega 3!", "Привет", "你好 ABC", "éa", "１２ Ａ", "—…"]) == Counter(
        {"Latin": 2 + 4 + 3 + 2 + 1, "Greek": 1, "Cyrillic": 6, "Han": 2}
    )


TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["", " ", "\x00", "\ud800", "<|im_end|>", "<script>alert(1)</script>", "\u202e", "a" * 5000, "\x1b[2J"]
    ),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.none(), st.booleans(), st.floats(), st.integers(-(2**70), 2**70)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "first"]), inner),
    max_leaves=6,
)
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS}, optional={"strength": VALUES}),
        st.fixed_dictionaries({"prompt": VALUES, "chosen": VALUES, "rejected": VALUES}, optional={"label": VALUES}),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_hostile_rows_are_counted_and_their_texts_not_obeyed(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = InspectConfig.of(dataset=(str(path),), num_workers=1, languages=4)
    try:
        (found,) = run.inspect_datasets(config)
    except RewardlabError:
        # Rows that are no JSON objects, such as those with Infinity, end the reading in words.
        return
    assert found.kept + sum(found.dropped.values()) == found.rows_read == len(rows)
    json.dumps(encode(found), allow_nan=False)
    text = inspection_report(found, CAUSES) + inspection_page([found], CAUSES)
    assert "\x1b" not in text
    assert "<script>" not in inspection_page([found], CAUSES)


def placed(path: Path, **settings_of_it) -> float | None:
    first = inspected(path, **settings_of_it).labels.first_is_better
    return None if first is None else first.value


def test_the_place_of_the_better_reply_is_told_of_columns_under_other_names(tmp_path: Path) -> None:
    rows = [{"q": f"q {n}", "options": [f"a {n}", f"b {n}"], "marks": [2, 1] if n % 4 else [1, 2]} for n in range(8)]
    named = {"prompt_column": "q", "responses_column": "options", "scores_column": "marks"}
    assert placed(write_rows(tmp_path / "listed.jsonl", *rows), **named) == 0.75


def test_a_list_beside_replies_that_are_named_says_nothing_of_their_place(tmp_path: Path) -> None:
    rows = [{"q": f"q {n}", "good": f"a {n}", "bad": f"b {n}", "answers": ["x"]} for n in range(8)]
    named = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    assert placed(write_rows(tmp_path / "named.jsonl", *rows), **named) is None
    plain = [{"prompt": f"q {n}", "chosen": f"a {n}", "rejected": f"b {n}", "replies": ["x"]} for n in range(8)]
    assert placed(write_rows(tmp_path / "plain.jsonl", *plain)) is None


def test_the_place_is_told_where_labels_say_which_of_two_replies_is_better(tmp_path: Path) -> None:
    # As people write what two judges saw side by side: the first won three times out of four.
    shown = [{"q": f"q {n}", "a": f"a {n}", "b": f"b {n}", "won": "B" if n % 4 == 0 else "A"} for n in range(40)]
    shown += [{"q": f"q {n}", "a": f"a {n}", "b": f"b {n}", "won": "tie"} for n in range(40, 50)]
    named = {"prompt_column": "q", "chosen_column": "a", "rejected_column": "b", "label_column": "won"}
    path = write_rows(tmp_path / "shown.jsonl", *shown)
    assert placed(path, map_label=("A=1", "B=0", "tie=0.5"), **named) == 0.75
    voted = [{**row, "labels": {"ann": min(n % 4, 1), "bob": 1}} for n, row in enumerate(pairs(40))]
    assert placed(write_rows(tmp_path / "voted.jsonl", *voted)) == pytest.approx(0.875)
    sure = [{**row, "label": 1 if n % 2 else 0.5} for n, row in enumerate(pairs(40))]
    assert placed(write_rows(tmp_path / "sure.jsonl", *sure)) is None


def test_samples_count_replies_from_0_as_rows_do_and_a_column_says_what_it_counts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *({**row, "label": 0} for row in pairs(30)))
    said = inspection_report(inspected(path), CAUSES)
    assert "reply 1 is better than 0" in said
    assert "share of decided comparisons  conversations\n" in said


def test_agreement_and_ceiling_count_prompts_and_say_so(tmp_path: Path) -> None:
    rows = [{**row, "prompt": f"q {n // 3}", "labels": [1, n % 2, 1]} for n, row in enumerate(pairs(60))]
    found = inspected(write_rows(tmp_path / "a.jsonl", *rows))
    assert (found.judges.repeated, {one.n for one in found.judges.alpha.values()}) == (60, {20})
    assert "Krippendorff's α  prompts\n" in inspection_report(found, CAUSES)
    page = inspection_page([found], CAUSES)
    assert (
        page.count(">prompts<")
        - inspection_page([inspected(write_rows(tmp_path / "b.jsonl", *pairs(60)))], CAUSES).count(">prompts<")
        >= 2
    )
