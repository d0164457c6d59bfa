"""Layout and renderer on real, long, multi-turn rows: what random tokens may not show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common import make_model, make_tokenizer, shared_data
from harness.in_memory import load_preferences
from rewardlab.batch import pack
from rewardlab.core.types import TokenGroup
from rewardlab.data.config import ReadingConfig, RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.data.token_report import tokenize
from rewardlab.score import score_groups

pytestmark = pytest.mark.shared_data


def groups_of(name: str, count: int, max_length: int) -> tuple[list[TokenGroup], object]:
    path = shared_data(name)
    loaded = load_preferences(
        [str(path)], split="test", reading=ReadingConfig(max_drop_fraction=1.0), seed=0, limit=count
    )
    # A tokenizer of bytes: three to four times as many tokens as usual, so nearly every prompt is cut.
    return tokenize(
        loaded.preferences,
        build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=max_length)),
        max_drop_fraction=1.0,
        name="real rows",
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", ["dev/qa_feedback.test.jsonl.gz", "dev/hh_helpful.test.jsonl.gz", "dev/kwise.gsm8k.test.jsonl.gz"]
)
def test_real_rows_cut_to_512_tokens_score_the_same_shared_or_alone(name):
    groups, report = groups_of(name, 24, 512)
    assert groups
    assert report.truncated_replies > 0
    assert report.longest <= 512
    model = make_model("llama")
    together = np.concatenate(score_groups(model, groups, budget=6000))
    model.layout = "unshared"
    alone = np.concatenate([np.concatenate(score_groups(model, [group], budget=6000)) for group in groups])
    assert np.abs(together - alone).max() <= 1e-5 * max(1, np.abs(alone).max())


@pytest.mark.slow
def test_siblings_of_which_one_kept_more_of_the_prompt_do_not_see_each_other():
    groups, report = groups_of("dev/qa_feedback.test.jsonl.gz", 40, 512)
    assert report.prompts_differ_after_cut > 0
    model = make_model("llama")
    for group in groups:
        if len(set(group.truncated_tokens)) == 1:
            continue
        with torch.no_grad():
            scores = model(pack([group]))
            other = TokenGroup(
                preference_id="", source="", prompt_key="", shared=group.shared,
                suffixes=(group.suffixes[0], group.suffixes[1][::-1].copy()), prompt_tokens=group.prompt_tokens,
                truncated_tokens=group.truncated_tokens, comparisons=(),
            )  # fmt: skip
            changed = model(pack([other]))
        assert abs(float(scores[0] - changed[0])) <= 1e-5
        assert abs(float(scores[1] - changed[1])) > 1e-5
