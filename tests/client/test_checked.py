"""A client takes no score of another model, whether by a fault, another rendering, or a swap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx2
import pytest
import stamina

from dialects_spoken import ENGINES, URL, as_text, during
from fake_engines import FakeOwn, FakeVllm, Model, number_of
from rewardlab.client import (
    AsyncRewardClient,
    CanaryError,
    ModelChangedError,
)
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.data.chat import to_messages
from rewardlab.rl import RewardScorer
from served import digest, expected, folder, renderer, spec, table, talks


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Attempts follow each other at once, and are as many as the client says."""
    with stamina.set_testing(True, attempts=5, cap=True):
        yield


@pytest.mark.parametrize("fault", ["sigmoid", "softmax", "zero_head", "shifted_position", "double_bos", "no_template"])
@pytest.mark.parametrize("engine", ["vllm classify", "sglang classify", "rewardlab"])
def test_a_server_with_a_fault_is_refused_under_its_name(engine: str, fault: str) -> None:
    fake = ENGINES[engine]()
    fake.model.fault = fault
    if isinstance(fake, FakeOwn):
        fake.digest = digest()
    with pytest.raises(CanaryError, match=f"wrong scores for .*({fault}).* Canary '") as refused:
        during(fake, lambda c: c.score(talks(1)), artifact=folder())
    assert f"({fault})" in refused.value.fault


def test_of_our_server_without_a_folder_the_faults_that_follow_from_the_score_are_named() -> None:
    for fault in ("sigmoid", "softmax", "zero_head"):
        fake = FakeOwn(table(fault=fault))
        with pytest.raises(CanaryError) as refused:
            during(fake, lambda c: c.connect())
        assert f"({fault})" in refused.value.fault


def test_half_precision_is_recognised_by_its_own_references() -> None:
    fake = FakeVllm(table(precision="bfloat16"))
    assert during(fake, lambda c: c.spec()).precision == "bfloat16"
    with pytest.raises(CanaryError, match="those of bfloat16, where float32 was expected"):
        during(fake, lambda c: c.spec(), precision="float32")


def test_of_both_half_precisions_the_nearer_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [
        replace(canary, references={"bfloat16": canary.score + 0.012, "float16": canary.score + 0.01})
        for canary in spec().canaries
    ]
    monkeypatch.setattr("rewardlab.client.checking._references", lambda *given: (halves, "auto"))
    for precision in ("float16", "bfloat16"):
        fake = FakeVllm(Model(spec=replace(spec(), canaries=halves), renderer=renderer(), precision=precision))
        assert during(fake, lambda c: c.spec()).precision == precision


def test_a_folder_without_references_for_half_precision_passes_within_its_tolerance() -> None:
    class Halved(Model):
        def score(self, token_ids: Sequence[int]) -> float:
            return 1.01 * super().score(token_ids)

    bare = replace(spec(), canaries=[replace(canary, references={}) for canary in spec().canaries])
    own = FakeOwn(Halved(spec=bare, renderer=renderer()), dtype="bfloat16")
    assert during(own, lambda c: c.spec()).precision == "bfloat16"


def test_decoys_that_our_server_tells_name_the_fault_without_a_folder() -> None:
    fake = FakeOwn(table(fault="shifted_position"), decoys=True)
    with pytest.raises(CanaryError, match="wrong scores for messages.*shifted_position"):
        during(fake, lambda c: c.connect())


@pytest.mark.parametrize("engine", ["vllm classify", "sglang classify"])
@pytest.mark.parametrize("first", ["503", "broken"])
def test_another_engine_that_was_away_is_checked_again_before_its_answers_are_believed(engine: str, first: str) -> None:
    fake = ENGINES[engine]()

    def restarting(path: str, body: Any) -> Any:
        fake.model.fault = "shifted_position"  # other weights come up
        if first == "503":
            return 503, "starting", {}
        raise httpx2.RemoteProtocolError("Server disconnected")

    async def bridged(connected: AsyncRewardClient) -> None:
        fake.first = [restarting]
        with pytest.raises(CanaryError, match="shifted_position"):
            await connected.score(talks(3))
        with pytest.raises(CanaryError):
            await connected.score(talks(3))  # nothing believes it later either
        fake.model.fault = None
        assert await connected.score(talks(3)) == expected(talks(3))
        asked = len(fake.asked)
        await connected.score(talks(3))
        assert len(fake.asked) == asked + 1, "once proved, it is not asked for its canaries again"

    during(fake, bridged)


def test_an_engine_that_is_away_during_the_second_check_is_asked_anew() -> None:
    fake = FakeVllm(table())

    def away(path: str, body: object) -> tuple[int, str, dict[str, str]]:
        return 503, "starting", {}

    async def bridged(connected: AsyncRewardClient) -> list[float]:
        # The request, its second attempt, and the canaries.
        fake.first = [away, lambda path, body: None, away]
        return await connected.score(talks(5))

    assert during(fake, bridged, max_batch=32) == expected(talks(5))
    rows = [len(body["input"]) for path, body in fake.asked if path == "/classify"]
    assert rows.count(5) == 3, "refused, answered, and answered anew"


def test_a_server_whose_template_is_another_one_is_told_from_one_with_other_weights() -> None:
    with pytest.raises(CanaryError, match=r"another chat template.*\(other_template\)"):
        during(FakeOwn(table(), shift=0.5), lambda c: c.connect())
    other = table()
    other.score = lambda ids: number_of(ids)
    with pytest.raises(CanaryError, match=r"other weights.*\(stale_weights\)"):
        during(FakeOwn(other), lambda c: c.connect())


def test_a_function_that_renders_otherwise_is_told_by_the_first_token_that_differs() -> None:
    def without_end(messages: list[dict[str, str]]) -> list[int]:
        return renderer().token_ids(to_messages(messages)).tolist()[:-1]

    with pytest.raises(CanaryError, match="render_fn renders canary 'short' to other tokens from token"):
        during(FakeVllm(table()), lambda c: c.connect(), artifact=folder(), render_fn=without_end)


def test_text_with_forged_turns_is_what_the_canaries_catch() -> None:
    with pytest.raises(CanaryError, match="special_tokens"):
        during(FakeVllm(table()), lambda c: c.connect(), artifact=folder(), render_fn=as_text)


def test_a_function_that_gives_tokens_serves_for_every_engine() -> None:
    def tokens(messages: list[dict[str, str]]) -> Any:
        return renderer().token_ids(to_messages(messages))  # an array

    for engine in ENGINES:
        scores = during(ENGINES[engine](), lambda c: c.score(talks(9)), render_fn=tokens, check=False)
        assert scores == expected(talks(9))


@pytest.mark.parametrize("engine", ["sglang classify", "rewardlab"])
def test_a_text_is_refused_where_tokens_would_be_added_to_it(engine: str) -> None:
    with pytest.raises(RenderError, match="would add the tokenizer's own tokens.*return token ids"):
        during(ENGINES[engine](), lambda c: c.score(talks(2)), render_fn=as_text, check=False)


@pytest.mark.parametrize("made", [None, "", [], [1.5], [True], {"input_ids": [1]}])
def test_a_function_that_gives_neither_text_nor_tokens_is_told_so(made: Any) -> None:
    with pytest.raises(RenderError, match="conversation 0: render_fn gave .*; wanted the rendered text"):
        during(FakeVllm(table()), lambda c: c.score(talks(1)), render_fn=lambda messages: made, check=False)


def test_without_a_way_to_render_the_client_says_what_to_give() -> None:
    fake = FakeVllm(table())
    with pytest.raises(ConfigError, match="no canaries by which.*artifact=FOLDER.*check=False"):
        during(fake, lambda c: c.connect(), artifact=None)
    with pytest.raises(ConfigError, match="artifact=FOLDER.*render_fn=.*score_token_ids"):
        during(fake, lambda c: c.score(talks(1)), artifact=None, check=False)
    assert during(fake, lambda c: c.score_token_ids([[5, 6]]), artifact=None, check=False) == [number_of([5, 6])]


def test_a_swap_ends_a_call_in_an_error_and_connecting_anew_goes_on_with_the_new_model() -> None:
    fake = FakeOwn(table())

    async def swapped(own: AsyncRewardClient) -> list[float]:
        assert await own.score(talks(3)) == expected(talks(3))
        fake.digest = "b" * 64
        with pytest.raises(ModelChangedError, match="another model is served now.*digest aaaaaaaaaaaaaaaa…"):
            await own.score(talks(3))
        await own.connect()
        assert own.digest == "b" * 64
        return await own.score(talks(3))

    assert during(fake, swapped) == expected(talks(3))


def test_a_server_that_ignores_the_digest_is_caught_by_its_answer() -> None:
    def ignoring(path: str, body: Any) -> Any:
        return 200, {**FakeOwn(table()).reply(path, {**body, "digest": None})[1], "digest": "c" * 64}, {}

    with pytest.raises(ModelChangedError, match="the answer has the digest cccccccccccccccc…"):
        during(FakeOwn(table(), first=[ignoring]), lambda c: c.score(talks(2)), check=False)


def test_a_swap_is_followed_on_request_and_no_prompt_has_scores_of_two_models() -> None:
    class Swapping(FakeOwn):
        """Takes another model when it is first asked about certain prompts."""

        models: ClassVar = {"Prompt 2?": "b" * 64, "Prompt 4?": "c" * 64}

        def reply(self, path: str, body: Any) -> Any:
            prompt = body["groups"][0]["prompt"] if path == "/v1/score" else ""
            if isinstance(prompt, str):
                self.digest = self.models.pop(prompt, self.digest)
            return super().reply(path, body)

    fake = Swapping(table())
    groups = [(f"Prompt {number}?", [str(reply) for reply in range(20)]) for number in range(6)]
    answers = during(fake, lambda c: c.answer_groups(groups), on_swap="follow", max_concurrency=1)
    digests = [{answer.digest for answer in group} for group in answers]
    assert [len(group) for group in digests] == [1] * 6
    # Scores of a model that was gone before it could be checked were asked for again.
    assert [digests[0], digests[-1]] == [{"a" * 64}, {"c" * 64}]
    assert fake.paths.count("/v1/spec") > 1


def test_a_swap_in_the_middle_of_the_check_begins_it_anew() -> None:
    fake = FakeOwn(table())

    def swapping(path: str, body: Any) -> None:
        fake.digest = "b" * 64

    fake.first = [lambda path, body: None, swapping]
    assert during(fake, lambda c: c.spec(), on_swap="follow", max_batch=2).digest == "b" * 64
    fake.first, fake.digest = [lambda path, body: None, swapping], "a" * 64
    with pytest.raises(ModelChangedError):
        during(fake, lambda c: c.spec(), max_batch=2)


def test_a_new_model_that_fails_its_canaries_is_not_followed() -> None:
    fake = FakeOwn(table())

    def swapping(path: str, body: Any) -> None:
        fake.digest, fake.model.fault = "b" * 64, "sigmoid"

    fake.first = [lambda path, body: None, swapping]
    with pytest.raises(CanaryError, match="sigmoid"):
        during(fake, lambda c: c.score(talks(3)), on_swap="follow")


def test_the_noise_of_a_score_is_that_of_the_model_that_gave_it_after_a_swap() -> None:
    fake = FakeOwn(table())

    async def noises() -> list[float]:
        client = {"on_swap": "follow", "httpx_options": fake.transport}
        async with RewardScorer(URL, client=client) as scorer:
            before = (await scorer.details(talks(1)))[0]
            fake.digest, fake.dtype, fake.model = "b" * 64, "bfloat16", replace(fake.model, precision="bfloat16")
            after = (await scorer.details(talks(1)))[0]
            assert before.digest != after.digest
            assert (await scorer.noise()).tolerance == 0.15
            return [one.noise / (2 * max(1.0, abs(one.score))) for one in (before, after)]

    before, after = asyncio.run(noises())
    assert before == pytest.approx(1e-4, rel=1e-3)
    assert after > 0.14


def test_tokens_of_one_call_are_scored_by_one_model() -> None:
    fake = FakeOwn(table())

    def swapping(path: str, body: Any) -> None:
        fake.digest = "b" * 64

    fake.first = [lambda path, body: None, swapping]
    tokens = [[number] for number in range(6)]
    settings = {"on_swap": "follow", "max_batch": 2, "max_concurrency": 1, "check": False}
    assert during(fake, lambda c: c.score_token_ids(tokens), **settings) == [number_of(ids) for ids in tokens]
    assert fake.paths.count("/v1/score") == 6  # three requests, twice


def test_a_row_that_no_model_was_asked_about_is_no_other_model() -> None:
    fake = FakeVllm(table())
    short, long = during(fake, lambda c: c.answer_token_ids([[5, 6, 7], [5] * 300]), artifact=folder(), check=False)
    assert short.score == number_of([5, 6, 7])
    assert long.score is None
    assert "300 tokens" in long.error


def test_the_folder_is_held_to_the_digest_of_our_server() -> None:
    with pytest.raises(ModelChangedError, match="they are different models"):
        during(FakeOwn(table()), lambda c: c.connect(), artifact=folder())
    told = during(FakeOwn(table(), digest=digest()), lambda c: c.spec(), artifact=folder())
    assert told.digest == digest()
    with pytest.raises(ConfigError, match="artifact and on_swap='follow'"):
        during(FakeOwn(table(), digest=digest()), lambda c: c.connect(), artifact=folder(), on_swap="follow")
