"""`rewardlab diagnose` from data to verdicts, on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from killing import EndedError
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message, prompt_key
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.diagnosing.run import FOUND, PAGE, diagnose

TOPICS = ("basil", "light", "water", "soil", "Paris", "France")


@pytest.fixture(autouse=True)
def _here(verified_here, monkeypatch, tmp_path):
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


def write_long(path, count=60):
    """Pairs of which the longer reply is preferred, and nothing else tells them apart; most judges prefer it."""
    draw = np.random.default_rng(0)
    rows = []
    for n in range(count):
        words = [" ".join(draw.choice(TOPICS, size=size)) for size in sorted(draw.integers(1, 14, 2))]
        words[1] += " more"
        rows.append(
            {"prompt": f"What of {TOPICS[n % 6]} and {n}?", "chosen": words[1], "rejected": words[0], "strength": 0.7}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def words_for(base_model, pairs, folder, *more):
    words = ["--model", str(base_model), "--dataset", str(pairs), "--output-dir", str(folder)]
    return [*words, "--max-seq-len", "128", "--precision", "fp32", "--diagnostic-length-threshold", "8", *more]


def test_a_length_shortcut_is_named_and_the_status_says_so(tmp_path, base_model, capsys):
    folder = tmp_path / "found"
    words = words_for(base_model, write_long(tmp_path / "long.jsonl"), folder)
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *words])
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "of the accuracy above chance is there from length alone" in said
    found = json.loads((folder / "diagnose.json").read_text())
    by_name = {one["control"]: one for one in found["controls"]}
    assert by_name["length_only"]["verdict"] == "fail"
    assert by_name["prompt_only"]["verdict"] == "pass"
    assert by_name["prompt_only"]["measured"][0]["seeds"]["value"] == 0.5
    assert by_name["label_shuffle"]["verdict"] != "fail"
    assert len(found["by_seed"]["label_shuffle"]) == 5
    assert len(set(found["by_seed"]["label_shuffle"])) > 1
    page = (folder / "diagnose.md").read_text()
    assert "Holm" in page
    for text in (said, page):
        assert "Ceiling 0.700 [" in text
        assert "from strengths from 0.5 to 1 (n = 60" in text
    assert found["ceiling"]["origin"] == "strengths"


def test_data_without_replies_that_could_be_swapped_get_the_other_controls(tmp_path, base_model, capsys):
    rows = [{"prompt": f"Is {n} {TOPICS[n % 6]}?", "chosen": "Yes.", "rejected": "No."} for n in range(40)]
    pairs, folder = tmp_path / "yes.jsonl", tmp_path / "found"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    main(["diagnose", *words_for(base_model, pairs, folder)])
    said = " ".join(capsys.readouterr().out.split())
    assert "andom negatives was not run: --diagnostic-mode random_negatives: no row has a reply to another" in said
    found = json.loads((folder / "diagnose.json").read_text())
    assert {"label_shuffle", "prompt_only", "response_only"} <= {one["control"] for one in found["controls"]}


def test_one_conversation_alone_is_refused_as_such(tmp_path, base_model):
    rows = [{"prompt": "What of basil?", "chosen": f"Yes {n}.", "rejected": f"No {n}."} for n in range(40)]
    pairs = tmp_path / "one.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = DiagnoseConfig.of(model=str(base_model), dataset=(str(pairs),), output_dir=tmp_path / "found")
    with pytest.raises(DataError, match="the data are one conversation; controls need at least two"):
        diagnose(config.replace(max_seq_len=128, precision="fp32"))


def test_other_files_are_left_alone_and_another_configuration_needs_a_word(tmp_path, base_model):
    pairs, folder = write_long(tmp_path / "long.jsonl"), tmp_path / "found"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *words_for(base_model, pairs, folder)])
    assert ended.value.code == 2
    assert [path.name for path in folder.iterdir() if path.suffix] == ["mine.txt"]


def test_what_ends_it_between_its_two_results_leaves_both_as_they_were(tmp_path, base_model, monkeypatch):
    pairs, folder = write_long(tmp_path / "long.jsonl"), tmp_path / "found"
    config = DiagnoseConfig.of(model=str(base_model), dataset=(str(pairs),), output_dir=folder, seeds=5)
    config = config.replace(max_seq_len=128, precision="fp32", diagnostic_length_threshold=8)
    diagnose(config)
    earlier = {name: (folder / name).read_bytes() for name in (FOUND, PAGE)}

    def ending(*_: object) -> None:
        raise EndedError

    with monkeypatch.context() as patched:
        patched.setattr("rewardlab.diagnosing.run.write_text", ending)
        with pytest.raises(EndedError):
            diagnose(config.replace(seeds=6))
    assert {name: (folder / name).read_bytes() for name in (FOUND, PAGE)} == earlier
    diagnose(config.replace(seeds=6))
    assert all((folder / name).read_bytes() != content for name, content in earlier.items())


@pytest.mark.parametrize(
    "names",
    [{"diagnostic_mode": "label_shuffle"}, {"seeds": 4}, {"model": ""}, {"train_config": "run.yaml"}],
)
def test_settings_that_mean_nothing_are_refused(names, tmp_path):
    with pytest.raises(ConfigError):
        DiagnoseConfig.of(**{"model": "any", "dataset": ("x",), "output_dir": tmp_path, **names})


@pytest.mark.soak
def test_controls_as_training_runs_are_kept_and_resumed(tmp_path, base_model, log):
    pairs, settings = write_long(tmp_path / "long.jsonl"), tmp_path / "run.yaml"
    settings.write_text("steps: 3\nbatch_size: 8\nlr: 0.003\neval_fraction: 0.3\nmicro_token_budget: 512\n")
    config = DiagnoseConfig.of(
        model=str(base_model),
        dataset=(str(pairs),),
        output_dir=tmp_path / "found",
        max_seq_len=128,
        precision="fp32",
        diagnostic_length_threshold=8,
        train=True,
        train_config=settings,
    )
    first = diagnose(config)
    by_name = {one.control: one for one in first.findings}
    assert by_name["prompt_only"].verdict == "pass"
    assert set(by_name) == {*by_name} >= {"label_shuffle", "random_negatives", "length_matched", "length_only"}
    assert by_name["random_negatives"].measured[1].name == "changed pairs"
    log.clear()
    (tmp_path / "found" / "runs" / "response_only" / "seed_2" / "control.json").unlink()
    again = diagnose(config)
    assert [one.p_value for one in again.findings] == pytest.approx(
        [one.p_value for one in first.findings], nan_ok=True
    )
    assert log.text.count("is done") >= 30


def write_kwise(path, count, *, offset=0):
    """Rows of two to four replies with scores, two rows a conversation."""
    draw = np.random.default_rng(offset)
    rows = []
    for n in range(offset, offset + count):
        size = 2 + n % 3
        rows.append(
            {
                "prompt": f"What of {TOPICS[n % 6]} and {n // 2}? {'Again.' * (n % 2)}",
                "responses": [f"{k} {' '.join(draw.choice(TOPICS, size=4))}" for k in range(size)],
                "scores": draw.permutation(size).tolist(),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_rows_of_several_replies_and_test_data_are_diagnosed_too(tmp_path, base_model):
    found = diagnose(
        DiagnoseConfig.of(
            model=str(base_model),
            dataset=(str(write_kwise(tmp_path / "k.jsonl", 40)),),
            test_dataset=(str(write_kwise(tmp_path / "test.jsonl", 20, offset=100)),),
            output_dir=tmp_path / "found",
            layers=("all",),
            max_seq_len=128,
            precision="fp32",
            diagnostic_length_threshold=4,
        )
    )
    by_name = {one.control: one for one in found.findings}
    assert by_name["prompt_only"].verdict == "pass"
    assert [one.name for one in by_name["response_only"].measured] == ["held out", "test data"]
    assert found.full_test is not None
    assert found.facts["comparisons"] == sum(k * (k - 1) // 2 for k in (2 + n % 3 for n in range(40)))
    written = json.loads((tmp_path / "found" / "diagnose.json").read_text())
    assert written["layer"] in (1, 2)
    assert written["control_data"]["random_negatives"]["counts"]["train"][0]["changed"] == 40


def test_trained_controls_of_a_replaced_base_model_are_not_taken_for_its_own(tmp_path, base_model):
    from rewardlab.diagnosing.run import BEGUN, RUNS, _claim

    model = Path(shutil.copytree(base_model, tmp_path / "model"))
    pairs, folder = write_long(tmp_path / "long.jsonl"), tmp_path / "found"
    config = DiagnoseConfig.of(train=True, model=str(model), dataset=(str(pairs),), output_dir=folder)
    _claim(config)
    (folder / RUNS).mkdir()
    (model / "README.md").write_text("words about the model")
    _claim(config)
    assert (folder / BEGUN).is_file()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    with pytest.raises(ConfigError, match="holds the controls of .* other data or model files"):
        _claim(config)


def write_turns(path, conversations, *, offset=0):
    """Conversations of three turns; at each the longer reply is preferred."""
    rows = []
    for n in range(offset, offset + conversations):
        turns = [{"role": "user", "content": f"What of {TOPICS[n % 6]} and {n}?"}]
        for turn in range(3):
            good, bad = f"{TOPICS[(n + turn) % 6]} {n} {turn} and more water", f"no {TOPICS[turn]} {n}"
            rows.append({"prompt": list(turns), "chosen": good, "rejected": bad})
            turns += [{"role": "assistant", "content": good}, {"role": "user", "content": f"And {turn}?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of_turns(folder, base_model, conversations, **settings):
    """The settings of a diagnosis of so many conversations of several turns, tested on 11 others."""
    return DiagnoseConfig.of(
        model=str(base_model),
        dataset=(str(write_turns(folder / "pairs.jsonl", conversations)),),
        test_dataset=(str(write_turns(folder / "test.jsonl", 11, offset=100)),),
        output_dir=folder / "found",
        max_seq_len=256,
        precision="fp32",
        **settings,
    )


@pytest.mark.slow
def test_intervals_on_test_data_are_by_conversation_too(tmp_path, base_model):
    found = diagnose(of_turns(tmp_path, base_model, 12, seeds=5))
    measured = {one.control: one for one in found.findings}["response_only"].measured
    assert [one.conversations.n for one in measured] == [12, 11]


@pytest.mark.slow
def test_intervals_of_training_runs_are_by_conversation_too(tmp_path, base_model, monkeypatch):
    from rewardlab.diagnosing import runs

    settings = tmp_path / "run.yaml"
    settings.write_text("steps: 3\nlimit: 45\n")
    config = of_turns(tmp_path, base_model, 20, train=True, train_config=settings)

    def judged(path, part):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        keys = [prompt_key([Message(**turn) for turn in row["prompt"]]) for row in rows]
        return {f"{key} data row{n} 0 1 1": float(n % 5 > 0) for n, key in enumerate(keys) if n // 3 % 4 in part}

    def outcomes(settings):
        part = {settings.run.seed % 4, (settings.run.seed + 1) % 4}
        found = judged(tmp_path / "pairs.jsonl", part)
        return {
            "kept": 1.0,
            "selection": found,
            "selection changed": found,
            "test": judged(tmp_path / "test.jsonl", range(4)),
        }

    monkeypatch.setattr(runs, "_run", outcomes)
    found = diagnose(config)
    assert (found.facts["comparisons"], found.facts["conversations"]) == (60, 20)
    measured = {one.control: one for one in found.findings}["response_only"].measured
    assert [one.conversations.n for one in measured] == [20, 11]
    assert found.full.value == found.full_conversations.value


def test_controls_of_another_template_under_the_same_name_are_not_taken_for_its_own(tmp_path, base_model, monkeypatch):
    from rewardlab.diagnosing import run

    seen = []

    def told(config):
        seen.append(config.data.rendering.chat_template)
        raise DataError("far enough")

    monkeypatch.setattr(run, "compute_states", told)
    pairs, template = write_long(tmp_path / "long.jsonl"), tmp_path / "own.jinja"
    config = DiagnoseConfig.of(
        model=str(base_model), dataset=(str(pairs),), output_dir=tmp_path / "found", chat_template=str(template)
    )
    for text, said in (("{{ messages }}", "far enough"), ("{{ messages[0] }}", "controls of another configuration")):
        template.write_text(text, encoding="utf-8")
        with pytest.raises((DataError, ConfigError), match=said):
            diagnose(config)
        (tmp_path / "found" / run.FOUND).write_text("{}", encoding="utf-8")
    assert seen == ["{{ messages }}"]


def test_a_command_that_failed_at_its_start_may_be_corrected_in_the_same_folder(tmp_path, base_model, monkeypatch):
    from rewardlab.diagnosing import run

    tried = []

    def told(config):
        tried.append(config.data.rendering.max_seq_len)
        raise ConfigError("--max-seq-len is above the positions of this model")

    monkeypatch.setattr(run, "compute_states", told)
    pairs = write_long(tmp_path / "long.jsonl")
    for limit in (1024, 128):
        with pytest.raises(ConfigError, match="above the positions"):
            diagnose(
                DiagnoseConfig.of(
                    model=str(base_model), dataset=(str(pairs),), output_dir=tmp_path / "found", max_seq_len=limit
                )
            )
    assert tried == [1024, 128]
