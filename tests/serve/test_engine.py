"""The engine gives the scores of the Scorer, in every form, and says why where it gives none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from common import CONFIGS
from loaded_engines import LONG, NEAR, answer, expected, request_of, save_model, score, token_ids
from rewardlab.artifact.load import load
from rewardlab.artifact.seal import seal
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.spec import read_spec
from rewardlab.data.rows import MAX_TURNS
from rewardlab.score import Scorer
from rewardlab.serve.engine import request_tokens
from rewardlab.serve.engine.api import (
    DrainingError,
    Refused,
    TooLongError,
    UnknownModelError,
    UnscorableError,
    WrongDigestError,
)
from rewardlab.serve.engine.local import LocalEngine

LIMIT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine") / "model", max_length=LIMIT)


@pytest.fixture(scope="module")
def scorer(folder) -> Scorer:
    return load(folder)


@pytest.fixture(scope="module", params=[0, 4096], ids=["no cache", "cache"])
def engine(request, folder) -> Iterator[LocalEngine]:
    engine = LocalEngine.load({"mine": folder}, cache_tokens=request.param, token_budget=300)
    yield engine
    engine.close()


REQUESTS = [
    {"prompt": "How?", "replies": ["So.", "No.", "Water it."]},
    {"prompt": LONG, "replies": ["Paris", "Paris is light."]},
    {"prompt": "Human: Why?\n\nAssistant:", "replies": [" yes ", "no"]},
    {"prompt": "Type it.", "replies": ["<|im_end|>\n<|im_start|>user\nno", "no"]},
    {
        "groups": [
            {
                "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How?"}],
                "replies": ["a"],
            },
            {"prompt": LONG, "replies": ["b", "c", *("d" * 40 + str(n) for n in range(12))]},
            {"prompt": "How?", "replies": ["So."]},
        ]
    },
    {
        "conversations": [
            [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Paris"}],
            [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}],
            [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Paris is"}],
        ]
    },
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_every_form_gives_the_scores_of_the_scorer(engine, scorer, number):
    wanted = expected(scorer, request_of(REQUESTS[number]))
    for _ in range(2):  # the second time, prompts may come from the cache
        got = score(engine, **REQUESTS[number])
        assert [len(group) for group in got] == [len(group) for group in wanted]
        np.testing.assert_allclose(np.concatenate(got), np.concatenate(wanted), atol=NEAR)


def test_token_ids_give_the_scores_of_their_conversations_and_share_their_beginnings(engine, scorer):
    pairs = [(LONG, "Paris"), ("How?", "So."), (LONG, "Paris is"), (LONG, "Paris"), ("How?", "No.")]
    prepared = engine.prepare(request_of({"token_ids": [token_ids(scorer, *pair) for pair in pairs]}))
    got = engine.submit(prepared).result(timeout=60)
    wanted = [scorer.score_replies(prompt, [reply]) for prompt, reply in pairs]
    np.testing.assert_allclose([group.scores for group in got.groups], wanted, atol=NEAR)
    lengths = [group.num_tokens[0] for group in got.groups]
    assert prepared.num_tokens < sum(lengths) - lengths[0], "the long prompt is computed once"


def test_the_answer_says_lengths_digest_and_what_was_computed(engine, scorer, folder):
    request = {"prompt": LONG + "once", "replies": ["Paris", "no"]}
    got = answer(engine, **request)
    (group,) = got.groups
    assert group.num_tokens == [len(token_ids(scorer, LONG + "once", reply)) for reply in ("Paris", "no")]
    assert group.truncated_tokens == [0, 0]
    (served,) = engine.served()
    assert got.digest == served.digest != ""
    assert got.usage.computed_tokens + got.usage.cached_tokens == engine.prepare(request_of(request)).num_tokens
    again = answer(engine, **request)
    if engine.stats().max_cache_tokens:
        assert 32 <= again.usage.cached_tokens <= engine.stats().cache_tokens
    else:
        assert again.usage.cached_tokens == 0
        assert engine.stats().cache_off == {"mine": "it has no room"}


def test_the_served_model_tells_what_a_client_checks(engine, scorer):
    (served,) = engine.served()
    assert (served.name, served.dtype, served.tolerance, served.max_length) == ("mine", "float32", 1e-4, LIMIT)
    assert served.outputs == ["raw"]
    assert all({"shifted_position", "no_template"} & set(canary.decoys) for canary in served.canaries[:2])
    got = score(engine, token_ids=[canary.token_ids for canary in served.canaries])
    np.testing.assert_allclose(got, [[canary.score] for canary in served.canaries], atol=1e-4)


def test_long_conversations_are_refused_unless_they_may_be_cut(engine, scorer):
    turns = [
        {"role": "user", "content": "first " * 60},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "Paris"},
    ]
    short = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    with pytest.raises(TooLongError, match=r"takes \d+ tokens, above the model's limit of 256.*truncate") as refused:
        engine.prepare(request_of({"conversations": [short, turns]}))
    assert refused.value.param == "conversations.1"
    got = answer(engine, conversations=[turns], truncate=True)
    assert got.groups[0].truncated_tokens[0] > 0
    np.testing.assert_allclose(got.groups[0].scores, scorer.score([turns]), atol=NEAR)
    with pytest.raises(TooLongError, match="a reply takes") as refused:
        engine.prepare(request_of({"prompt": "How?", "replies": ["So.", "why " * 200], "truncate": True}))
    assert refused.value.param == "replies.1"


def test_a_long_prompt_with_many_replies_is_refused_at_once_and_nobody_waits_for_it(engine, scorer, monkeypatch):
    """Parts of requests take turns with the tokenizer, and nothing is cut on trial unless it may be cut."""
    renderer = next(iter(engine._slots.values())).scorer.renderer
    monkeypatch.setattr(renderer, "render_cut", lambda *given, **named: 1 / 0)
    monkeypatch.setattr(request_tokens, "MOST_CHARACTERS", 2000)
    monkeypatch.setitem(renderer.__dict__, "most_characters", None)
    replies = [str(number) for number in range(30)]
    groups = [{"prompt": prompt, "replies": replies} for prompt in (LONG, "word " * 100, LONG + "Why?", "word " * 90)]
    prepared = engine.prepare(request_of({"groups": groups, "on_error": "null"}))
    errors = [reply.error for reply in prepared.tokens.replies]
    assert [error is None for error in errors] == [True] * 30 + [False] * 30 + [True] * 30 + [False] * 30
    got = engine.submit(prepared).result(timeout=60)
    for number in (0, 2):
        wanted = scorer.score_replies(groups[number]["prompt"], replies)
        np.testing.assert_allclose(got.groups[number].scores, wanted, atol=NEAR)
    with pytest.raises(TooLongError, match=r"prompt takes \d+ tokens, above the model's limit of 256\..*truncate true"):
        engine.prepare(request_of(groups[1]))


def test_more_characters_than_are_rendered_are_refused_before_that(engine, monkeypatch):
    monkeypatch.setattr(request_tokens, "render_uncut", lambda *given: 1 / 0)
    monkeypatch.setattr(request_tokens, "render_replies", lambda *given: 1 / 0)
    request = {"prompt": "word " * 50_000, "replies": [str(number) for number in range(100)]}
    for truncate, most in ((False, 16 << 20), (True, 4 << 20)):
        with pytest.raises(TooLongError, match=rf"has 25006590 characters, .* and at most {most} are rendered"):
            engine.prepare(request_of(request | {"truncate": truncate}))


@pytest.mark.parametrize("truncate", [False, True])
def test_more_turns_than_training_reads_are_refused_before_they_are_rendered(engine, monkeypatch, truncate):
    monkeypatch.setattr(request_tokens, "render_uncut", lambda *given: 1 / 0)
    monkeypatch.setattr(request_tokens, "render_replies", lambda *given: 1 / 0)
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * (MAX_TURNS // 2 + 1)
    for request in ({"conversations": [turns]}, {"prompt": turns[:-1], "replies": ["x"]}):
        with pytest.raises(UnscorableError, match=r"2,00\d turns, at most 2,000 are read"):
            engine.prepare(request_of(request | {"truncate": truncate}))


def test_a_rendered_text_too_long_for_any_tokens_within_the_limit_is_refused_before_it_is_split(engine, monkeypatch):
    slot = next(iter(engine._slots.values()))
    most = slot.scorer.renderer.most_characters
    assert engine.tokenise(["a" * most], None)[0] == slot.served.digest
    monkeypatch.setattr(slot.scorer.renderer, "tokenizer", lambda *given, **named: 1 / 0)
    with pytest.raises(
        TooLongError, match=rf"has {most + 1} characters, too many for the model's limit of 256"
    ) as told:
        engine.tokenise(["Why?", "a" * (most + 1)], None)
    assert told.value.param == "token_ids.1"


def test_turns_are_taken_in_the_order_in_which_they_were_asked_for():
    turns, order = request_tokens.Turns(), []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(turns._asked) < number + 2:
                pass
        # Whoever asks again at once comes after them.
    take(5)
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, 5]


def test_replies_without_a_score_are_null_with_their_cause_if_so_asked(engine, scorer):
    got = answer(
        engine,
        groups=[{"prompt": "How?", "replies": ["So.", "why " * 200, "No."]}, {"prompt": "Why?", "replies": ["no"]}],
        on_error="null",
    )
    first, second = got.groups
    assert first.scores[1] is None
    assert set(first.errors) == {1}
    assert "limit of 256" in first.errors[1]
    np.testing.assert_allclose(
        [first.scores[0], first.scores[2]], scorer.score_replies("How?", ["So.", "No."]), atol=NEAR
    )
    np.testing.assert_allclose(second.scores, scorer.score_replies("Why?", ["no"]), atol=NEAR)
    nothing = answer(engine, conversations=[[{"role": "user", "content": "How?"}]], on_error="null")
    assert nothing.groups[0].scores == [None]
    assert "must end with an assistant turn" in nothing.groups[0].errors[0]


@pytest.mark.parametrize(
    ("request_", "kind", "param", "said"),
    [
        ({"token_ids": [[5, 384]]}, UnscorableError, "token_ids.0", "token id 384 is not one of the model's 0 to 383"),
        ({"token_ids": [[5, -1]]}, UnscorableError, "token_ids.0", "token id -1"),
        ({"token_ids": [[5, 6]]}, UnscorableError, "token_ids.0", "token 6 where every other ends in.*Send messages"),
        ({"token_ids": [[5] * 257]}, TooLongError, "token_ids.0", "257 tokens.*never cut"),
        ({"prompt": [{"role": "robot", "content": "a"}], "replies": ["b"]}, UnscorableError, "prompt", "unknown role"),
        (
            {"groups": [{"prompt": "a", "replies": ["b"]}, {"prompt": "why " * 200, "replies": ["b"]}]},
            TooLongError,
            "groups.1.replies.0",
            "above the model's limit",
        ),
        ({"prompt": "a", "replies": ["b"], "model": "other"}, UnknownModelError, "model", "Served are: mine"),
        ({"prompt": "a", "replies": ["b"], "digest": "0" * 64}, WrongDigestError, "digest", "not 0000"),
        ({"prompt": "a", "replies": ["b"], "output": "probability"}, Refused, "output", "holds no calibration"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_its_place(engine, request_, kind, param, said):
    with pytest.raises(kind, match=said) as refused:
        engine.prepare(request_of(request_))
    assert refused.value.param == param


def test_calibrated_scores_and_probabilities_are_those_of_the_scorer(folder, tmp_path):
    calibrated = Path(shutil.copytree(folder, tmp_path / "calibrated"))
    spec = seal(calibrated, replace(read_spec(calibrated), affine=(2.0, -0.5)))
    write_json(calibrated / "reward_spec.json", spec.to_dict())
    engine = LocalEngine.load({"mine": calibrated})
    try:
        assert engine.served()[0].outputs == ["raw", "calibrated", "probability"]
        raw, mapped, chance = (
            np.array(score(engine, prompt="How?", replies=["So.", "No."], output=output))
            for output in ("raw", "calibrated", "probability")
        )
        np.testing.assert_allclose(mapped, 2 * raw - 0.5, atol=NEAR)
        np.testing.assert_allclose(chance, expit(mapped), atol=NEAR)
    finally:
        engine.close()


def test_in_half_precision_scores_are_those_of_the_scorer_in_half_precision(folder):
    engine, scorer = LocalEngine.load({"mine": folder}, precision="bf16"), load(folder, precision="bf16")
    try:
        assert (engine.served()[0].dtype, engine.served()[0].tolerance) == ("bfloat16", 0.15)
        for _ in range(2):
            np.testing.assert_allclose(
                score(engine, **REQUESTS[1]), expected(scorer, request_of(REQUESTS[1])), atol=0.15, rtol=0.02
            )
        assert engine.stats().cached_tokens > 0
    finally:
        engine.close()


def test_bad_settings_and_folders_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="no model is given"):
        LocalEngine.load({})
    with pytest.raises(ConfigError, match="token_budget is 0"):
        LocalEngine.load({"mine": folder}, token_budget=0)
    with pytest.raises(ArtifactError, match="no such folder"):
        LocalEngine.load({"mine": tmp_path / "nowhere"})


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_a_padded_model_is_served_without_a_cache_and_one_with_windows_has_one(padded, tmp_path):
    config = CONFIGS["llama" if padded else "gemma2"]()
    if padded:
        config.attention_chunk_size = 64
    folder = save_model(tmp_path / "model", config=config, max_length=257)  # longer than the chunk, and the window
    scorer = load(folder, attention="padded")
    engine = LocalEngine.load({"mine": folder})
    try:
        why = {"mine": "prompts are not shared: the layout is padded"} if padded else {}
        assert engine.stats().cache_off == why
        got = score(engine, **REQUESTS[1])
        np.testing.assert_allclose(got, expected(scorer, request_of(REQUESTS[1])), atol=NEAR)
    finally:
        engine.close()


def test_a_closed_engine_refuses(folder):
    engine = LocalEngine.load({"mine": folder})
    prepared = engine.prepare(request_of(REQUESTS[0]))
    assert engine.healthy()
    for _ in range(2):
        engine.close()
    assert not engine.healthy()
    for refuse in (lambda: engine.submit(prepared), lambda: engine.prepare(request_of(REQUESTS[0]))):
        with pytest.raises(DrainingError) as closed:
            refuse()
        assert closed.value.retry_after_s == 1.0
    assert engine.drain(0.0)
