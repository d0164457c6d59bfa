"""The client against servers that speak each dialect: the right score for every row, or which row and why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import stamina

from dialects_spoken import ENGINES, URL, as_text, during
from fake_engines import FakeOwn, FakeSglang, FakeVllm, error_body, number_of
from rewardlab.client import (
    AsyncRewardClient,
    BadAnswerError,
    RefusedError,
    UnavailableError,
)
from rewardlab.core.errors import RenderError
from rewardlab.data.chat import to_messages
from served import expected, folder, renderer, table, talks


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Attempts follow each other at once, and are as many as the client says."""
    with stamina.set_testing(True, attempts=5, cap=True):
        yield


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_recognised_and_gives_the_scores_in_order(engine: str) -> None:
    fake = ENGINES[engine]()
    rows = talks(101)
    scores = during(fake, lambda c: c.score(rows), max_batch=7, max_concurrency=3)
    assert scores == expected(rows)
    groups = [("Why?", ["a", "b"]), ("How?", []), ("Why?", ["c"])]
    wanted = [
        expected([[{"role": "user", "content": prompt}, {"role": "assistant", "content": text}] for text in replies])
        for prompt, replies in groups
    ]
    assert during(fake, lambda c: c.score_groups(groups)) == wanted
    assert during(fake, lambda c: c.score_replies("Why?", ["a", "b", "c"])) == [*wanted[0], *wanted[2]]
    tokens = [[5, 6, 7], [8], [5, 6, 7]]
    assert during(fake, lambda c: c.score_token_ids(tokens)) == [number_of(ids) for ids in tokens]
    assert not {"/score", "/v1/score", "/rerank", "/v1/classify"} & set(fake.paths) - {"/v1/score"} or (
        engine == "rewardlab"
    )
    assert isinstance(fake, FakeOwn) or "/v1/score" not in fake.paths


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_connected_to_is_told(engine: str) -> None:
    fake = ENGINES[engine]()
    told = during(fake, lambda c: c.spec())
    assert told.engine == engine.split()[0]
    assert told.precision == "float32"
    if engine == "rewardlab":
        assert (told.digest, told.model, told.max_length) == ("a" * 64, "default", 256)
    else:
        # Nothing told it, but the canaries have the scores of this folder's model.
        assert told.digest is not None
        assert told.version == ("0.32.0" if told.engine == "vllm" else "0.5.23")


def test_a_transcript_as_prompt_is_read_as_in_training_by_every_engine() -> None:
    prompt = "Human: Why?\n\nAssistant: So.\n\nHuman: And then?\n\nAssistant:"
    scores = [during(ENGINES[engine](), lambda c: c.score_replies(prompt, [" Yes. "])) for engine in ENGINES]
    turns = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert scores == [expected([turns])] * len(ENGINES)


def test_vllm_is_always_told_to_apply_nothing_and_to_add_no_token() -> None:
    fake = FakeVllm(table())
    assert during(fake, lambda c: c.score(talks(5))) == expected(talks(5))
    assert during(fake, lambda c: c.score(talks(5)), render_fn=as_text, check=False) == expected(talks(5))
    bodies = [body for path, body in fake.asked if path == "/classify"]
    assert len(bodies) == 3  # the canaries, tokens, texts
    assert {body["use_activation"] for body in bodies} == {False}
    assert {body["add_special_tokens"] for body in bodies} == {False}
    assert {type(item) for body in bodies for item in body["input"]} == {list, str}


def test_rows_with_the_same_prompt_go_into_one_request_of_our_server_however_many() -> None:
    fake = FakeOwn(table())
    during(fake, lambda c: c.score(talks(40)), max_batch=4, check=False)
    groups = [group for path, body in fake.asked if path == "/v1/score" for group in body["groups"]]
    prompts = [group["prompt"][0]["content"] for group in groups]
    assert len(prompts) == len(set(prompts))
    assert max(len(group["replies"]) for group in groups) == 14


def test_a_request_about_one_prompt_says_which_without_its_text_and_one_about_several_does_not() -> None:
    fake, both = FakeOwn(table()), [("How?", ["c"]), ("Why is it so?", ["d"])]

    async def work(c: AsyncRewardClient) -> None:
        await c.score_replies("Why is it so?", ["a", "b"])
        await c.score_replies([{"role": "user", "content": "Why is it so?"}], ["c"])
        await c.score_replies("How?", ["c"])
        await c.score_groups(both)
        await c.score_token_ids([[5, 6, 7]])

    during(fake, work, check=False)
    during(fake, lambda c: c.score_groups(both), check=False, max_batch=1)
    sent = [one.get("x-prompt-key") for one, path in zip(fake.headers, fake.paths, strict=True) if path == "/v1/score"]
    why, how = sent[0], sent[2]
    assert sent == [why, why, how, None, None, how, why]
    assert why != how
    assert len(why) == 16, "a hash, since headers are logged"


@pytest.mark.slow
def test_no_more_requests_are_under_way_than_allowed_and_a_crowd_connects_once() -> None:
    fake, now, most = FakeVllm(table()), 0, 0
    three_at_once = asyncio.Event()

    async def counted(request: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            three_at_once.set()
        if request.url.path == "/classify":
            await asyncio.wait_for(three_at_once.wait(), timeout=60)
        await asyncio.sleep(0)
        now -= 1
        return await fake(request)

    async def crowd() -> None:
        own = AsyncRewardClient(
            URL,
            artifact=folder(),
            check=False,
            max_concurrency=3,
            max_batch=2,
            httpx_options={"transport": httpx2.MockTransport(counted)},
        )
        rows = talks(20)
        scores = await asyncio.gather(*(own.score(rows) for _ in range(20)))
        assert scores == [expected(rows)] * 20
        await own.aclose()

    asyncio.run(crowd())
    assert most == 3
    assert fake.paths.count("/openapi.json") == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_be_better_a_moment_later_is_asked_for_again(status: int) -> None:
    fake = FakeVllm(table(), first=[lambda path, body: (status, "busy", {"retry-after": "0"})] * 3)
    assert during(fake, lambda c: c.score(talks(2)), check=False) == expected(talks(2))
    assert fake.paths.count("/classify") == 4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_what_would_be_refused_again_is_asked_for_once(status: int) -> None:
    said = {"error": {"message": "not this", "type": "sort", "code": status}}
    fake = FakeVllm(table(), first=[lambda path, body: (status, said, {})] * 3)
    with pytest.raises(RefusedError, match=f"{status} .*not this") as refused:
        during(fake, lambda c: c.score(talks(2)), check=False)
    assert fake.paths.count("/classify") == 1
    assert (refused.value.status, refused.value.kind) == (status, "sort")


def test_a_server_that_stays_away_is_given_up_after_the_attempts() -> None:
    fake = FakeVllm(table(), first=[lambda path, body: (503, "", {})] * 9)
    with pytest.raises(UnavailableError, match="503 Service Unavailable.*up to 3 times"):
        during(fake, lambda c: c.score(talks(2)), check=False, attempts=3)
    assert fake.paths.count("/classify") == 3


def test_a_server_that_wants_to_be_left_alone_for_longer_than_a_request_may_take_is() -> None:
    fake = FakeVllm(table(), first=[lambda path, body: (429, "", {"retry-after": "3600"})])
    with pytest.raises(UnavailableError, match="left alone for 3600 s"):
        during(fake, lambda c: c.score(talks(2)), check=False)
    assert fake.paths.count("/classify") == 1


def broken(change: Callable[[Any], Any]) -> list[Callable[[str, Any], Any]]:
    """A server whose first answer is changed."""
    own = FakeVllm(table())
    return [lambda path, body: (200, change(own.reply(path, body)[1]), {})]


def with_value(value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values["data"][1]["probs"] = [value]
        return values

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: {**values, "data": values["data"][:-1]}, "2 scores for 3 rows .conversation 0 to conversation"),
        (with_value(float("nan")), "conversation 1: the score is nan"),
        (with_value(float("-inf")), "conversation 1: the score is -inf"),
        (with_value(None), "conversation 1: the score is null"),
        (with_value("0.5"), "conversation 1: the score is str"),
        (with_value(True), "conversation 1: the score is bool"),
        (lambda values: {"data": [{**row, "probs": [0.1, 0.2]} for row in values["data"]]}, "a row has 2 numbers"),
        (lambda values: {"data": [{**row, "index": 0} for row in values["data"]]}, "have the numbers .0, 0, 0."),
        (lambda values: {"scores": [0.1]}, "not what vllm answers at /classify"),
        (lambda values: [], "not what vllm answers at /classify"),
        (lambda values: "<html>", "not JSON"),
        (lambda values: "[" * 100_000, "not JSON"),
        (lambda values: '{"data": [', "not JSON"),
    ],
)
def test_an_answer_that_is_not_one_finite_number_a_row_is_an_error_that_says_so(
    change: Callable[[Any], Any], said: str
) -> None:
    rows = [*talks(2), talks(5)[4]]
    fake = FakeVllm(table(), first=broken(change))
    with pytest.raises(BadAnswerError, match=said):
        during(fake, lambda c: c.score(rows), check=False)


def test_answers_out_of_order_are_put_in_order() -> None:
    fake = FakeVllm(table(), first=broken(lambda values: {**values, "data": values["data"][::-1]}))
    assert during(fake, lambda c: c.score(talks(9)), check=False) == expected(talks(9))


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (float("nan"), "nan"),
        (True, "bool"),
        ("0.5", "str"),
        pytest.param(10**400, "int", id="beyond all floats"),
        ([0.5], "list"),
    ],
)
def test_a_score_of_our_server_that_is_no_finite_number_names_the_row(score: Any, said: str) -> None:
    def with_score(path: str, body: Any) -> Any:
        values = FakeOwn(table()).reply(path, body)[1]
        values["groups"][1]["scores"][0] = score
        return 200, values, {}

    fake = FakeOwn(table(), first=[with_score])
    with pytest.raises(BadAnswerError, match=f"reply 0 of group 1: the score is {said}"):
        during(fake, lambda c: c.score_groups([("a", ["x", "y"]), ("b", ["z"])]), check=False)


@pytest.mark.parametrize("field", ["scores", "num_tokens"])
def test_a_wrong_count_from_our_server_is_an_error(field: str) -> None:
    def without_one(path: str, body: Any) -> Any:
        values = FakeOwn(table()).reply(path, body)[1]
        values["groups"][0][field].pop()
        return 200, values, {}

    fake = FakeOwn(table(), first=[without_one])
    with pytest.raises(BadAnswerError, match="1 score for 2 rows .reply 0 to reply 1."):
        during(fake, lambda c: c.score_replies("a", ["x", "y"]), check=False)


def test_an_answer_of_another_version_of_our_server_names_the_field_and_the_version() -> None:
    fake = FakeOwn(table(), first=[lambda path, body: (200, {"object": "rewardlab.scores", "version": "9"}, {})])
    with pytest.raises(BadAnswerError, match="model: Field required. The server has version '9'"):
        during(fake, lambda c: c.score(talks(1)), check=False)


def test_what_a_newer_server_tells_besides_is_left_alone() -> None:
    class Newer(FakeOwn):
        def reply(self, path: str, body: Any) -> Any:
            status, values, headers = super().reply(path, body)
            values["region"] = "eu"
            for model in values.get("models", ()):
                model |= {"quantised": False, "outputs": ["raw", "percentile"]}
                for canary in model["canaries"]:
                    canary["seen"] = 1
                    canary["messages"][0]["name"] = "ada"
            for group in values.get("groups", ()):
                group["seconds"] = 0.1
            return status, values, headers

    assert during(Newer(table()), lambda c: c.score(talks(2))) == expected(talks(2))


def test_another_attempt_is_logged_with_what_is_asked_why_and_when(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeOwn(table(), first=[lambda path, body: (503, error_body("draining", 503, "private"), {})])
    during(fake, lambda c: c.score(talks(1)), check=False)
    (said,) = (record.getMessage() for record in caplog.records if record.name in ("rewardlab", "stamina"))
    assert re.fullmatch(
        r"POST http://scores.example/v1/score: 503 Service Unavailable. Asked again in [0-9.]+ s.", said
    )


def test_a_conversation_above_the_limit_is_an_error_unless_it_may_be_cut() -> None:
    turns = [{"role": role, "content": "word " * 40} for role in ("user", "assistant")] * 3
    for fake in (FakeVllm(table()), FakeSglang(table())):
        with pytest.raises(RenderError, match="conversation 1: it takes .* above the model's limit of 256.*truncate"):
            during(fake, lambda c: c.score([talks(1)[0], turns]))
        (answered,) = during(fake, lambda c: c.answers([turns]), truncate=True)
        assert answered.truncated_tokens
        assert answered.num_tokens is not None
        assert answered.num_tokens <= 256
        with pytest.raises(RenderError, match="tokens 1: it has 300 tokens"):
            during(fake, lambda c: c.score_token_ids([[5], [5] * 300]))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_cannot_be_scored_get_their_cause_and_the_others_their_score(engine: str) -> None:
    long = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "No."}]
    rows = [talks(2)[0], long, talks(2)[1]]
    answers = during(ENGINES[engine](), lambda c: c.answers(rows))
    assert [answers[0].score, answers[2].score] == expected(talks(2))
    assert answers[1].score is None
    assert "tokens" in str(answers[1].error)


@pytest.mark.parametrize("keep", [False, True])
def test_a_request_that_is_too_large_as_a_whole_is_halved_between_prompts(keep: bool) -> None:
    groups = [(f"Prompt {n}?", ["One.", "Two.", "Three."]) for n in range(5)]
    fake = FakeOwn(table(), most=7)

    async def scored(own: AsyncRewardClient) -> list[list[float | None]]:
        if keep:
            return [[answer.score for answer in group] for group in await own.answer_groups(groups)]
        return [list(group) for group in await own.score_groups(groups)]

    got = during(fake, scored, check=False)
    assert got == [
        expected([[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for r in rs])
        for p, rs in groups
    ]
    sizes = [[len(group["replies"]) for group in body["groups"]] for path, body in fake.asked if path == "/v1/score"]
    assert sizes == [[3] * 5, [3] * 2, [3] * 3, [3], [3] * 2]


def test_a_group_that_is_too_large_by_itself_is_refused_or_gets_the_cause_in_every_row() -> None:
    groups = [("Few?", ["One.", "Two."]), ("Many?", ["One.", "Two.", "Three."])]
    few, many = during(FakeOwn(table(), most=2), lambda c: c.answer_groups(groups), check=False)
    assert [answer.error for answer in few] == [None, None]
    assert [answer.score for answer in many] == [None] * 3
    assert all("413" in (answer.error or "") and "more than 2 conversations" in (answer.error or "") for answer in many)
    with pytest.raises(RefusedError, match="413.*more than 2 conversations.*score fewer of them in a call"):
        during(FakeOwn(table(), most=2), lambda c: c.score_groups(groups), check=False)
    tokens = [[n] for n in range(5)]
    assert during(FakeOwn(table(), most=2), lambda c: c.score_token_ids(tokens), check=False) == list(
        map(number_of, tokens)
    )


def test_one_row_that_the_engine_refuses_does_not_take_the_others_with_it() -> None:
    fake = FakeVllm(table())
    own = fake.reply

    def picky(path: str, body: Any) -> Any:
        if path == "/classify" and any(len(item) == 1 for item in body["input"]):
            return 400, {"error": {"message": "too short"}}, {}
        return own(path, body)

    fake.reply = picky
    rows = talks(3)

    def short(messages: list[dict[str, str]]) -> list[int]:
        return [7] if messages == rows[1] else renderer().token_ids(to_messages(messages)).tolist()

    answers = during(fake, lambda c: c.answers(rows), render_fn=short, check=False)
    assert [answers[0].score, answers[2].score] == expected([rows[0], rows[2]])
    assert "too short" in str(answers[1].error)


def test_what_is_no_list_of_conversations_is_told_by_its_number() -> None:
    fake = FakeOwn(table())
    reply = {"role": "assistant", "content": "b"}
    bad = {
        "Put a single one into a list": talks(1)[0],
        "conversation 1 must end with an assistant turn": [*talks(1), [{"role": "user", "content": "a"}]],
        "conversation 1: unknown role": [*talks(1), [{"role": "robot", "content": "a"}, reply]],
        "conversation 1: a text has half a surrogate pair": [
            *talks(1),
            [{"role": "user", "content": "\ud800"}, reply],
        ],
    }
    for said, rows in bad.items():
        with pytest.raises(RenderError, match=said):
            during(fake, lambda c, rows=rows: c.score(rows), check=False)
    with pytest.raises(RenderError, match="replies of group 1 are a list of texts"):
        during(fake, lambda c: c.score_groups([("a", ["b"]), ("a", "b")]), check=False)
    with pytest.raises(RenderError, match="tokens 1: expected a list"):
        during(fake, lambda c: c.score_token_ids([[1], [-1]]), check=False)
    assert "/v1/score" not in fake.paths


def test_nothing_to_score_is_no_scores() -> None:
    fake = FakeOwn(table())
    assert during(fake, lambda c: c.score([]), check=False) == []
    assert during(fake, lambda c: c.score_groups([("a", [])]), check=False) == [[]]
    assert "/v1/score" not in fake.paths
