"""Scores of a gold model for the replies that are judged: how they are found, and what is said of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from common import make_model, make_tokenizer, write_pairs
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_jsonl
from rewardlab.core.types import Comparison, Message, TokenGroup, prompt_key
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.gold_scores import read_gold
from rewardlab.report.build import tell
from rewardlab.report.folder import read_folder

NUM_ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "best"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


def lists(path: Path, *, replies: int = 3) -> Path:
    """Thirty prompts with several replies each, and a score for every reply."""
    rows = [
        {
            "prompt": f"How many of {n}?",
            "responses": [f"{'some ' * k}{n * k}" for k in range(1, replies + 1)],
            "scores": [float((n * 7 + k * 5) % 11 + k / 10) for k in range(replies)],
        }
        for n in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def judged(model: Path, data: Path, out: Path, *more: str) -> dict[str, dict[str, float]]:
    main(["eval", str(model), "--dataset", str(data), "--output-dir", str(out), "--no-precision-card", *more])
    found: dict[str, dict[str, float]] = json.loads((out / "eval.metrics.json").read_text())["all"]["estimates"]
    return found


def group(number: int, replies: int = 2, *, prompt: str = "", file: str = "pairs.jsonl") -> TokenGroup:
    key = prompt_key([Message("user", prompt or f"prompt {number}")])
    return TokenGroup(
        preference_id=f"{file}:{number}", source="pairs", prompt_key=key, shared=np.array([1], np.int32),
        suffixes=(np.array([2], np.int32),) * replies, prompt_tokens=(1,) * replies, truncated_tokens=(0,) * replies,
        comparisons=(Comparison(first=0, second=1),),
    )  # fmt: skip


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_a_model_that_is_its_own_gold_agrees_with_itself_everywhere(model, tmp_path, capsys):
    data = lists(tmp_path / "data.jsonl")
    judged(model, data, tmp_path / "gold")
    assert "eval_gold_spearman" not in judged(model, data, tmp_path / "none")
    capsys.readouterr()
    found = judged(model, data, tmp_path / "judged", "--gold", str(tmp_path / "gold"))
    printed = capsys.readouterr().out
    assert found["eval_gold_spearman"]["value"] == pytest.approx(1)
    assert found["eval_kendall_tau"]["value"] == pytest.approx(1)
    assert found["eval_best_of_k"]["value"] == pytest.approx(1)
    assert found["eval_gold_regret"]["value"] == 0
    assert "by gold scores" in printed
    assert "of scores and gold scores over all replies" in printed
    for name in ("eval.scores.jsonl",):
        assert (tmp_path / "judged" / name).read_bytes() == (tmp_path / "gold" / name).read_bytes()


@pytest.mark.slow
def test_scores_in_the_data_are_gold_scores_and_the_report_has_what_they_say(model, tmp_path):
    data = lists(tmp_path / "data.jsonl")
    found = judged(model, data, tmp_path / "out", "--gold", str(data))
    rows = {f"data.jsonl:{n}": row["scores"] for n, row in read_jsonl(data)}
    scores = [row for _, row in read_jsonl(tmp_path / "out/eval.scores.jsonl")]
    ours = np.array([row["score"] for row in scores]).reshape(NUM_ROWS, 3)
    gold = np.array([rows[row["preference_id"]][row["reply"]] for row in scores]).reshape(NUM_ROWS, 3)
    lost = gold.max(1) - gold[np.arange(NUM_ROWS), ours.argmax(1)]
    assert found["eval_gold_regret"]["value"] == pytest.approx(lost.mean())
    assert found["eval_gold_regret"]["n"] == NUM_ROWS
    told = tell(read_folder(tmp_path / "out"), find_texts=None)
    assert told.judgement is not None
    assert told.judgement["eval_gold_regret"].value == pytest.approx(lost.mean())
    page = (tmp_path / "out/report.md").read_text()
    assert "of scores and gold scores over all replies" in page
    assert "mean gold score lost by taking the highest score" in page


@pytest.mark.slow
def test_pairs_have_a_correlation_and_no_regret_and_several_models_a_row_each(model, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl", 20)
    rows = [row | {"score_chosen": n % 5, "score_rejected": -n} for n, (_, row) in enumerate(read_jsonl(data))]
    write(data, rows)
    found = judged(model, data, tmp_path / "one", "--gold", str(data))
    assert found["eval_gold_spearman"]["n"] == 20
    assert "eval_gold_regret" not in found
    again = tmp_path / "again"
    shutil.copytree(model, again)
    capsys.readouterr()
    out = tmp_path / "two"
    main(["eval", str(model), str(again), "--dataset", str(data), "--output-dir", str(out), "--gold", str(data)])
    assert capsys.readouterr().out.count("gold spearman ") == 2
    metrics = json.loads((out / "models.json").read_text())
    assert all("eval_gold_spearman" in one["metrics"]["all"]["estimates"] for one in metrics.values())


def test_lines_belong_to_the_file_of_their_name_or_to_the_only_one(tmp_path):
    rows = [{"scores": [n, -n]} for n in (1, 2, 3)]
    gold = write(tmp_path / "pairs.jsonl", rows)
    other = write(tmp_path / "others.jsonl", rows)
    two = [group(1), group(2, file="more.jsonl")]
    assert read_gold(gold, two) == {("pairs", "pairs.jsonl:1", 0): 1.0, ("pairs", "pairs.jsonl:1", 1): -1.0}
    with pytest.raises(DataError, match="no preference that is judged has gold scores"):
        read_gold(other, two)
    assert read_gold(other, [group(1), group(2)])["pairs", "pairs.jsonl:2", 1] == -2.0


def test_other_prompts_and_other_numbers_of_replies_have_no_gold_scores(tmp_path):
    texts = ["prompt 1", "another one", "prompt 3", "prompt 4"]
    rows = [{"prompt": text, "scores": [n, -n]} for n, text in enumerate(texts, start=1)]
    rows[3]["scores"] = [4, None]
    gold = read_gold(write(tmp_path / "pairs.jsonl", rows), [group(1), group(2), group(3, replies=3), group(4)])
    assert sorted(gold) == [("pairs", "pairs.jsonl:1", 0), ("pairs", "pairs.jsonl:1", 1), ("pairs", "pairs.jsonl:4", 0)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": "a", "reply": 0, "score": 1}, {"id": "a", "reply": 0, "score": 2}], "has two scores"),
        ([{"id": "a", "correct": True}], "it holds verdicts"),
        ([{"id": "elsewhere:1", "scores": [1, 2, 3]}], "has 'elsewhere:1', the data 'pairs.jsonl:1'"),
        ([{"id": "pairs.jsonl:1", "scores": ["NaN", None]}], "no preference that is judged has gold scores"),
        ([{"text": "nothing"}], "are not a known layout of scores"),
    ],
)
def test_files_that_say_nothing_are_refused_in_words(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        read_gold(write(tmp_path / "gold.jsonl", rows), [group(1)])


def test_a_file_that_is_missing_and_one_that_would_be_replaced_are_refused(model, tmp_path, capsys):
    with pytest.raises(ConfigError, match="no such file"):
        read_gold(tmp_path / "nosuch", [group(1)])
    data = lists(tmp_path / "data.jsonl")
    judged(model, data, tmp_path / "out")
    line = ["eval", str(model), "--dataset", str(data), "--output-dir", str(tmp_path / "out"), "--overwrite"]
    for gold in (tmp_path / "out/eval.scores.jsonl", tmp_path / "out"):
        with pytest.raises(SystemExit) as ended:
            main([*line, "--gold", str(gold)])
        assert ended.value.code == 2
        assert "would replace" in capsys.readouterr().err


def test_gold_scores_of_other_data_end_the_command_before_anything_is_scored(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rewardlab.evaluation.saved.SavedModel.scores", lambda *_, **__: 1 / 0)
    gold = write(tmp_path / "gold.jsonl", [{"id": f"elsewhere:{n}", "scores": [1, 2]} for n in range(NUM_ROWS)])
    line = ["eval", str(model), "--dataset", str(lists(tmp_path / "data.jsonl")), "--output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main([*line, "--gold", str(gold)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no preference that is judged has gold scores there" in " ".join(said.split())
    assert "Traceback" not in said
    assert not (tmp_path / "out/eval.metrics.json").exists()


def test_an_id_that_ends_in_a_number_is_a_line_only_where_more_says_so(tmp_path):
    """Ids such as `gsm8k:3` are of people; the gold file below has ids of its own, and its prompts are not known."""
    rows = [{"id": f"gold-{n}", "response_scores": [1.0 * n, 2.0 * n]} for n in range(1, 6)]
    with_ids = write(tmp_path / "ids.jsonl", [{"id": row["id"], "scores": row["response_scores"]} for row in rows])
    with pytest.raises(DataError):
        read_gold(with_ids, [group(3, file="gsm8k"), group(1, file="gsm8k")])
