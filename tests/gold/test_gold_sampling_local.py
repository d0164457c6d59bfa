"""Replies drawn in this process: from the right distribution, each by its own seed, ended where the model ends them."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.types import Message
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.sampling.asks import Ask
from rewardlab.gold.sampling.config import DrawConfig, SampleConfig, SamplerConfig
from rewardlab.gold.sampling.local import LocalSampler
from rewardlab.gold.sampling.run import sample
from tiny_chat import save_chat_model

PROMPT = (Message("user", "How do I keep basil alive?"),)
OTHER = (Message("user", "yes no"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # What the file of a model says about drawing must not change what is asked for.
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model", repetition_penalty=5.0, do_sample=True, top_k=2)


@pytest.fixture(scope="module")
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def draw(folder: Path, asks: list[Ask], **how) -> list[dict]:
    sampler = LocalSampler(str(folder), DrawConfig(**{"max_tokens": 8, "num_responses": 1, **how}), SamplerConfig())

    async def run():
        await sampler.open()
        try:
            return await sampler.ask(asks)
        finally:
            await sampler.close()

    return list(asyncio.run(run()))


def asks(num: int, prompt=PROMPT) -> list[Ask]:
    return [Ask(prompt=prompt, index=number, seed=1000 + number) for number in range(num)]


def rendered(folder: Path, prompt=PROMPT) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [turn.as_dict() for turn in prompt]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def first_token_p(model, folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([rendered(folder)])).logits[0, -1].double(), -1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_the_first_token_has_the_distribution_of_the_model(folder, model, monkeypatch, temperature, top_p) -> None:
    num = 4000
    p = first_token_p(model, folder) ** (1 / temperature)
    p = p / p.sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0
    p = p / p.sum()
    # One token each, told by its log-probability, which is the model's own before temperature and top-p.
    own = first_token_p(model, folder).log()
    found = draw(folder, asks(num), max_tokens=1, temperature=temperature, top_p=top_p)
    logprobs = torch.tensor([reply["logprob"] for reply in found], dtype=torch.float64)
    tokens = (logprobs[:, None] - own[None]).abs().argmin(1)
    assert (logprobs - own[tokens]).abs().max() < 1e-4
    counts = torch.bincount(tokens, minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    likely = p * num >= 5
    rest = [float(counts[~likely].sum()), float(p[~likely].sum() * num)]
    observed = [*counts[likely].tolist(), *rest[:1]] if rest[1] >= 1 else counts[likely].tolist()
    expected = [*(p[likely] * num).tolist(), *rest[1:]] if rest[1] >= 1 else (p[likely] * num).tolist()
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [one * scale for one in expected]).pvalue > 1e-3


@pytest.mark.slow
def test_a_reply_depends_on_its_seed_and_not_on_its_neighbours(folder) -> None:
    together = draw(folder, [*asks(6), *asks(3, OTHER)])
    alone = [draw(folder, [ask])[0] for ask in [*asks(6), *asks(3, OTHER)]]
    assert [reply["text"] for reply in together] == [reply["text"] for reply in alone]
    assert len({reply["text"] for reply in together}) > 6


def test_the_log_probability_is_that_of_the_model_for_the_whole_reply(folder, model, monkeypatch) -> None:
    prompt = rendered(folder)
    # The tokens themselves, since those of a text may be others than those that were drawn.
    asked = []
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "decode", lambda self, tokens, **how: (asked.append(how), json.dumps(tokens))[1]
    )
    drawn = draw(folder, asks(8))
    # A text that is tidied up is no longer what the model wrote.
    assert all(how["clean_up_tokenization_spaces"] is False for how in asked)
    for reply in drawn:
        tokens = json.loads(reply["text"])
        assert len(tokens) == reply["tokens"]
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].double(), -1)
        whole = sum(float(log_p[len(prompt) + place - 1, token]) for place, token in enumerate(tokens))
        assert reply["logprob"] == pytest.approx(whole, abs=1e-3)


@pytest.mark.slow
def test_a_reply_ends_at_the_end_token_though_it_pads_the_others(folder) -> None:
    found = draw(folder, asks(60), max_tokens=80)
    ended = [reply for reply in found if reply["stop"] == "stop"]
    cut = [reply for reply in found if reply["stop"] == "length"]
    assert ended
    assert cut
    assert all(reply["tokens"] == 80 for reply in cut)
    assert any(reply["tokens"] < 80 for reply in ended)
    assert all("<|im_end|>" not in reply["text"] for reply in found)


def test_no_temperature_takes_the_likeliest_token(folder, model) -> None:
    found = draw(folder, asks(3), temperature=0.0, max_tokens=1)
    best = float(first_token_p(model, folder).log().max())
    assert [reply["logprob"] for reply in found] == pytest.approx([best] * 3, abs=1e-4)


def test_a_prompt_that_leaves_no_room_is_told_and_costs_no_other(folder) -> None:
    long = (Message("user", "basil " * 400),)
    found = draw(folder, [*asks(1), *asks(1, long)])
    assert "text" in found[0]
    assert "above the 512 of the model" in found[1]["error"]


def test_a_model_without_a_template_is_refused(folder, tmp_path) -> None:
    bare = save_chat_model(tmp_path / "bare")
    for path in bare.glob("*template*"):
        path.unlink()
    values = json.loads((bare / "tokenizer_config.json").read_text())
    values.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="no chat template"):
        draw(bare, asks(1))


def test_a_run_that_goes_on_writes_the_same_bytes(folder, tmp_path, monkeypatch) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([f"question {number}" for number in range(7)]))

    def run(name: str):
        asked = SampleConfig(
            prompts=str(prompts),
            model=str(folder),
            output=tmp_path / name,
            draw=DrawConfig(num_responses=2, max_tokens=6),
            sampler=SamplerConfig(batch_size=5),
        )
        return sample(asked).place

    whole = run("whole.jsonl")
    from rewardlab.gold import kept_results

    add, left = kept_results.Kept.add, [2]

    def ending(self, results):
        add(self, results)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(kept_results.Kept, "add", ending)
    with pytest.raises(KeyboardInterrupt):
        run("resumed.jsonl")
    resumed = run("resumed.jsonl")
    assert resumed.rows.read_bytes() == whole.rows.read_bytes()
    assert resumed.twin.read_bytes() == whole.twin.read_bytes()
    assert all(len(row.responses) == 2 for row in read_gold_rows(resumed.rows))


@pytest.mark.slow
def test_replies_to_one_prompt_share_its_computation_and_are_the_same(folder, monkeypatch) -> None:
    several = [*asks(4), *asks(3, OTHER), *asks(2)]
    alone = [draw(folder, [ask])[0] for ask in several]
    widths: list[tuple[int, ...]] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)  # transformers looks at what it takes
    def noting(self, input_ids=None, **how):
        widths.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **how)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noting)
    together = draw(folder, several)
    assert [reply["text"] for reply in together] == [reply["text"] for reply in alone]
    assert [reply["logprob"] for reply in together] == pytest.approx([one["logprob"] for one in alone], abs=1e-3)
    longest = max(len(rendered(folder)), len(rendered(folder, OTHER)))
    assert widths[:2] == [(3, longest - 1), (9, 1)], "each prompt once, then a token of each reply at a time"


def test_a_prompt_that_the_template_refuses_costs_no_other(folder, tmp_path) -> None:
    picky = tmp_path / "picky"
    shutil.copytree(folder, picky)
    tokenizer = AutoTokenizer.from_pretrained(picky)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    tokenizer.save_pretrained(picky)
    system, half = (Message("system", "Be brief."), *PROMPT), (Message("user", "half \ud83d"),)
    refused, broken, answered = draw(picky, [*asks(1, system), *asks(1, half), *asks(1)])
    assert "refuses a prompt with roles [system, user]: no system turns" in refused["error"]
    assert "half of a surrogate pair" in broken["error"]
    assert answered["text"] == draw(folder, asks(1))[0]["text"]


def test_a_model_that_computes_no_numbers_gives_no_replies(folder, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "nan")
    (reply,) = draw(tmp_path / "nan", asks(1))
    assert "no finite log-probabilities" in reply["error"]


def test_another_model_in_the_same_folder_is_noticed(folder, tmp_path) -> None:
    changing = tmp_path / "model"
    shutil.copytree(folder, changing)
    prompts = tmp_path / "prompts.json"
    prompts.write_text('["question"]')

    def run(**more):
        draws = DrawConfig(num_responses=2, max_tokens=6)
        output = tmp_path / "samples.jsonl"
        return sample(SampleConfig(prompts=str(prompts), model=str(changing), output=output, draw=draws, **more))

    first = run().place.rows.read_text()
    model = AutoModelForCausalLM.from_pretrained(changing)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(changing)
    with pytest.raises(ConfigError, match="is not the model that .* was drawn from"):
        run()
    assert run(overwrite=True).place.rows.read_text() != first
    assert run().was_complete


def test_a_reward_model_does_not_reply(folder, tmp_path) -> None:
    """Its language-model head would be random, and so would be the replies."""
    judge = tmp_path / "reward"
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(judge)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).exists():
            shutil.copy(folder / name, judge)
    with pytest.raises(ModelError, match=r"cannot reply: its files have no lm_head\.weight\. Name the language model"):
        draw(judge, asks(1))
    (judge / "reward_spec.json").write_text("{}")
    with pytest.raises(ModelError, match="is a reward model, which cannot reply"):
        draw(judge, asks(1))
    whole = tmp_path / "tied"  # embeddings that are tied give a reward model all weights that reply
    shutil.copytree(folder, whole)
    (whole / "reward_spec.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a reward model, which cannot reply\. Name the language model"):
        draw(whole, asks(1))


def test_arguments_of_the_template_reach_it_and_decide_the_reply(folder, tmp_path) -> None:
    told = shutil.copytree(folder, tmp_path / "told")
    template = AutoTokenizer.from_pretrained(folder).chat_template
    (told / "chat_template.jinja").write_text(template + "{% if enable_thinking is false %}quiet{% endif %}")
    plain, quiet = (draw(told, asks(1), **how)[0] for how in ({}, {"template_arguments": ("enable_thinking=false",)}))
    assert quiet["prompt_tokens"] > plain["prompt_tokens"]
    with pytest.raises(ModelError, match="--template-arguments loud: the chat template of .* does not mention it"):
        draw(told, asks(1), template_arguments=("loud=true",))


def test_replies_of_other_arguments_are_not_taken_over(folder, tmp_path) -> None:
    told = shutil.copytree(folder, tmp_path / "told")
    template = AutoTokenizer.from_pretrained(folder).chat_template
    (told / "chat_template.jinja").write_text(template + "{% if tone %}{{ tone }}{% endif %}")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["yes", "no"]))

    def drawn(*arguments: str, overwrite: bool = False) -> list[int]:
        how = DrawConfig(max_tokens=4, template_arguments=arguments)
        found = sample(
            SampleConfig(
                prompts=str(prompts), model=str(told), output=tmp_path / "s.jsonl", draw=how, overwrite=overwrite
            )
        )
        return [facts["prompt_tokens"] for row in read_gold_rows(found.place.rows) for facts in row.samples]

    dry = drawn("tone=dry")
    with pytest.raises(ConfigError, match="template_arguments"):
        drawn()
    bare = drawn(overwrite=True)
    assert all(few < many for few, many in zip(bare, dry, strict=True))
    assert drawn("tone=dry", overwrite=True) == dry
