"""Routes answer raw scores in the shapes of four projects, or say why not."""

from __future__ import annotations

import logging

import pytest

from fake_engine import BOOM, CRASH, UNSCORABLE, FakeEngine, error_of, expected, fake_score, render
from rewardlab.client.protocol import DIGEST_HEADER, ScoreRequest, ScoreResponse, SpecResponse
from rewardlab.serve.engine.api import Scored
from rewardlab.serve.http.compat import place_in
from rewardlab.serve.http.compat_forms import GetRewardRequest, PoolingRequest, SlimeRequest
from rewardlab.serve.http.config import HttpConfig

pytest_plugins = ["served_apps"]

TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
IDS = render([("user", "Hello"), ("assistant", "Hi")])
FORMS = [
    {"prompt": "Hello", "replies": ["Hi", "Bye"]},
    {"groups": [{"prompt": "Hello", "replies": ["Hi"]}, {"prompt": [TURNS[0]], "replies": ["a", "b", "c"]}]},
    {"conversations": [TURNS, TURNS[:1]]},
    {"token_ids": [IDS, [1, 2, 3]]},
]


@pytest.mark.parametrize("body", FORMS)
def test_every_form_gets_the_scores_of_its_conversations_in_order(client, engine: FakeEngine, body):
    response = client.post("/v1/score", json=body)
    assert response.status_code == 200
    answer = ScoreResponse.model_validate_json(response.content)
    digest = engine.digests["tiny"]
    assert [group.scores for group in answer.groups] == expected(digest, ScoreRequest.model_validate(body))
    assert answer.digest == response.headers[DIGEST_HEADER] == digest


def test_all_routes_give_the_same_score(client, engine: FakeEngine):
    score = fake_score(engine.digests["tiny"], IDS)
    text = bytes(IDS).decode()
    for body in ({"messages": TURNS}, {"input": text}, {"input": IDS}, {"input": [text]}, {"input": [IDS]}):
        assert client.post("/classify", json=body).json()["data"][0]["probs"] == [score]
        assert client.post("/pooling", json=body | {"use_activation": False}).json()["data"][0]["data"] == [score]
    slime = client.post("/slime", json={"prompt": TURNS[:1], "response": "Hi", "label": None})
    assert slime.json() == score
    bare = client.post("/slime", json={"prompt": [], "response": "Hi"}).json()
    assert [bare] == client.post("/v1/score", json={"prompt": [], "replies": ["Hi"]}).json()["groups"][0]["scores"]
    openrlhf = client.post("/get_reward", json={"query": [TURNS, TURNS], "prompts": ["x", "x"], "labels": ["", ""]})
    assert openrlhf.json() == {"rewards": [score, score], "scores": [score, score], "extra_logs": {}}
    assert slime.headers[DIGEST_HEADER] == openrlhf.headers[DIGEST_HEADER] == engine.digests["tiny"]


def test_fields_of_a_message_that_say_nothing_are_passed_over(client, engine: FakeEngine):
    said = [TURNS[0], {**TURNS[1], "tool_calls": None, "refusal": None, "annotations": []}]
    score = fake_score(engine.digests["tiny"], IDS)
    assert client.post("/v1/score", json={"conversations": [said]}).json()["groups"][0]["scores"] == [score]
    assert client.post("/classify", json={"messages": said}).json()["data"][0]["probs"] == [score]
    for more in ({"tool_calls": [{"id": "a"}]}, {"name": ""}, {"prefix": False}):
        answer = client.post("/v1/score", json={"conversations": [[TURNS[0], {**TURNS[1], **more}]]})
        assert answer.status_code == 422


@pytest.mark.parametrize("route", ["/classify", "/pooling"])
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"use_activation": True}, "raw_scores_only"),
        ({"softmax": True}, "raw_scores_only"),
        ({"activation": True}, "raw_scores_only"),
        ({"normalize": True}, "raw_scores_only"),
        ({"truncate_prompt_tokens": 5}, "invalid_request"),
        ({"add_special_tokens": True}, "invalid_request"),
        ({"add_generation_prompt": True}, "invalid_request"),
        ({"chat_template": "x"}, "invalid_request"),
        ({"encoding_format": "base64"}, "invalid_request"),
        ({"task": "embed"}, "invalid_request"),
        ({"unheard_of": 1}, "invalid_request"),
        ({"messages": TURNS}, "invalid_request"),
    ],
)
def test_what_would_change_the_score_is_refused_and_named(client, route, more, kind):
    error = error_of(client.post(route, json={"input": "x"} | more)).error
    assert (error.code, error.type) == (422, kind)
    assert error.param in (*more, "input")


@pytest.mark.parametrize(
    "body", [{"use_activation": False}, {"softmax": False}, {"normalize": None}, {"encoding_format": "float"}]
)
def test_what_asks_for_raw_scores_anyhow_is_followed(client, body):
    assert client.post("/classify", json={"input": "x"} | body).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "ids"),
    [
        ("/get_reward", {"query": ["rendered"]}, b"rendered"),
        ("/slime", {"prompt": "rend", "response": "ered"}, b"rendered"),
    ],
)
def test_text_of_a_policy_is_taken_only_where_the_server_was_told_so(client, client_of, engine, route, body, ids):
    error = error_of(client.post(route, json=body)).error
    assert (error.code, error.type) == (422, "not_mappable")
    assert "--accept-rendered" in error.message
    answer = client_of(HttpConfig(accept_rendered=True)).post(route, json=body).json()
    score = fake_score(engine.digests["tiny"], ids)
    assert answer in (score, {"rewards": [score], "scores": [score], "extra_logs": {}})


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"prompt": "x", "replies": ["y"], "model": "none"}, 404, "unknown_model"),
        ({"prompt": "x", "replies": ["y"], "digest": "0"}, 409, "wrong_digest"),
        ({"prompt": "x", "replies": ["y" * 5000]}, 413, "too_long"),
        ({"prompt": UNSCORABLE, "replies": ["y"]}, 422, "unscorable"),
        ({"prompt": "x", "replies": ["y"], "output": "calibrated"}, 422, "no_calibration"),
        ({"prompt": BOOM, "replies": ["y"]}, 500, "engine_failed"),
        ({"prompt": CRASH, "replies": ["y"]}, 500, "internal"),
        ({"token_ids": [[-1]]}, 422, "unscorable"),
        ({"token_ids": [[2**31]]}, 422, "unscorable"),
        ({"token_ids": [["5"]]}, 422, "invalid_request"),
        ({"prompt": "x", "replies": []}, 422, "invalid_request"),
        ({"prompt": "x", "replies": ["y"], "more": 1}, 422, "invalid_request"),
        ({"prompt": "x", "replies": ["y"], "token_ids": [[1]]}, 422, "invalid_request"),
        ([], 422, "invalid_request"),
    ],
)
def test_every_refusal_has_its_code_and_its_word(client, body, status, kind):
    error = error_of(client.post("/v1/score", json=body)).error
    assert (error.code, error.type) == (status, kind)


BAD = [*TURNS[:1], {"role": "assistant", "content": UNSCORABLE}]


@pytest.mark.parametrize(
    ("route", "body", "place"),
    [
        ("/classify", {"messages": BAD}, "messages"),
        ("/classify", {"input": UNSCORABLE}, "input"),
        ("/classify", {"input": ["good", UNSCORABLE]}, "input.1"),
        ("/pooling", {"input": list(UNSCORABLE.encode())}, "input"),
        ("/pooling", {"input": [[1], [-1]]}, "input.1"),
        ("/get_reward", {"query": [TURNS, BAD]}, "query.1"),
        ("/get_reward", {"query": [[1], [-1]]}, "query.1"),
        ("/slime", {"prompt": TURNS[:1], "response": UNSCORABLE}, "prompt"),
        ("/classify", {"model": "none", "input": "x"}, "model"),
    ],
)
def test_a_place_is_one_of_the_body_that_was_sent(client, route, body, place):
    assert error_of(client.post(route, json=body)).error.param == place


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/v1/score", {"prompt": "x", "responses": ["y"]}, "responses: no such field. Did you mean 'replies'?"),
        ("/v1/score", {"messages": TURNS}, "messages: no such field. Did you mean 'conversations'?"),
        ("/v1/score", {"prompt": "x", "replies": ["y"], "truncat": True}, "no such field. Did you mean 'truncate'?"),
        ("/v1/score", {"prompt": "x", "replies": ["y"], "response": "y"}, "response: no such field."),
        (
            "/v1/score",
            {"groups": [{"prompt": "x", "responses": ["y"]}]},
            "groups.0.replies: Field required. Write 'replies' where you wrote 'responses'.",
        ),
        (
            "/v1/score",
            {"conversations": [[*TURNS[:-1], {**TURNS[-1], "reasoning_content": "x"}]]},
            "reasoning_content: no such field. Only the content of a message is scored: write it there, or leave it "
            "out.",
        ),
        ("/v1/score", {"conversations": [[{"role": "user", "text": "x"}]]}, "Write 'content' where you wrote 'text'."),
        ("/slime", {"prompt": TURNS[:1], "replies": ["y"]}, "Write 'response' where you wrote 'replies'."),
        ("/classify", {"inputs": ["x"]}, "inputs: no such field. Did you mean 'input'?"),
    ],
)
def test_the_name_under_which_others_send_a_field_leads_to_ours(client, route, body, said):
    assert error_of(client.post(route, json=body)).error.message.endswith(said)


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("/v1/score", [], "the body: wanted a JSON object."),
        ("/v1/score", {"prompt": 5, "replies": ["y"]}, "prompt: wanted a text, or a list of messages."),
        ("/v1/score", {"prompt": "x", "replies": "y"}, "replies: wanted a list of texts, also for one."),
        (
            "/v1/score",
            {"prompt": ["x"], "replies": ["y"]},
            "prompt.0: wanted a message, an object with role and content.",
        ),
        (
            "/v1/score",
            {"conversations": [["x", "y"]]},
            "conversations.0.0: wanted a message, an object with role and content.",
        ),
        (
            "/v1/score",
            {"groups": [{"prompt": "x", "replies": [TURNS[-1:]]}]},
            "groups.0.replies.0: wanted a text; a reply of messages goes into conversations, behind the messages of "
            "its prompt.",
        ),
        (
            "/v1/score",
            {"conversations": TURNS},
            "conversations.0: wanted a list of messages: conversations is a list of such lists, also for one.",
        ),
        (
            "/v1/score",
            {"token_ids": [1, 2]},
            "token_ids.0: wanted a list of token ids: token_ids is a list of such lists, also for one.",
        ),
        (
            "/classify",
            {"messages": [*TURNS[:-1], {"role": "assistant", "content": [{"type": "text", "text": "y"}]}]},
            f"messages.{len(TURNS) - 1}.content: wanted a text; of a content in parts send their texts, joined.",
        ),
        ("/v1/score", {"prompt": "x", "replies": []}, "replies: is empty."),
        (
            "/v1/score",
            {"prompt": "x"},
            "the body: give exactly one of replies, groups, conversations, token_ids; got none.",
        ),
    ],
)
def test_a_value_of_another_type_is_told_what_was_wanted(client, route, body, said):
    assert error_of(client.post(route, json=body)).error.message == said


@pytest.mark.parametrize("query", [[[]], [], [[[]]], "x", [["x"]], [1, 2], TURNS, [[TURNS]], [None], {"a": 1}])
def test_a_query_of_no_known_form_is_told_the_forms(client, query):
    error = error_of(client.post("/get_reward", json={"query": query})).error
    assert error.message.startswith("query: wanted a list with one element for each conversation: a list of messages")
    assert "a list of token ids (whole numbers), or a text; none may be empty" in error.message


@pytest.mark.parametrize(
    ("query", "place"),
    [([TURNS, []], "query.1"), ([[1], [1, "x"]], "query.1.1"), ([[{"role": "user"}]], "query.0.0.content")],
)
def test_a_fault_in_a_query_is_told_in_the_form_of_its_first_conversation(client, query, place):
    assert error_of(client.post("/get_reward", json={"query": query})).error.param == place


@pytest.mark.parametrize(
    ("form", "place", "told"),
    [
        (PoolingRequest(messages=TURNS), "conversations.0.1.content", "messages.1.content"),
        (PoolingRequest(input=[1, 2]), "token_ids.0.1", "input.1"),
        (PoolingRequest(input=["ab"]), "token_ids.0.1", "input.0"),
        (GetRewardRequest(query=[[1, 2]]), "token_ids.0.1", "query.0.1"),
        (SlimeRequest(prompt=TURNS[:1], response="x"), "conversations.0.0.content", "prompt.0.content"),
        (SlimeRequest(prompt=TURNS[:1], response="x"), "conversations.0.1.content", "response"),
        (SlimeRequest(prompt="x", response="x"), "token_ids.0.1", "prompt"),
    ],
)
def test_a_place_inside_a_conversation_stays_where_it_is(form, place, told):
    assert place_in(form, place) == told


def test_scores_of_models_that_are_served_no_longer_are_forgotten(client, engine: FakeEngine, tmp_path):
    digests = []
    for number in range(3):
        (tmp_path / "model").write_text(f"model {number}")
        digests.append(engine.swap("tiny", tmp_path).digest)
        client.post("/v1/score", json=FORMS[0])
        told = client.get("/metrics").text
        assert [one in told for one in digests] == [one == digests[-1] for one in digests]


def test_a_failure_tells_neither_client_nor_log_what_was_scored(client, caplog):
    caplog.set_level(logging.DEBUG)
    secret = CRASH + " whispered question"
    response = client.post("/v1/score", json={"prompt": secret, "replies": ["y"]})
    assert "whispered" not in response.text + caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


def test_a_request_logs_one_line_without_its_texts(client_of, caplog):
    caplog.set_level(logging.INFO)
    client = client_of(HttpConfig(log_requests=True))
    body = {"prompt": "whispered question", "replies": ["y", "z"]}
    client.post("/v1/score", json=body, headers={"x-request-id": "mine-1"})
    lines = [record.getMessage() for record in caplog.records if record.name == "rewardlab.serve.http.middleware"]
    assert len(lines) == 1
    assert "POST /v1/score 200" in lines[0]
    assert "id=mine-1" in lines[0]
    assert "conversations=2" in lines[0]
    assert "whispered" not in caplog.text


def test_an_id_that_could_fake_a_log_line_is_replaced(client):
    given = client.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert given != "a b"


def test_models_and_spec_name_the_digest(client, engine: FakeEngine):
    spec = SpecResponse.model_validate_json(client.get("/v1/spec").content)
    assert [model.digest for model in spec.models] == [engine.digests["tiny"]]
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["root"]) for one in listed] == [("tiny", engine.digests["tiny"])]


def test_health_and_readiness_differ_once_the_server_ends(client_of, engine: FakeEngine):
    client = client_of()
    for ask in (client.get, client.head):
        assert (ask("/health").status_code, ask("/ready").status_code) == (200, 200)
    engine.close()
    for ask in (client.get, client.head):
        assert (ask("/health").status_code, ask("/ready").status_code) == (503, 503)
    assert client.post("/health").headers["allow"] == "GET"


def test_unknown_routes_and_methods_are_errors_in_the_same_form(client):
    for route in ("/nothing", "/health/", "/v1/spec/"):
        assert error_of(client.get(route, follow_redirects=False)).error.code == 404
    wrong = client.get("/v1/score")
    assert error_of(wrong).error.code == 405
    assert wrong.headers["allow"] == "POST"
    assert error_of(client.post("/admin/swap", json={"model": "tiny", "folder": "/x"})).error.code == 404


def test_a_token_is_wanted_everywhere_but_for_probes(client_of):
    client = client_of(HttpConfig(token=b"0123456789abcdef"))
    for route in ("/v1/spec", "/v1/models", "/metrics", "/openapi.json", "/nothing"):
        assert error_of(client.get(route)).error.code == 401
        assert client.get(route, headers={"authorization": "Bearer 0123456789abcdeF"}).status_code == 401
    assert client.get("/v1/spec", headers={"authorization": "bearer 0123456789abcdef"}).status_code == 200
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_names_that_are_not_this_machines_are_misdirected(client_of):
    client = client_of(HttpConfig(hosts=("127.0.0.1", "localhost", "[::1]")))
    for host, status in {"evil.example": 421, "127.0.0.1:8000": 200, "localhost": 200, "[::1]:80": 200}.items():
        assert client.get("/v1/spec", headers={"host": host}).status_code == status
    error = error_of(client.get("/v1/spec", headers={"host": "reward"})).error
    assert "nginx: proxy_set_header Host 127.0.0.1" in error.message, "as a proxy with an upstream of this name calls"


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), None])
def test_an_answer_that_is_not_whole_is_not_handed_on(client, engine, monkeypatch, spoil):
    made = engine._scored

    def spoiled(prepared):
        good = made(prepared)
        groups = [group.model_copy(update={"scores": [spoil] * len(group.scores)}) for group in good.groups]
        return Scored(model=good.model, digest=good.digest, groups=groups, usage=good.usage)

    monkeypatch.setattr(engine, "_scored", spoiled)
    error = error_of(client.post("/v1/score", json={"prompt": "x", "replies": ["y"]})).error
    assert (error.code, error.type) == (500, "engine_failed")


def test_an_answer_with_too_few_groups_is_not_handed_on(client, engine, monkeypatch):
    made = engine._scored

    def short(prepared):
        good = made(prepared)
        return Scored(model=good.model, digest=good.digest, groups=good.groups[1:], usage=good.usage)

    monkeypatch.setattr(engine, "_scored", short)
    assert client.post("/v1/score", json=FORMS[1]).status_code == 500


def test_a_swap_between_tokens_and_queue_mixes_no_models(client, engine: FakeEngine, tmp_path, monkeypatch):
    (tmp_path / "model").write_text("new")
    tokenise, calls = engine.tokenise, []

    def swapped_meanwhile(texts, name):
        told = tokenise(texts, name)
        calls.append(told)
        if len(calls) == 1:
            engine.swap("tiny", tmp_path)
        return told

    monkeypatch.setattr(engine, "tokenise", swapped_meanwhile)
    response = client.post("/classify", json={"input": "x"})
    digest = engine.digests["tiny"]
    assert [digest == told for told, _ in calls] == [False, True], "tokenised anew for the new model"
    assert response.headers[DIGEST_HEADER] == digest
    assert response.json()["data"][0]["probs"] == [fake_score(digest, b"x")]
