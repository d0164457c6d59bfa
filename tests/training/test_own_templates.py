"""Runs with a chat template that a file gives, and with arguments of templates: the saved model needs neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common import write_base_model
from resuming import interrupted
from reward_models import save_tiny
from rewardlab.artifact.base import open_base, settle_rendering, spec_of
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import config_hash
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_jsonl
from rewardlab.core.spec import read_spec
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.reading import rules_of, sources_of
from rewardlab.data.chat import to_messages
from rewardlab.training.notices import continued_notices
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import config_for, history_of

pytestmark = pytest.mark.usefixtures("verified_here")
OWN = (
    "{% for m in messages %}<|im_start|>{% if loud is defined and loud %}!{% endif %}{{ m['role'] }}: "
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(OWN, encoding="utf-8")
    return path


def plain_scores(folder: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """By plain transformers, with the template of the folder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            scores.append(float(model(ids).logits))
    return scores


@pytest.mark.parametrize("bare", [True, False])
def test_the_saved_model_renders_by_the_template_of_the_file(template, pairs_file, tmp_path, bare):
    base = write_base_model(tmp_path / "base", **({"template": None} if bare else {}))
    settings = {"steps": 2, "chat_template": str(template), "template_arguments": ("loud=true",)}
    result = train(config_for(base, pairs_file, tmp_path / "run", save_dtype="float32", **settings))
    assert result.last is not None
    template.unlink()
    scorer = load(result.last)
    assert scorer.renderer.text(to_messages(MESSAGES)).startswith("<|im_start|>!user: How?")
    pairs = [json.loads(line) for line in pairs_file.read_text(encoding="utf-8").splitlines()][:4]
    conversations = [
        [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}]
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    assert scorer.score(conversations) == pytest.approx(plain_scores(result.last, conversations), abs=1e-5)
    spec = read_spec(result.last).renderer
    assert (spec.template_source, spec.template_arguments) == ("tokenizer", {})
    assert spec.chat_template == (result.last / "chat_template.jinja").read_text(encoding="utf-8")


def test_config_json_repeats_a_run_whose_file_is_gone(template, base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=2, chat_template=str(template))
    train(config)
    template.unlink()
    saved = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert saved["chat_template"] == OWN
    again = parse_train(["--config", str(tmp_path / "run" / "config.json"), "--output-dir", str(tmp_path / "again")])
    train(again)
    assert history_of(tmp_path / "again") == history_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="own.jinja: there is no such file"):
        train(config.replace(output_dir=tmp_path / "third"))
    assert not (tmp_path / "third").exists(), "nothing is written before"


def test_a_resumed_run_keeps_its_template_by_its_content(template, base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, chat_template=str(template))
    moved = template.rename(tmp_path / "moved.jinja")
    moved.write_text(OWN.replace(": ", " "), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--chat-template \(a template, SHA-256 \w+\), it was \(a template, SHA-256"):
        train(config.replace(chat_template=str(moved)))
    with pytest.raises(ConfigError, match=r"--template-arguments \['loud=true'\], it was \[\]"):
        train(config.replace(chat_template=OWN, template_arguments=("loud=true",)))
    moved.write_text(OWN, encoding="utf-8")
    log.clear()
    train(config.replace(chat_template=str(moved)))
    assert "configuration " in log.text
    assert "chat_template=(a template" in log.text
    assert "for m in messages" not in log.text


@pytest.mark.parametrize("content", ["", "{% for m in messages %}", "no template"])
def test_what_is_no_template_is_refused_before_anything_is_written(content, template, base_model, pairs_file, tmp_path):
    template.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="--chat-template .*own.jinja: "):
        train(config_for(base_model, pairs_file, tmp_path / "run", chat_template=str(template)))
    assert not (tmp_path / "run").exists()


def test_hashes_are_of_the_content(template, base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", chat_template=str(template))
    hashes = set()
    for text in (OWN, OWN.replace(": ", " ")):
        template.write_text(text, encoding="utf-8")
        hashes.add(config_hash(config.replace(**settle_rendering(config.model, config.data.rendering))))
    assert len(hashes) == 2


def test_probe_and_data_commands_take_it_too(template, base_model, pairs_file, tmp_path, capsys):
    words = ["--model", str(base_model), "--dataset", str(pairs_file), "--max-seq-len", "128"]
    own = ["--chat-template", str(template), "--template-arguments", "loud=true"]
    main(["probe", *words, *own, "--output-dir", str(tmp_path / "probe"), "--no-cache"])
    (folder,) = [path.parent for path in (tmp_path / "probe").rglob("reward_spec.json")]
    assert read_spec(folder).renderer.chat_template == "{%- set loud = True -%}" + OWN
    capsys.readouterr()
    main(["data", "show", str(pairs_file), *words[:2], *words[4:], *own])
    assert "│!│as│sistant│:│" in capsys.readouterr().out
    main(["data", "inspect", str(pairs_file), *words[:2], *words[4:], *own])
    with pytest.raises(SystemExit):
        main(["data", "show", str(pairs_file), "--model", str(folder), *own[2:]])
    assert "--template-arguments" in capsys.readouterr().err


def test_a_reward_model_of_bare_texts_goes_on_with_them(tmp_path):
    # Its template alone joins the turns of a transcript without their names.
    folder = save_tiny(tmp_path / "rm", template=None, chat_template="concat", system_prompt="Be brief. ")
    turns = [f"\n\nHuman: Why {n}?\n\nAssistant:" for n in range(30)]
    rows = [{"chosen": f"{before} a b", "rejected": f"{before} c d"} for before in turns]
    write_jsonl(path := tmp_path / "hh.jsonl", rows)
    result = train(config_for(folder, path, tmp_path / "run", steps=1))
    renderer = read_spec(result.last).renderer
    before = read_spec(folder).renderer
    assert (renderer.joins_texts, renderer.chat_template) == (True, before.chat_template)
    assert "Hu|man|:" in (tmp_path / "run/samples.txt").read_text(encoding="utf-8")
    config = config_for(folder, path, tmp_path / "other", chat_template="plain")
    assert settle_rendering(config.model, config.data.rendering)["chat_template"] == "plain"
    search = MislabelsConfig.of(model=str(folder), dataset=(str(path),), output_dir=tmp_path / "found")
    assert all(rules_of(source, search).bare for source in sources_of(search))


@pytest.mark.parametrize("name", ["their/model", "their/model@v1"])
def test_a_reward_model_of_bare_texts_on_the_hub_goes_on_with_them(name, tmp_path, monkeypatch):
    place = tmp_path / "hub" / "models--their--model"
    for ref in ("main", "v1"):
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / ref).write_text("0" * 40)
    how = {"chat_template": "concat", "system_prompt": "Be brief. "}
    save_tiny(place / "snapshots" / ("0" * 40), template=None, **how)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = RewardTrainerConfig.of(model=name, dataset=("d",), max_seq_len=200)
    settled = settle_rendering(config.model, config.data.rendering)
    assert {setting: settled[setting] for setting in how} == how
    config = config.replace(**settled)
    base = open_base(config.model, config.data.rendering)
    assert base.renderer.spec.special_tokens_in_text == "keep"
    (line,) = continued_notices(config, base)
    assert line.endswith("goes on with other settings than it was trained with: --max-seq-len was 256, now 200.")


def test_what_is_on_no_hub_has_no_spec(monkeypatch, base_model, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = ("their/model", "no such", "--", "a..b", str(base_model), str(tmp_path / "none"), "/", "a/b/c")
    assert [spec_of(name) for name in names] == [None] * len(names)


def test_a_hub_that_cannot_be_asked_gives_no_spec(monkeypatch):
    """The library of HTTP has errors of its own."""

    def refused(*_: object) -> None:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refused)
    assert spec_of("their/model") is None
