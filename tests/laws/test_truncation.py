"""One rule of truncation from the flag to the score: training, its record, the folder, evaluation, files, servers."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import runs
from common import make_model, make_tokenizer, write_base_model
from resuming import interrupted
from rewardlab.artifact.load import load, require_canaries
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.client.protocol import ScoreRequest
from rewardlab.client.rendering import Artifact
from rewardlab.core.errors import ArtifactError, DataError, RenderError
from rewardlab.core.files import SUM
from rewardlab.core.run_folder import MANIFEST
from rewardlab.core.spec import TRUNCATION_OF, RewardSpec, part_digests, read_spec
from rewardlab.core.types import Message, ScoreRow
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.engine.api import TooLongError
from rewardlab.serve.engine.local import LocalEngine
from rewardlab.serve.file_scoring.file import ScoreSettings, score_file
from rewardlab.serve.verifying.folder import verify
from rewardlab.training.run import train

LIMIT = 64
RULES = ("prompt-left", "drop", "error", "reply-middle")
SHORT = {"prompt": "How?", "response": "So."}
LONG_PROMPT = {"prompt": "Why " * 60, "response": "No."}
LONG_REPLY = {"prompt": "Why?", "response": "because " * 40}
ROWS = [SHORT, LONG_PROMPT, LONG_REPLY]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each rule, with the same weights."""
    made = {}
    for rule in RULES:
        config = RenderingConfig(max_seq_len=LIMIT, truncation=rule)
        made[rule] = tmp_path_factory.mktemp("rules") / rule
        renderer = build_renderer(make_tokenizer(), config)
        save_reward_model(made[rule], make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return made


def talk(row: dict[str, str]) -> tuple[Message, Message]:
    return Message("user", row["prompt"]), Message("assistant", row["response"])


def scored(folder: Path, target: Path, **settings: Any) -> list[dict[str, Any]]:
    source = target.with_name("rows.jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    score_file(str(folder), source, target, ScoreSettings(**settings, overwrite=True))
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize("rule", RULES)
def test_a_folder_keeps_its_rule_and_proves_it(folders: dict[str, Path], rule: str) -> None:
    spec = read_spec(folders[rule])
    assert spec.renderer.truncation == TRUNCATION_OF[rule]
    assert [canary.name for canary in spec.cut_canaries] == ["cut"]
    assert verify(folders[rule]).num_canaries == len(spec.canaries)
    scorer = load(folders[rule])
    (canary,) = spec.cut_canaries
    for changed in ({"token_ids": canary.token_ids[:-1]}, {"max_length": canary.max_length - 1}):
        with pytest.raises(ArtifactError, match="canary 'cut' is cut to"):
            require_canaries(scorer, replace(spec, cut_canaries=[replace(canary, **changed)]), where="w")
    refused = load(folders[rule]).renderer.refuses
    assert refused == (rule in ("drop", "error"))


def test_folders_from_before_there_were_rules_to_choose_from_are_read_as_they_were(folders: dict[str, Path]) -> None:
    spec = read_spec(folders["prompt-left"])
    older = replace(spec, cut_canaries=[])
    assert "cut_canaries" not in older.to_dict()
    assert set(part_digests(spec)) - set(part_digests(older)) == {"cut_canaries"}
    assert RewardSpec.from_dict(older.to_dict(), where="w") == older
    wrong = replace(spec, cut_canaries=[replace(spec.cut_canaries[0], max_length=3)])
    with pytest.raises(ArtifactError, match=r"cut_canaries\[0\].max_length: expected at least its \d+ tokens, found 3"):
        RewardSpec.from_dict(wrong.to_dict(), where="w")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", RULES)
def test_files_servers_and_clients_follow_the_rule_unless_asked(
    folders: dict[str, Path], rule: str, tmp_path: Path
) -> None:
    by_default, cut, refused = (
        scored(folders[rule], tmp_path / f"{how}.jsonl", overlong=how) for how in ("auto", "cut", "refuse")
    )
    assert by_default == (refused if rule in ("drop", "error") else cut)
    assert [row["score"] is None for row in refused] == [False, True, True]
    keeps_reply = rule != "reply-middle"
    fits, other = (1, 2) if keeps_reply else (2, 1)
    said = "The model was trained without" if rule in ("drop", "error") else "by the rule of training"
    assert said in refused[fits]["score_error"]
    assert cut[fits]["score"] is not None
    assert cut[other]["score"] is None
    column, absent = ("truncated_tokens", "truncated_reply_tokens")[:: 1 if keeps_reply else -1]
    assert cut[fits][column][0] > 0
    assert all(absent not in row for row in cut)
    scorer = load(folders[rule])
    if rule in ("drop", "error"):
        with pytest.raises(RenderError, match=r"above the model's limit of 64.*trained without.*renderer.that_cuts"):
            scorer.score([talk(ROWS[fits])])
        scorer.renderer = scorer.renderer.that_cuts
    wanted = scorer.score([talk(ROWS[fits])])[0]
    assert cut[fits]["score"] == pytest.approx(wanted, abs=1e-5)
    engine = LocalEngine.load({"mine": folders[rule]}, token_budget=300)
    try:
        asked = {"prompt": ROWS[fits]["prompt"], "replies": [ROWS[fits]["response"]]}
        with pytest.raises(TooLongError, match="oldest turns" if keeps_reply else "the middle of its reply"):
            engine.prepare(ScoreRequest.model_validate(asked))
        prepared = engine.prepare(ScoreRequest.model_validate({**asked, "truncate": True}))
        (group,) = engine.submit(prepared).result(timeout=60).groups
        assert group.scores[0] == pytest.approx(wanted, abs=1e-5)
        assert (group.truncated_tokens[0] > 0) == keeps_reply
        assert group.truncated_reply_tokens == ([] if keeps_reply else cut[fits]["truncated_reply_tokens"])
        assert engine.served()[0].truncation == TRUNCATION_OF[rule]
    finally:
        engine.close()
    for truncate in (None, True, False):
        (rendering,) = Artifact(folders[rule], truncate=truncate).render_all([talk(ROWS[fits])])
        if truncate is False or (truncate is None and rule in ("drop", "error")):
            assert isinstance(rendering, RenderError)
            said = r"it takes \d+ tokens, above the model's limit of 64.*truncate=True"
            assert re.match(said, str(rendering))
        else:
            assert rendering.item == scorer.renderer.render(*[(turn,) for turn in talk(ROWS[fits])]).token_ids.tolist()
            assert bool(rendering.truncated_reply_tokens) == (not keeps_reply)


@pytest.mark.slow
def test_a_table_has_the_column_of_replies_only_for_models_that_cut_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for rule in ("prompt-left", "reply-middle"):
        target = tmp_path / f"{rule}.csv"
        score_file(str(folders[rule]), source, target)
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert ("truncated_reply_tokens" in rows[0]) == (rule == "reply-middle")
        assert "truncated_tokens" in rows[0]
    assert [bool(row["truncated_reply_tokens"]) for row in rows] == [False, False, True]
    score_file(str(folders["reply-middle"]), source, tmp_path / "scored.parquet")
    table = pq.read_table(tmp_path / "scored.parquet")
    assert [bool(cut) for cut in table["truncated_reply_tokens"].to_pylist()] == [False, False, True]


def test_score_rows_of_earlier_versions_are_read_and_only_cut_replies_add_a_column() -> None:
    values: dict[str, Any] = {
        **{"preference_id": "a", "source": "s", "prompt_key": "k", "reply": 0, "score": 1.0, "num_tokens": 9},
        **{"prompt_tokens": 4, "truncated_tokens": 0, "comparisons": []},
    }
    row = ScoreRow.from_dict(values)
    assert (row.truncated_reply_tokens, row.is_cut) == (0, False)
    assert row.as_dict() == values
    cut = ScoreRow.from_dict({**values, "truncated_reply_tokens": 3})
    assert cut.as_dict() == {**values, "truncated_reply_tokens": 3}
    assert cut.is_cut


def write_rows(path: Path, *, long: int = 0) -> Path:
    """Pairs, of which every fourth has a long reply and every `long`-th a long prompt."""
    rows = []
    for number in range(24):
        prompt = f"Is {number} light?" + " truly" * (20 if long and number % long == 1 else 0)
        chosen = "yes " * (30 if number % 4 == 0 else 1) + str(number)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": "no"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("rule", ["drop", "reply-middle"])
def test_a_run_records_what_its_rule_did_and_an_evaluation_of_its_model_does_the_same(
    tmp_path: Path, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = write_base_model(tmp_path / "base")
    data = write_rows(tmp_path / "rows.jsonl")
    config = runs.config_for(base, data, tmp_path / "run", steps=2, max_seq_len=72, truncation=rule, log_samples=2)
    with caplog.at_level("INFO", logger="rewardlab"):
        train(config)
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert manifest["truncation"] == TRUNCATION_OF[rule]
    train_tokens, eval_tokens = manifest["tokens"]["training"], manifest["tokens"]["evaluation"]
    num_long = sum(own["shortened_replies"] + own["dropped"].get("overlong", 0) for own in (train_tokens, eval_tokens))
    assert num_long == 6
    assert ("cut in their middle" in caplog.text) == (rule == "reply-middle")
    folder = next((tmp_path / "run").glob("step_*"))
    main(["eval", "--model", str(folder), "--dataset", str(data), "--output-dir", str(tmp_path / "eval")])
    rows = [json.loads(line) for line in (tmp_path / "eval/eval.scores.jsonl").read_text().splitlines()]
    cut = [row for row in rows if row.get("truncated_reply_tokens")]
    assert len(rows) == (36 if rule == "drop" else 48)
    assert len(cut) == (0 if rule == "drop" else 6)
    assert not any(row["truncated_tokens"] for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_a_run_of_an_earlier_version_that_left_rows_out_goes_on(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    settings = {"max_seq_len": 72, "truncation": "drop", "micro_token_budget": 512, "batch_size": 4, "steps": 4}
    config = interrupted(base_model, data, tmp_path / "run", monkeypatch, step=2, eval_every=2, **settings)
    # As such a run was recorded: the setting has its earlier name, and nothing is said of replies that are cut.
    path, record = tmp_path / "run" / "config.json", tmp_path / "run" / MANIFEST
    values, manifest = json.loads(path.read_text()), json.loads(record.read_text())
    values.pop(SUM, None)
    manifest.pop(SUM, None)
    del values["truncation"]
    values["overlong"] = "drop"
    manifest["truncation"] = TRUNCATION_OF["prompt-left"]
    for report in manifest["tokens"].values():
        del report["shortened_replies"]
    from rewardlab.core.config import HASH_DIGITS
    from rewardlab.core.files import sha256_json

    manifest["config_hash"] = sha256_json(values)[:HASH_DIGITS]
    path.write_text(json.dumps(values))
    record.write_text(json.dumps(manifest))
    train(config)
    assert json.loads(path.read_text())["truncation"] == "drop"
    assert read_spec(tmp_path / "run" / "step_4").renderer.truncation == "drop"


@pytest.mark.usefixtures("verified_here")
def test_a_run_that_may_cut_nothing_stops_at_the_first_long_row_of_any_worker(tmp_path: Path, base_model: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", long=5)
    config = runs.config_for(base_model, data, tmp_path / "run", steps=1, max_seq_len=72, truncation="error")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: a conversation takes \d+ tokens, above the limit of 72"):
        train(config)
    train(config.replace(max_seq_len=256, overwrite=True))
    assert np.isfinite(json.loads((tmp_path / "run" / MANIFEST).read_text())["tokens"]["training"]["longest"])
