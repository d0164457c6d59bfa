"""`rewardlab data audit` from its command line: exit status, JSON, scores, lengths, overlaps with other data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from common import CHATML, make_model, make_tokenizer, write_base_model
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import read_jsonl, write_jsonl
from rewardlab.core.types import Conversation, Message, Preference
from rewardlab.curation import rows
from rewardlab.curation.auditing.registry import CHECKS
from rewardlab.data.chat import Renderer, ReplyTooLong, load_tokenizer
from rewardlab.data.config import ReadingConfig, RenderingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.templates import build_renderer

RUN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def run(*arguments: object) -> int:
    try:
        main(["data", "audit", *map(str, arguments), "--num-workers", "1"])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def pairs(path: Path, *prompts: str, **columns: object) -> Path:
    """Write a pair for each prompt, all different."""
    rows = [{"prompt": prompt, "chosen": f"a{n}.", "rejected": f"b{n}.", **columns} for n, prompt in enumerate(prompts)]
    write_jsonl(path, rows)
    return path


def report(path: Path, *arguments: object) -> dict:
    """Return the audit as JSON."""
    run(path, "--json", path.with_suffix(".audit.json"), *arguments)
    found: dict = json.loads(path.with_suffix(".audit.json").read_text())
    return found


def test_what_was_written_stands_apart_from_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pairs(tmp_path / "a.jsonl", "p", "q", "r", "s")
    assert run(path, "--fix", "--output", tmp_path / "fixed.jsonl") == 0
    said = capsys.readouterr().out
    assert f"\n\n{tmp_path / 'fixed.jsonl'}: 4 of 4 rows" in said, said


def test_the_exit_status_is_one_exactly_if_a_check_is_above_its_limit(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", "p", "q", "r", "s", label=0.5)
    assert run(path) == 0
    assert run(path, "--fail-on", "ties=3") == 1
    assert run(path, "--fail-on", "ties=4") == 0
    assert run(path, "--fail-on", "ties=99%") == 1
    assert run(path, "--fail-on", "ties=100%") == 0
    assert run(path, "--fail-on", "ties=0", "--threshold", "ties=2") == 0
    assert run(tmp_path / "none.jsonl") == 2


def test_a_default_limit_can_be_lifted(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    write_jsonl(tmp_path / "a.jsonl", [row, row])
    assert run(tmp_path / "a.jsonl") == 1
    assert run(tmp_path / "a.jsonl", "--fail-on", "duplicate-rows=none") == 0


def test_replies_that_are_left_out_beside_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "p", "responses": ["one", None, "two", " "], "scores": [1, 2, 3, 4]}
    write_jsonl(tmp_path / "a.jsonl", [row, {**row, "prompt": "q", "responses": ["three", None, "four", "five"]}])
    run(tmp_path / "a.jsonl", "--json", tmp_path / "a.json")
    said = (
        "\n  3 replies are left out, and the others of their rows kept (reply_not_text 2, empty_reply 1), for example"
    )
    place = "a.jsonl:1: reply 1 of all, counted from 0: got null, wanted text or a list of messages"
    assert f"a.jsonl: 2 rows read = 2 kept + 0 dropped{said}\n    {place}\n" in capsys.readouterr().out
    (source,) = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["sources"]
    assert source["left_out_replies"] == {"reply_not_text": 2, "empty_reply": 1}
    assert source["left_out_example"] == place


def test_the_text_names_rows_causes_and_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    write_jsonl(tmp_path / "a.jsonl", [row, row, {**row, "chosen": ""}, {**row, "chosen": "x\x1b[2J"}])
    assert run(tmp_path / "a.jsonl") == 1
    said = capsys.readouterr().out
    assert "a.jsonl: 4 rows read = 3 kept + 1 dropped (empty_reply 1)" in said
    assert "duplicate-rows: 1 row; rows with copies 1, copies 1\n  a.jsonl:2  1" in said
    assert "not run: overlong, overlong-replies (need --max-seq-len)" in said
    assert "\x1b" not in said


def test_json_has_every_flagged_row_with_its_score_and_every_check(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", *("p" * n for n in range(1, 31)), label=0.5)
    found = report(path, "--examples", "0")
    assert found["checks"].keys() | found["not_run"].keys() == set(CHECKS)
    ties = found["checks"]["ties"]
    assert [row["row"] for row in ties["rows"]] == [f"a.jsonl:{n}" for n in range(1, 31)]
    assert {row["score"] for row in ties["rows"]} == {1.0}
    assert ties["share"]["value"] == 1
    assert 0.8 < ties["share"]["low"] < 1
    counts = {"rows_read": 30, "kept": 30, "dropped": {}, "left_out_replies": {}}
    assert found["sources"] == [{"name": "a.jsonl", "split": "all rows", **counts}]


def test_scores_has_a_line_for_every_row(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", "p", "q")
    write_jsonl(path, [{"prompt": "p", "chosen": "a b", "rejected": "c"}, {"prompt": "p", "chosen": None}])
    run(path, "--scores", tmp_path / "scores.jsonl")
    assert [row for _, row in read_jsonl(tmp_path / "scores.jsonl")] == [
        {"row": "a.jsonl:1", "scores": {"unequal-lengths": 2.0}},
        {"row": "a.jsonl:2", "scores": {"unusable-rows": 1.0}},
    ]


def test_rows_that_the_limit_leaves_out_are_not_looked_at(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", *("p" * n for n in range(1, 31)), label=0.5)
    found = report(path, "--limit", "7")
    assert found["rows"] == found["checks"]["ties"]["flagged"] == 7
    assert found["sources"][0]["kept"] == 30


def test_lengths_are_counted_in_words_or_in_the_tokens_of_a_model(tmp_path: Path, base_model: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(
        path,
        [
            {"prompt": "one two three", "chosen": "four five", "rejected": "six"},
            {"prompt": "one two three", "chosen": "four five six", "rejected": "seven"},
        ],
    )
    words = report(path, "--max-seq-len", "5")["checks"]["overlong"]
    assert [(row["row"], row["score"]) for row in words["rows"]] == [("a.jsonl:2", 1.0)]

    renderer = build_renderer(load_tokenizer(str(base_model)), RenderingConfig())
    turns = [Message("user", "one two three"), Message("assistant", "four five six")]
    length = len(renderer.tokenizer(renderer.text(turns), add_special_tokens=False)["input_ids"])
    given = ("--model", base_model, "--max-seq-len", length - 2, "--overwrite")
    tokens = report(path, *given)["checks"]["overlong"]["rows"]
    assert tokens[-1] == {"row": "a.jsonl:2", "score": 2.0, "found": tokens[-1]["found"]}
    assert tokens[-1]["found"].startswith(f"{length} tokens; ")
    (alone,) = report(path, "--max-seq-len", "2", "--overwrite")["checks"]["overlong-replies"]["rows"]
    assert alone == {"row": "a.jsonl:2", "score": 1.0, "found": "a reply of 3 words"}


@pytest.mark.parametrize("template", ["concat", "plain"])
def test_tokens_are_counted_of_rows_as_the_model_was_trained_on_them(tmp_path: Path, template: str) -> None:
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128, chat_template=template))
    model = tmp_path / "model"
    save_reward_model(model, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    asked, reply = "\n\nHuman: Is light water?\n\nAssistant:", " no, it is more than that"
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": asked, "chosen": reply, "rejected": " no"}])
    turns = {"concat": (asked, reply), "plain": ("Is light water?", reply.strip())}[template]
    text = renderer.text([Message("user", turns[0]), Message("assistant", turns[1])])
    length = len(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
    (row,) = report(tmp_path / "a.jsonl", "--model", model, "--max-seq-len", 4)["checks"]["overlong"]["rows"]
    assert row["found"].startswith(f"{length} tokens; ")


def preferences_of(path: Path) -> list[Preference]:
    (source,) = find_sources((str(path),), "train")
    read = rows.walk(source, Rules(source=source.name, reading=ReadingConfig(), seed=0))
    return [row.preference for row in read if row.preference is not None]


def is_too_long(preference: Preference, reply: Conversation, renderer: Renderer) -> bool:
    try:
        renderer.render(preference.prompt, reply)
    except ReplyTooLong:
        return True
    except RenderError:
        return False
    return False


LONG_TURN = "one two three four five six seven eight"


@pytest.mark.parametrize("rule", ["prompt-left", "reply-middle", "drop", "error"])
def test_what_truncation_would_cut_is_what_the_renderer_of_training_cuts(
    rule: str, tmp_path: Path, base_model: Path
) -> None:
    asked = [{"role": role, "content": LONG_TURN} for role in ("user", "assistant", "user")]
    replies = ["six", LONG_TURN, " ".join([LONG_TURN] * 3), " ".join([LONG_TURN] * 8)]
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    written = [
        {"prompt": asked[start:], "chosen": replies[first], "rejected": replies[second]}
        for start in (0, 2)
        for first, second in pairs
    ]
    written += [{"prompt": "one", "chosen": "two", "rejected": "three"}]
    written += [{"prompt": asked, "responses": replies, "scores": [1, 2, 3, 4]}]
    paths = tmp_path / "pairs.jsonl", tmp_path / "kwise.jsonl"
    write_jsonl(paths[0], written[:-1])
    write_jsonl(paths[1], written[-1:])
    limit = 60
    given = ("--model", base_model, "--max-seq-len", limit, "--truncation", rule)
    found: Counter[str] = Counter()
    for path in paths:
        audited = report(path, *given)
        found.update(audited["checks"]["overlong"]["counts"])
        told = {row["found"].split("; ")[1] for row in audited["checks"]["overlong"]["rows"]}
        assert ("training ends at this row" in told) == (rule == "error")
        assert any("ends training at the first row" in note for note in audited["notes"]) == (rule == "error")

    settings = RenderingConfig(max_seq_len=limit, truncation=rule)
    renderer = build_renderer(load_tokenizer(str(base_model)), settings)
    whole = renderer.by(max_length=10_000)
    wanted = dict.fromkeys(found, 0)
    for path in paths:
        for preference in preferences_of(path):
            lengths = [len(whole.token_ids(preference.prompt + reply)) for reply in preference.replies]
            if (excess := max(lengths) - limit) <= 0:
                continue
            wanted["tokens that do not fit"] += excess
            try:
                group = renderer.group(preference)
            except DataError:
                group = "overlong"
            if isinstance(group, str):
                wanted["rows left out"] += 1
                # Of rows that are left out for their replies, these count too.
                wanted["replies left out"] += sum(
                    is_too_long(preference, reply, renderer) for reply in preference.replies
                )
                continue
            wanted["prompt tokens cut"] += sum(group.truncated_tokens)
            wanted["replies shortened"] += sum(count > 0 for count in group.truncated_reply_tokens)
            wanted["reply tokens cut"] += sum(group.truncated_reply_tokens)
            wanted["replies left out"] += len(preference.replies) - group.num_replies
    assert found == wanted
    assert wanted["rows left out"] > 0
    if rule == "prompt-left":
        assert wanted["prompt tokens cut"] > 0
        assert wanted["replies left out"] > 0
    if rule == "reply-middle":
        assert wanted["replies shortened"] > 0


def test_conversations_that_the_template_of_the_model_refuses_are_found(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
    folder = write_base_model(tmp_path / "model", template=template)
    path = pairs(tmp_path / "a.jsonl", "p", "q")
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with path.open("a") as file:
        file.write(json.dumps({"prompt": turns, "chosen": "a", "rejected": "b"}) + "\n")
    (row,) = report(path, "--model", folder)["checks"]["template-refuses"]["rows"]
    assert (row["row"], row["score"]) == ("a.jsonl:3", 2)
    assert "no system turns" in row["found"]


def test_control_tokens_of_the_model_are_found_in_prompts_and_replies(tmp_path: Path, base_model: Path) -> None:

    eos = load_tokenizer(str(base_model)).eos_token
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"prompt": "p", "chosen": f"a {eos} b", "rejected": "c"}])
    assert report(path)["checks"]["special-tokens"]["flagged"] == 0
    assert report(path, "--model", base_model, "--overwrite")["checks"]["special-tokens"]["flagged"] == 1


def test_prompts_of_other_data_are_found_whole_and_by_runs_of_words(tmp_path: Path) -> None:
    others = pairs(
        tmp_path / "others.jsonl", "What is  IT?", f"zero {RUN} end", "A hint of eight words, no more than that."
    )
    path = pairs(
        tmp_path / "a.jsonl",
        "what is it?",
        f"Before it: {RUN.upper()} after",
        RUN.removeprefix("one "),
        "a hint of eight words, no more than that. But then all of these words are of my own, you see",
        "unlike any other",
    )
    checks = report(path, "--against", others)["checks"]
    assert [row["row"] for row in checks["overlap-prompts"]["rows"]] == ["a.jsonl:1"]
    assert [(row["row"], row["score"], row["found"]) for row in checks["overlap-13"]["rows"]] == [
        ("a.jsonl:2", 1.0, "others.jsonl:2")
    ]
    # Of 9 runs of 8 words of the second prompt 6 are there, of the third all 5, of the fourth 2 of 14.
    assert [(row["row"], row["score"]) for row in checks["overlap-8"]["rows"]] == [
        ("a.jsonl:2", 0.6667),
        ("a.jsonl:3", 1.0),
    ]


def test_data_of_prompts_alone_can_be_compared_with_and_rows_without_one_are_counted(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "others.jsonl", [{"prompt": "p"}, {"prompt": None}, {"prompt": [{"role": "user", "content": "q"}]}]
    )
    path = pairs(tmp_path / "a.jsonl", "p", "q", "r")
    found = report(path, "--against", tmp_path / "others.jsonl")
    assert [row["row"] for row in found["checks"]["overlap-prompts"]["rows"]] == ["a.jsonl:1", "a.jsonl:2"]
    assert any(note.endswith("2 prompts; 1 row has no prompt that could be read") for note in found["notes"])


@pytest.mark.parametrize(("prompts", "flagged"), [(10, ["a.jsonl:1", "a.jsonl:2"]), (11, ["a.jsonl:2"])])
def test_the_wording_of_a_task_that_many_prompts_share_is_no_overlap(
    tmp_path: Path, prompts: int, flagged: list[str]
) -> None:
    """Else no row of a dataset whose prompts begin like those of the other would be left."""
    own = "so this is a question of thirteen words that stands in one prompt"
    # Prompts that are there several times count once.
    others = pairs(tmp_path / "others.jsonl", *(f"{RUN} {n}" for n in range(prompts)), *[f"{RUN} 0"] * 20, own)
    path = pairs(tmp_path / "a.jsonl", f"{RUN} and mine", f"{RUN} here: {own}")
    found = report(path, "--against", others)
    assert [row["row"] for row in found["checks"]["overlap-13"]["rows"]] == flagged
    assert found["checks"]["overlap-13"]["rows"][-1]["found"] == f"others.jsonl:{prompts + 21 if prompts > 10 else 1}"
    (note,) = [note for note in found["notes"] if note.startswith("--against")]
    assert note.endswith("left out as boilerplate: 1 run of 13 words in more than 10 of them") == (prompts > 10)


def test_prompts_of_suites_are_found(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    row = {"prompt": RUN, "chosen": "a", "rejected": "b", "subset": "alpacaeval-easy", "id": 7}
    row |= {"chosen_model": "m", "rejected_model": "n"}
    write_jsonl(suite / "filtered.jsonl", [row])
    path = pairs(tmp_path / "a.jsonl", f"{RUN} and more", "own")
    checks = report(path, "--against", "rewardbench", "--suite-data", suite)["checks"]
    (found,) = checks["overlap-13"]["rows"]
    assert found["row"] == "a.jsonl:1"
    assert found["found"].startswith("rewardbench/")


def test_workers_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(rows, "ALONE", 1)
    path = pairs(tmp_path / "a.jsonl", *(f"prompt {n % 300}" for n in range(600)))
    alone = report(path)
    main(["data", "audit", str(path), "--json", str(tmp_path / "two.json"), "--num-workers", "2", "--fail-on",
          *(f"{name}=none" for name in CHECKS)])  # fmt: skip
    two = json.loads((tmp_path / "two.json").read_text())
    for found in (alone, two):
        for check in found["checks"].values():
            del check["limit"], check["above_limit"]
    assert alone["checks"] == two["checks"]
