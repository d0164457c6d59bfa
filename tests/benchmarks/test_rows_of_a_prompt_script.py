"""The benchmark of rows that share a prompt runs on a tiny model and writes what it promises; no time is held."""

from __future__ import annotations

import json

import pytest

import rows_of_a_prompt
import tokens_of_prompts
from benchmark_results import page_in, result


@pytest.mark.slow
def test_rows_of_a_prompt_are_timed_apart_and_together(tmp_path):
    for part in ("train", "test"):
        rows = [{"prompt": f"Why {k % 6}?", "chosen": f"since {k}", "rejected": f"no {k % 2}"} for k in range(24)]
        (tmp_path / f"few.{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = ["--model", "tiny-llama", "--layers", "0", "--precision", "fp32", "--threads", "1"]
    data = ["--data", "few", "--data-folder", str(tmp_path), "--rows", "24", "--judged", "24"]
    own = ["--together", "4", "--pairs", "8", "--steps", "3", "--rounds", "2", "--results", str(tmp_path / "results")]
    assert rows_of_a_prompt.main([*size, *data, *own]) == 0
    found = result(tmp_path / "results")
    assert found["scores_apart"] < 1e-5
    for what, names in (
        ("evaluation", [rows_of_a_prompt.APART, rows_of_a_prompt.TOGETHER]),
        ("training", ["one by one", "4 rows of a prompt"]),
    ):
        samples = found["samples"][what]
        assert list(samples) == names
        first, second = (sum(one["facts"]["tokens"] for one in samples[name]) for name in names)
        assert second < first
    page = page_in(tmp_path / "results")
    assert "24 pairs on 6 prompts" in page
    assert "times as fast" in page


@pytest.mark.slow
def test_tokens_are_counted_row_by_row_and_by_prompt(tmp_path):
    for name, prompts in (("few", 6), ("many", 24)):
        rows = [{"prompt": f"Why {k % prompts}?", "chosen": f"since {k}", "rejected": f"no {k % 2}"} for k in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--model", "tiny-llama", "--data", "few", "many", "--data-folder", str(tmp_path)]
    assert tokens_of_prompts.main([*own, "--max-seq-len", "128", "--results", str(tmp_path / "results")]) == 0
    few, many = result(tmp_path / "results")["files"]
    assert (few["prompts"], many["prompts"]) == (6, 24)
    assert few["together"] < few["by_row"] < few["unshared"]
    assert few["replies_computed"] < few["replies"]
    assert many["together"] == many["by_row"]
