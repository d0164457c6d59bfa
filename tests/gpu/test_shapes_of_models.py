"""The kernels of CUDA in the shapes of real models' heads: wide heads, windows, soft caps, sinks, narrower values.

A kernel may refuse a shape, since devices differ; it may not be wrong. Skipped where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, Gemma2Config, Gemma3TextConfig, GptOssConfig, MiniCPM3Config, MistralConfig

from rewardlab.model.attention import leave_out_cudnn
from rewardlab.model.attention_backends import segments, unavailable
from rewardlab.model.attention_formula import Formula, formulas_of
from rewardlab.model.compute import choose_compute, trial
from rewardlab.model.config import ComputeConfig
from rewardlab.model.prompt_layout import PromptLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SHAPES = {
    "mistral": lambda: MistralConfig(num_attention_heads=32, num_key_value_heads=8, sliding_window=4096),
    "gemma2": lambda: Gemma2Config(num_attention_heads=16, num_key_value_heads=8, head_dim=256),
    "gemma3": lambda: Gemma3TextConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=256),
    "gpt_oss": lambda: GptOssConfig(num_attention_heads=64, num_key_value_heads=8, head_dim=64),
    "deepseek_v2": lambda: DeepseekV2Config(num_attention_heads=16, num_key_value_heads=16),
    "minicpm3": lambda: MiniCPM3Config(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["mask", "varlen", "flash", "flex"])
@pytest.mark.parametrize("family", SHAPES)
def test_no_kernel_is_wrong_in_the_shape_of_a_model(family, backend, dtype):
    config = SHAPES[family]()
    formula = formulas_of(config)[0]
    if reason := unavailable(backend, device=CUDA, dtype=dtype, formula=formula, train=True):
        pytest.skip(f"{backend}: {reason}")
    reason = trial(backend, config, device=CUDA, dtype=dtype, train=True)
    if reason.startswith("it failed here"):
        pytest.skip(f"{backend}: {reason}")
    assert reason == ""


@pytest.mark.parametrize("family", ["mistral", "gemma3", "deepseek_v2", "minicpm3"])
def test_the_first_choice_for_plain_logits_is_a_ragged_kernel_on_ampere_and_later(family):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs an Ampere GPU or a later one")
    lines: list[str] = []
    chosen = choose_compute(ComputeConfig(), SHAPES[family](), device=CUDA, dtype=torch.bfloat16, log=lines.append)
    assert chosen["attention_backend"] in ("varlen", "flash"), lines


@pytest.mark.parametrize(("heads", "grouped"), [(16, 2), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_rows_never_have_all_their_logits_in_memory(heads, grouped, dtype):
    leave_out_cudnn(CUDA)
    length = 4096
    layout = PromptLayout([(length, (64, length))])
    query, key, value = (
        torch.randn(1, count, layout.num_tokens, 64, device=CUDA, dtype=dtype).requires_grad_()
        for count in (heads, grouped, grouped)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    segments(query, key, value, layout, Formula()).float().sum().backward()
    logits_of_the_last_reply = heads * length * 2 * length * 4
    assert torch.cuda.max_memory_allocated() - before < logits_of_the_last_reply
