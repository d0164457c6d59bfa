"""Law 3: layout does not change scores, and neither do siblings. Law 4: scores are read at an index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common import CONFIGS, arithmetic, make_groups, make_model, set_layout
from rewardlab import score as score_module
from rewardlab.batch import PackedBatch, pack
from rewardlab.core.errors import ModelError
from rewardlab.core.types import TokenGroup
from rewardlab.model import attention
from rewardlab.model.config import ModelConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout, require_sound_layout
from rewardlab.model.reward import RewardModel
from rewardlab.model.selftest import EXACT, distance_from_padded, layout_error, leak, measured_again
from rewardlab.score import Scorer, score_groups
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.settings.config import LossConfig

FAMILIES = sorted(CONFIGS)
LOSS = LossConfig(regularization_lambda=0.1, score_regularization_lambda=0.05, center_lambda=0.02)


def one_by_one(model: RewardModel, groups: list[TokenGroup]) -> torch.Tensor:
    """The slow, obvious scores: every conversation in a forward pass of its own, through the padded path."""
    set_layout(model, "padded")
    alone = [
        replace(
            group,
            shared=np.zeros(0, np.int32),
            suffixes=(group.conversation(reply),),
            comparisons=(),
            ranking=None,
            prompt_tokens=(0,),
            truncated_tokens=(0,),
        )
        for group in groups
        for reply in range(group.num_replies)
    ]
    with torch.no_grad():
        return torch.cat([model(pack([group])) for group in alone])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
def test_every_layout_gives_the_score_of_a_conversation_alone(family, dtype, tolerance, layout):
    groups = make_groups(5, replies=4)
    model = make_model(family, dtype=dtype)
    with arithmetic(dtype), torch.no_grad():
        reference = one_by_one(model, groups)
        set_layout(model, layout)
        scores = model(pack(groups, share=layout != "unshared"))
    assert reference.std() > 0.1
    assert (scores - reference).abs().max() <= tolerance * max(1, reference.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_sharing_prompts_does_not_change_gradients(family, dtype, tolerance):
    groups = make_groups(5, replies=4)
    gradients = []
    for layout in ("shared", "unshared", "padded"):
        model = set_layout(make_model(family, dtype=dtype), layout)
        batch = pack(groups, share=layout != "unshared")
        with arithmetic(dtype):
            (preference_loss(model(batch), batch, LOSS) / total_weight(batch)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert (gradients[0] - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_errs_at_most_twice_as_much_as_the_padded_path(family, dtype):
    groups = make_groups(24, replies=3, seed=3)
    model = make_model(family)
    reference = one_by_one(model, groups)
    errors = {}
    for layout in ("padded", "shared"):
        set_layout(model, layout)
        model.compute_dtype = dtype
        with torch.no_grad():
            errors[layout] = (model(pack(groups)) - reference).abs()
        model.compute_dtype = torch.float32
    assert errors["padded"].mean() > 0
    assert errors["shared"].mean() <= 2 * errors["padded"].mean()
    assert errors["shared"].max() <= 2 * errors["padded"].max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replies_whose_scores_half_precision_could_not_tell_apart_do_not_tie(dtype):
    """Law 5: head, differences and loss are float32 whatever the backbone computes in."""
    groups = make_groups(12, seed=3)
    batch, model = pack(groups), make_model("llama")
    model.compute_dtype = dtype
    wanted_R = 8 + 0.001 * torch.randperm(24, generator=torch.Generator().manual_seed(0)).double()
    assert len(wanted_R.to(dtype).unique()) <= 5
    with torch.no_grad(), torch.autocast("cpu", dtype):
        states_RW = model.final_states(batch).double()
        model.head.weight.copy_(torch.linalg.lstsq(states_RW, wanted_R[:, None]).solution.T)
        scores_R = model(batch)
        loss = preference_loss(scores_R, batch, LOSS)
    evaluated_R = torch.from_numpy(np.concatenate(score_groups(model, groups, budget=2000)))
    for found_R in (scores_R, evaluated_R):
        assert found_R.tolist() == pytest.approx(wanted_R.tolist(), abs=1e-4)
    assert loss.item() == pytest.approx(preference_loss(wanted_R, batch, LOSS).item(), rel=1e-5)


def test_left_padding_gives_the_same_score_at_the_given_index():
    model = set_layout(make_model("llama", dtype=torch.float64), "padded")
    (group,) = make_groups(1)
    reference = one_by_one(model, [group])[0]
    ids = torch.tensor(group.conversation(0), dtype=torch.long)
    padded = torch.cat([torch.full((5,), 2), ids])[None]
    mask = torch.cat([torch.zeros(5), torch.ones(len(ids))])[None].long()
    positions = torch.cat([torch.zeros(5), torch.arange(len(ids))])[None].long()
    hidden = model.backbone(input_ids=padded, attention_mask=mask, position_ids=positions).last_hidden_state
    assert torch.allclose(model.head(hidden[0, -1]), reference, atol=1e-10)


def test_siblings_and_neighbours_do_not_change_a_score():
    model = make_model("llama", dtype=torch.float64)
    groups = make_groups(4, replies=3, seed=1)
    with torch.no_grad():
        together = model(pack(groups))
        first = model(pack(groups[:1]))
        reordered = model(pack([groups[2], groups[0], groups[3], groups[1]]))
    count, skip = groups[0].num_replies, groups[2].num_replies
    assert torch.allclose(together[:count], first, atol=1e-12)
    assert torch.allclose(together[:count], reordered[skip : skip + count], atol=1e-12)


def test_scores_do_not_depend_on_the_token_budget():
    model = make_model("qwen2")
    groups = make_groups(12, replies=4)
    reference = np.concatenate(score_groups(model, groups, budget=10_000))
    for budget in (40, 77, 200):
        assert np.abs(np.concatenate(score_groups(model, groups, budget=budget)) - reference).max() < 1e-5


@pytest.fixture
def packed(monkeypatch) -> list[PackedBatch]:
    """What scoring has put into rows so far."""
    batches: list[PackedBatch] = []

    def watched(*arguments, **named) -> PackedBatch:
        batches.append(pack(*arguments, **named))
        return batches[-1]

    monkeypatch.setattr(score_module, "pack", watched)
    return batches


def rows_of_few_prompts(count: int, seed: int = 0) -> list[TokenGroup]:
    """Pairs of replies to a third as many prompts; every third one has a reply of the row before."""
    groups = make_groups(count, seed=seed)
    rows = [replace(one, shared=groups[number % (count // 3)].shared) for number, one in enumerate(groups)]
    for number in range(count // 3, count, 3):
        prompt = rows[number].shared
        rows[number - count // 3] = replace(
            rows[number - count // 3], suffixes=(rows[number].suffixes[1], groups[number].suffixes[0])
        )
        assert np.array_equal(rows[number - count // 3].shared, prompt)
    return [replace(one, prompt_tokens=(len(one.shared),) * one.num_replies) for one in rows]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [40, 100, 10_000])
def test_a_prompt_of_several_groups_is_computed_once_and_changes_no_score(packed, family, budget):
    groups = rows_of_few_prompts(12)
    model = make_model(family)
    alone = [score_groups(model, [group], budget=10_000)[0] for group in groups]
    packed.clear()
    together = score_groups(model, groups, budget=budget)
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one - other).max() < 1e-5
    computed = sum(batch.num_tokens for batch in packed)
    assert computed < 0.9 * sum(group.num_tokens for group in groups)
    if budget == 10_000:
        conversations = {tuple(group.conversation(k).tolist()) for group in groups for k in range(group.num_replies)}
        prompts = {tuple(group.shared.tolist()) for group in groups}
        own = sum(len(group.suffixes[k]) for group in groups for k in range(group.num_replies))
        assert sum(batch.num_replies for batch in packed) == len(conversations)
        assert computed <= sum(map(len, prompts)) + own


@pytest.mark.parametrize("layout", ["unshared", "padded"])
def test_where_prompts_are_not_shared_groups_stay_as_they_are(packed, layout):
    groups = rows_of_few_prompts(12)
    score_groups(make_model("llama", layout=layout), groups, budget=10_000)
    assert sum(batch.num_replies for batch in packed) == sum(group.num_replies for group in groups)


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
@pytest.mark.parametrize("budget", [16, 60, 300])
def test_a_group_above_the_budget_is_scored_in_pieces_that_keep_to_it(packed, layout, budget):
    model = make_model("llama", layout=layout)
    groups = [*make_groups(6, replies=40, seed=3), *make_groups(9, replies=4, seed=4)]
    whole = score_groups(model, groups, budget=100_000)
    assert len(packed) == 1
    packed.clear()
    found = score_groups(model, groups, budget=budget)
    assert [len(scores) for scores in found] == [group.num_replies for group in groups]
    assert np.abs(np.concatenate(found) - np.concatenate(whole)).max() < 1e-5
    sizes = [batch.padded(0)[0].numel() if layout == "padded" else batch.num_tokens for batch in packed]
    above = [size for size in sizes if size > budget]
    assert sorted(above) == sorted(length for group in groups for length in group.lengths if length > budget)
    assert all(batch.num_replies == 1 for batch, size in zip(packed, sizes, strict=True) if size > budget)
    if layout != "padded":
        within = sum(sizes) - sum(above)
        assert len(sizes) - len(above) <= 2 * within / budget + 1, "pieces share rows as whole groups do"


@pytest.mark.slow
def test_a_thousand_replies_to_one_prompt_need_no_more_than_the_budget(packed, renderer):
    scorer = Scorer(make_model("llama"), renderer)
    prompt, replies = [{"role": "user", "content": "soil " * 12}], [f"number {n}" for n in range(1000)]
    scores = scorer.score_replies(prompt, replies)
    assert max(batch.num_tokens for batch in packed) <= scorer.token_budget == 8192
    few = scorer.score_replies(prompt, replies[::100])
    assert np.abs(np.array(scores[::100]) - few).max() < 1e-5
    assert len(set(scores)) > 900, "the replies are told apart"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_tests_pass_for_a_sound_model(family):
    config = CONFIGS[family]()
    assert layout_error(config, disk_class_of(config)) <= EXACT
    assert leak(make_model(family)) <= EXACT
    assert distance_from_padded(make_model(family)) <= EXACT
    require_sound_layout(make_model(family), print)


@pytest.fixture
def siblings_see_each_other(monkeypatch) -> None:
    """Attention that forgets which reply a token belongs to."""

    def leaky(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **arguments):
        arguments["prompt_layout"].num_calls += 1
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, leaky)


@pytest.mark.usefixtures("siblings_see_each_other")
def test_the_leak_test_catches_a_model_in_which_siblings_see_each_other():
    model = make_model("llama")
    assert leak(model) > 1e-3
    with pytest.raises(ModelError, match="changing one reply moves the score of another"):
        require_sound_layout(model, print)


@pytest.mark.usefixtures("siblings_see_each_other")
def test_a_class_whose_shared_rows_are_not_exact_is_padded_and_refused_where_sharing_is_asked_for():
    config, said = CONFIGS["llama"](), []
    disk_class = disk_class_of(config)
    assert layout_error(config, disk_class) > 1e-3
    assert choose_layout(config, disk_class, ModelConfig(), max_length=64, share=True, log=said.append) == "padded"
    assert "padded, because the layout self-test is off by" in said[0]
    asked = ModelConfig(attention="shared")
    with pytest.raises(ModelError, match="--attention shared is not exact for .*: the layout self-test is off by"):
        choose_layout(config, disk_class, asked, max_length=64, share=True, log=said.append)


def test_a_failure_that_goes_away_is_told_as_one_of_the_machine():
    said, found = [], iter([3e-5, 2e-7, 1e-7])
    assert measured_again(lambda: next(found), EXACT, "the test", said.append) == 2e-7
    assert "the test was off by 3.0e-05, then by 2.0e-07" in said[0]
    assert "processor or memory" in said[0]


@pytest.mark.parametrize("later", [[3e-5, 3e-5], [2e-7, 3e-5], [float("nan"), 1e-7]])
def test_a_failure_that_stays_is_one(later):
    said, found = [], iter([3e-5, *later])
    assert measured_again(lambda: next(found), EXACT, "the test", said.append) == 3e-5
    assert not said


def test_a_model_that_ignores_the_layout_is_found_out():
    model = make_model("llama")
    model.backbone.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="0 times for 2 layers"):
        model(pack(make_groups(2)))


@pytest.mark.parametrize(
    ("family", "changes", "max_length", "reason"),
    [
        ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, 128, "linear_attention carry state"),
        ("llama", {"attention_chunk_size": 64}, 128, "attention chunk of 64"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            128,
            "several dimensions",
        ),
    ],
)
def test_models_for_which_sharing_is_not_exact_are_refused_by_name(family, changes, max_length, reason):
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    lines = []
    layout = choose_layout(
        config, disk_class_of(config), ModelConfig(), max_length=max_length, share=True, log=lines.append
    )
    assert layout == "padded"
    assert reason in lines[0]
    with pytest.raises(ModelError, match="--attention shared is not exact"):
        choose_layout(
            config,
            disk_class_of(config),
            ModelConfig(attention="shared"),
            max_length=max_length,
            share=True,
            log=lines.append,
        )


def test_windows_longer_than_the_limit_do_not_matter():
    for family in ("gemma2", "gemma3"):
        config = CONFIGS[family]()
        assert (
            choose_layout(
                config, disk_class_of(config), ModelConfig(attention="shared"), max_length=256, share=True, log=print
            )
            == "shared"
        )


def test_a_model_outside_the_attention_registry_takes_the_padded_path_and_scores_as_plain_transformers_does():
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=384, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.3)
    lines = []
    layout = choose_layout(config, disk_class_of(config), ModelConfig(), max_length=64, share=True, log=lines.append)
    assert layout == "padded"
    assert "it does not use the attention registry" in lines[0]
    model = make_model(config=config, layout="padded")
    groups = make_groups(4)
    with torch.no_grad():
        together = model(pack(groups))
        alone = [
            model.head(model.backbone(torch.tensor(group.conversation(reply))[None].long()).last_hidden_state[0, -1])
            for group in groups
            for reply in range(group.num_replies)
        ]
    assert together.std() > 0.1
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("ending", [[], [2], [2, 2]])
def test_the_reading_position_does_not_move_when_pad_is_eos_or_eos_is_inside(ending):
    model = make_model("llama", dtype=torch.float64)
    draw = np.random.default_rng(0)
    base = draw.integers(3, 300, 8)
    token_ids = np.concatenate([base[:4], [2], base[4:], np.array(ending, int)]).astype(np.int32)
    group = TokenGroup(
        preference_id="",
        source="",
        prompt_key="",
        shared=token_ids[:2],
        suffixes=(token_ids[2:], token_ids[2:5]),
        prompt_tokens=(2, 2),
        truncated_tokens=(0, 0),
        comparisons=(),
    )
    with torch.no_grad():
        packed = model(pack([group]))[0]
        set_layout(model, "padded")
        hidden = model.backbone(input_ids=torch.tensor(token_ids, dtype=torch.long)[None]).last_hidden_state
        assert torch.allclose(packed, model.head(hidden[0, -1]), atol=1e-10)
