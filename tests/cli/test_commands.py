"""train, eval, score, verify and quickstart from their command lines to their files."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import refusal, short_run, tiny_reward_model, write_rows
from common import write_pairs
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.artifact.seal import METADATA, seal
from rewardlab.cli import main
from rewardlab.commands.parsing import parse_command
from rewardlab.core.config import settings_of
from rewardlab.core.files import write_json
from rewardlab.core.spec import read_spec
from rewardlab.core.types import Message
from rewardlab.evaluation.config import EvalConfig
from rewardlab.model import applying, compute
from rewardlab.model.config import ComputeConfig
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny reward model."""
    return tiny_reward_model(tmp_path_factory.mktemp("cli") / "reward")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_what_train_saves_can_be_judged_scored_and_verified(base_model, pairs_file, tmp_path, capsys):
    test_data = write_pairs(tmp_path / "held-out.jsonl", 12, offset=100)
    flags = [*short_run(base_model, tmp_path / "run"), "--dataset", pairs_file, "--test-dataset", test_data]
    main([str(flag) for flag in flags])
    printed = capsys.readouterr().out
    folder = re.search(r"^Reward model: (.*)$", printed, re.MULTILINE)[1]
    assert re.search(r"^Its step: [12]$", printed, re.MULTILINE)
    judged_on_test = printed.split("Test data (they chose nothing)")[1]
    assert re.search(r"^before +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", judged_on_test, re.MULTILINE)
    assert "step 2/2" in printed

    main(["verify", folder])
    assert capsys.readouterr().out.startswith(f"{folder}: verified. ")

    out = tmp_path / "judged"
    with test_data.open("a") as file:
        file.write('{"prompt": "Why?", "chosen": "", "rejected": "No."}\n')
    judge = ["eval", "--model", folder, "--dataset", str(test_data), "--output-dir", str(out)]
    main([*judge, "--max-drop-fraction", "0.1"])
    printed = capsys.readouterr().out
    assert re.search(r"^held-out\[.+\]: 13 rows read, 12 kept, dropped empty_reply 1$", printed, re.MULTILINE)
    judged = json.loads((tmp_path / "run/evals/test.metrics.json").read_text())
    metrics = json.loads((out / "eval.metrics.json").read_text())
    assert metrics["all"]["sums"] == pytest.approx(judged["all"]["sums"])
    accuracy = metrics["all"]["estimates"]["eval_accuracy"]
    interval = f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]"
    assert re.search(rf"^held-out +{re.escape(interval)} ", printed, re.MULTILINE)
    assert "95% intervals: " in printed
    assert len((out / "eval.scores.jsonl").read_text().splitlines()) == 24


@pytest.mark.slow
def test_eval_tells_of_messages_that_were_written_as_text(saved, tmp_path, capsys):
    rows = [{"prompt": f'[{{"role": "user", "content": "{n}"}}]', "chosen": "a", "rejected": "b"} for n in range(3)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    main(["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")])
    assert "in 3 rows a text is messages written as JSON, and is read as a text" in "".join(capsys.readouterr())


@pytest.mark.slow
def test_eval_takes_a_seeded_limit_and_says_where_the_numbers_are(saved, pairs_file, tmp_path, capsys):
    main(["eval", "--model", str(saved), "--dataset", str(pairs_file), "--limit", "5", "--output-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"scores, metrics and report.html: {tmp_path}"
    rows = [json.loads(line) for line in (tmp_path / "eval.scores.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert all(isinstance(row["score"], float) for row in rows)
    assert json.loads((tmp_path / "manifest.json").read_text())["data"][0]["unused_by_limit"] == 35


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval", "--model is missing: name a reward-model folder"),
        ("eval --model m", "--dataset is missing"),
        ("eval --limit 0", "--limit 0: must be at least 1"),
        ("eval --model nosuch --dataset nosuch.jsonl", "dataset 'nosuch.jsonl', split 'test': no such file"),
        ("score --input a --output b", "--model is missing; see `rewardlab score --help`"),
        ("score --model m --output b", "--input is missing"),
        ("score --model m --input a", "--output is missing"),
        ("score --model m --input a --output b --precision fp64", "--precision fp64: must be one of fp32, bf16"),
        ("score --model m --input a --output b --micro-token-budget 0", "--micro-token-budget 0: must be at least 16"),
        ("score --model m --input a --output .", "--output .: is a folder. Name the file to write"),
        ("score --model m --input nosuch.jsonl --output b", "nosuch.jsonl: no such file"),
        ("score --model m --ensemble-as lower --input a --output b", "--ensemble-as lower: says what is made of"),
        ("score --ensemble m n --ensemble-penalty 2 --input a --output b", "--ensemble-penalty 2: is the λ of --ens"),
        ("verify", "FOLDER is missing; see `rewardlab verify --help`"),
        ("verify a b", "FOLDER a b: takes one value"),
        ("verify nosuch", "nosuch: no such folder"),
        ("serve 127.0.0.1:9", "127.0.0.1:9: no such folder. If it is a server, write http://127.0.0.1:9."),
        ("serve http://127.0.0.1:9", "http://127.0.0.1:9: this is the address of a server, and a reward-model folder"),
        ("export HTTPS://rm/a --output-dir out", "HTTPS://rm/a: this is the address of a server, and a reward-model"),
        ("quickstart --steps 0", "--steps 0: must be at least 1"),
        ("quickstart --test-pairs -1", "--test-pairs -1: must be at least 1"),
    ],
)
def test_other_commands_refuse_in_the_same_words(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *line.split()).startswith(message)


def test_eval_has_the_flags_of_its_configuration():
    line = (
        "--model m --hf-dataset=a.jsonl b.jsonl --hf-split dev --limit 3 --output-dir out --precision bf16 "
        "--attention padded --micro-token-budget 64 --max-drop-fraction 0.5 --incomplete-pairs error --ties half "
        "--max-replies 3 --margin-column gap --strength-as soft --seed 7 --attention-backend mask "
        "--linear-backend onednn --allocator system --compile --no-precision-card --overwrite --num-workers 3 "
        "--cache-dir none --models n --no-reuse --slice kind --thresholds 0.5 -1 --perturb --calibrated "
        "--ensemble o p --ensemble-penalty 2 --shp kwise --max-per-post 5 --min-score-ratio 2 "
        "--attributes helpfulness=1 --prompt-column ask --chosen-column good --rejected-column bad --label-column wins "
        "--response-column one --responses-column all --scores-column stars --strength-column sure --map-label A=1 "
        "--streaming --shuffle-buffer 9 --gold gold.jsonl"
    )
    wanted = EvalConfig.of(
        gold=Path("gold.jsonl"),
        shp="kwise",
        max_per_post=5,
        min_score_ratio=2.0,
        attributes=("helpfulness=1",),
        prompt_column="ask",
        chosen_column="good",
        rejected_column="bad",
        label_column="wins",
        response_column="one",
        responses_column="all",
        scores_column="stars",
        strength_column="sure",
        map_label=("A=1",),
        streaming=True,
        shuffle_buffer=9,
        model="m",
        models=("n",),
        reuse=False,
        slice=("kind",),
        thresholds=(0.5, -1.0),
        perturb=True,
        calibrated=True,
        ensemble=("o", "p"),
        ensemble_penalty=2.0,
        dataset=("a.jsonl", "b.jsonl"),
        hf_split="dev",
        limit=3,
        output_dir=Path("out"),
        precision="bf16",
        precision_card=False,
        attention="padded",
        overwrite=True,
        micro_token_budget=64,
        max_drop_fraction=0.5,
        incomplete_pairs="error",
        ties="half",
        max_replies=3,
        margin_column="gap",
        strength_as="soft",
        num_workers=3,
        cache_dir="none",
        seed=7,
        attention_backend="mask",
        linear_backend="onednn",
        allocator="system",
        compile=True,
    )
    unset = [name for name, setting in settings_of(EvalConfig).items() if setting.of(wanted) == setting.default]
    assert unset == ["suite", "suite_data"], "in place of --dataset"
    assert parse_command(EvalConfig, line.split(), "eval") == wanted


@pytest.mark.slow
def test_eval_uses_strengths_and_margins_as_training_does(saved, tmp_path, capsys):
    rows = [
        {"prompt": f"How {n}?", "chosen": "So.", "rejected": "no", "strength": strength, "gap": 0.5}
        for n, strength in enumerate([0.6, 0.7, 0.9])
    ]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    line = ["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")]
    main([*line, "--strength-as", "soft", "--margin-column", "gap"])
    judged = [json.loads(row) for row in (tmp_path / "out/eval.scores.jsonl").read_text().splitlines()]
    found = [comparison for row in judged for comparison in row["comparisons"]]
    assert [comparison["label"] for comparison in found] == [0.6, 0.7, 0.9]
    assert [comparison["margin"] for comparison in found] == [0.5, 0.5, 0.5]
    assert "no 'nosuch', which --margin-column names" in refusal(
        capsys, *line, "--overwrite", "--margin-column", "nosuch"
    )


def test_score_adds_scores_and_keeps_the_rows(saved, tmp_path, capsys):
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    rows = [
        {"id": 7, "prompt": "How?", "response": "So.", "note": {"a": [1, "ü"]}},
        {"prompt": "How?", "responses": ["So.", "Not at all.", "So."]},
        {"prompt": prompt, "response": "Because."},
        {"messages": [*prompt, {"role": "assistant", "content": "Because."}], "id": None},
    ]
    out = tmp_path / "new/scored.jsonl"
    data = write_rows(tmp_path / "rows.jsonl", rows[0], "", *rows[1:])
    main(["score", "--model", str(saved), "--input", str(data), "--output", str(out), "--micro-token-budget", "64"])
    assert re.fullmatch(rf"compute: attention .+\n6 replies scored: {re.escape(str(out))}\n", capsys.readouterr().out)
    how, why = [Message("user", "How?")], [Message(**turn) for turn in prompt]
    ends = [(how, "So."), (how, "Not at all."), (why, "Because.")]
    so, not_at_all, because = load(saved).score([[*turns, Message("assistant", reply)] for turns, reply in ends])
    scored = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [list(row) for row in scored] == [[*row, "scores" if "responses" in row else "score"] for row in rows]
    assert [{name: row[name] for name in given} for row, given in zip(scored, rows, strict=True)] == rows
    assert scored[1]["scores"] == pytest.approx([so, not_at_all, so], abs=1e-5)
    assert [scored[n]["score"] for n in (0, 2, 3)] == pytest.approx([so, because, because], abs=1e-5)
    assert len({round(score, 3) for score in (so, not_at_all, because)}) == 3


@pytest.mark.slow
def test_commands_choose_the_allocator_and_write_it_down_and_the_library_leaves_it_alone(
    saved, pairs_file, tmp_path, monkeypatch
):
    kept = []
    monkeypatch.setattr(compute, "can_keep_freed_memory", lambda: True)
    monkeypatch.setattr(applying, "keep_freed_memory", lambda: kept.append(True))
    assert load(saved).compute == ComputeConfig(
        attention_backend="segments", linear_backend="torch", allocator="system"
    )
    verify(saved)
    copy_of = load(saved)
    save_reward_model(
        tmp_path / "again", copy_of.model, copy_of.renderer, beta=1.0, save_dtype=torch.float32, provenance={}
    )
    assert kept == []
    main(["eval", "--model", str(saved), "--dataset", str(pairs_file), "--output-dir", str(tmp_path / "judged")])
    assert kept == [True]
    written = json.loads((tmp_path / "judged/manifest.json").read_text())["config"]
    decided = {"attention": "shared", "attention_backend": "segments", "linear_backend": "torch", "allocator": "keep"}
    assert decided.items() <= written.items()
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."})
    main(["score", "--model", str(saved), "--input", str(data), "--output", str(tmp_path / "scored.jsonl")])
    assert kept == [True, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": "So."}, r"rows\.jsonl:2: cannot be scored .*Wanted `messages`, or `prompt` and `response`"),
        ({"prompt": "How?"}, r"rows\.jsonl:2: cannot be scored"),
        ({"prompt": "How?", "chosen": "a", "rejected": "b"}, "are for `rewardlab eval`, which writes a score for each"),
        ({"prompt": "How?", "replies": ["a", "b"]}, "Name `replies` `responses` to score them"),
        ({"prompt": "How?", "response": 3}, r"rows\.jsonl:2: cannot be scored \(a response is 3, not text\)"),
        ({"prompt": "How?", "responses": []}, r"rows\.jsonl:2: cannot be scored"),
        ('{"prompt": ', r"rows\.jsonl:2: not valid JSON"),
        ({"messages": [{"role": "user", "content": "How?"}]}, r"must end with an assistant turn"),
        ({"prompt": [{"role": "robot", "content": "a"}], "response": "b"}, r"rows\.jsonl:2: .*unknown role 'robot'"),
        (
            {"prompt": [{"role": "user", "content": "a", "tool_calls": [{"id": 1}]}], "response": "b"},
            r"rows\.jsonl:2: .*a message has tool_calls",
        ),
        ({"prompt": "Human: a\n\nHuman: b\n\nAssistant:", "response": 3}, r"a response is 3, not text"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_and_nothing_is_written(saved, tmp_path, capsys, row, message):
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."}, row)
    out = tmp_path / "scored.jsonl"
    assert re.search(message, refusal(capsys, "score", "--model", saved, "--input", data, "--output", out))
    assert not out.exists()


def test_why_the_first_reply_has_no_score_is_said_where_they_are_counted(saved, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."}, {"prompt": "How?"})
    line = ["score", "--model", str(saved), "--input", str(data), "--output", str(tmp_path / "scored.jsonl")]
    main([*line, "--on-error", "write"])
    told = capsys.readouterr().out
    assert "1 reply scored, 1 not (the file says why)" in told
    assert "the first without a score: line 2: cannot be scored (" in told


def test_a_transcript_in_a_prompt_is_scored_as_its_turns(saved, tmp_path):
    turns = [
        {"role": role, "content": text} for role, text in [("user", "Hi"), ("assistant", "Yes?"), ("user", "How?")]
    ]
    prompts = ["\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: How?\n\nAssistant:", turns]
    replies = [" So.", "So."]
    rows = [{"prompt": prompt, "response": reply} for prompt, reply in zip(prompts, replies, strict=True)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    main(["score", "--model", str(saved), "--input", str(data), "--output", str(tmp_path / "out.jsonl")])
    first, second = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize(
    ("command", "module"),
    [("eval", "judging"), ("calibrate", "judging"), ("probe", "training"), ("diagnose", "diagnosing")]
    + [(name, "folders") for name in ("import", "export", "average", "verify", "card", "push")]
    + [(name, "judging") for name in ("compare", "report")]
    + [(f"plan {name}", "plan") for name in ("check", "gate", "archive", "report")]
    + [("gold build", "gold"), ("gold check", "gold"), ("rl audit", "rl")],
)
def test_a_signal_ends_a_command_with_a_word(command, module, monkeypatch, capsys):
    monkeypatch.setattr(
        f"rewardlab.commands.{module}.parse_command", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 75
    assert capsys.readouterr().err.startswith("stopped by SIGTERM. The same command ")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_ends_the_quickstart_with_a_word(monkeypatch, capsys):
    monkeypatch.setattr("rewardlab.quickstart.run_quickstart", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(["quickstart"])
    assert ended.value.code == 75
    assert capsys.readouterr().err == "stopped by SIGTERM. The same command begins anew.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_eval_does_not_name_a_flag_that_it_lacks(saved, tmp_path, capsys):
    rows = [{"prompt": "How?", "chosen": "So. " * 300, "rejected": "no"}] + [
        {"prompt": f"How {n}?", "chosen": "So.", "rejected": "no"} for n in range(6)
    ]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    line = ["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")]
    said = refusal(capsys, *line)
    assert "1 of 7 preferences cannot be used with the model's limit of 256 tokens (reply_too_long: 1 " in said
    assert "Leave them out, or train with more --max-seq-len, or allow it with --max-drop-fraction 0.143." in said
    main([*line, "--max-drop-fraction", "0.143"])


def test_verify_says_what_it_checked(saved, capsys):
    main(["verify", str(saved)])
    said = capsys.readouterr().out
    assert re.match(rf"{re.escape(str(saved))}: verified\. \d+ files unchanged, 7 canaries give their scores", said)


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_head(folder: Path) -> None:
    """A head of zeros that nothing but the scores gives away."""
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata=METADATA)
    write_json(folder / "reward_spec.json", seal(folder, read_spec(folder)).to_dict())


def damage_problem_type(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"regression"', '"single_label_classification"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "model.safetensors was changed after the model was saved. Restore the folder"),
        (damage_head, "What fits: a head that is zero or was never loaded (zero_head). Restore the folder"),
        (damage_problem_type, "engines would return a probability instead of the score"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "reward_spec.json").unlink(), "no reward_spec.json"),
    ],
)
def test_verify_names_the_damage(copy, capsys, damage, message):
    damage(copy)
    said = refusal(capsys, "verify", copy)
    assert str(copy) in said
    assert message in said


def test_a_damaged_model_neither_evaluates_nor_scores(copy, pairs_file, tmp_path, capsys):
    damage_weights(copy)
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."})
    said = refusal(capsys, "score", "--model", copy, "--input", data, "--output", tmp_path / "scored.jsonl")
    assert "model.safetensors was changed" in said
    said = refusal(capsys, "eval", "--model", copy, "--dataset", pairs_file, "--output-dir", tmp_path / "out")
    assert "model.safetensors was changed" in said
    assert not (tmp_path / "scored.jsonl").exists()
    assert not (tmp_path / "out/eval.metrics.json").exists()


def test_quickstart_hands_its_flags_on(monkeypatch, tmp_path, capsys):
    def run(folder, **settings):
        return f"{folder} {settings}"

    monkeypatch.setattr("rewardlab.quickstart.run_quickstart", run)
    main(["quickstart"])
    assert capsys.readouterr().out == "runs/quickstart {'num_steps': None, 'num_test': 300, 'seed': 0}\n"
    main(["quickstart", "--output-dir", str(tmp_path), "--steps", "3", "--test-pairs=40", "--seed", "1"])
    assert capsys.readouterr().out == f"{tmp_path} {{'num_steps': 3, 'num_test': 40, 'seed': 1}}\n"
