"""A live endpoint is verified: every sabotage of it is caught under its right name, in every engine's words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from harness.fake_engine import SABOTAGES, FakeEngine, app_of, running
from live_endpoint import engine, folder, messages_on_page, said, url
from rewardlab.analysis.endpoint_faults import Finding, Heard, find, of_one_arithmetic
from rewardlab.client.dialects import VLLM_CLASSIFY
from rewardlab.core.spec import read_spec
from rewardlab.serve.folders.export import export
from rewardlab.serve.verifying.endpoints import Foreign, Wire
from rewardlab.serve.verifying.live import hear

__all__ = ["engine", "folder", "url"]


TEXTUAL = ("texts", "messages")
EVERY = ("token_ids", *TEXTUAL)
CAUGHT = {
    # sabotage -> (the fault, the forms that show it)
    "sigmoid": ("sigmoid", EVERY),
    "softmax": ("softmax", EVERY),
    "no_template": ("no_template", ("messages",)),
    "other_template": ("other_template", ("messages",)),
    "generation_prompt": ("generation_prompt", ("messages",)),
    "double_bos": ("double_bos", EVERY),
    "double_bos in texts": ("double_bos", TEXTUAL),
    "missing_bos": ("missing_bos", TEXTUAL),
    "other_tokens": ("other_tokens", ("texts",)),
    "shifted_position": ("shifted_position", EVERY),
    "dropped_rope": ("dropped_rope", EVERY),
    "dropped_rope_scaling": ("dropped_rope_scaling", EVERY),
    "zero_head": ("zero_head", EVERY),
    "bf16": ("precision_mismatch", EVERY),
    "precision_mismatch": ("precision_mismatch", EVERY),
    "stale_weights": ("stale_weights", EVERY),
    "truncates": ("truncates", EVERY),
    "not_finite": ("not_finite", EVERY),
    "wrong_count": ("wrong_count", ("token_ids",)),
    "mixed": ("mixed", ("token_ids",)),
    "refuses": ("refuses", EVERY),
    "failed": ("failed", EVERY),
}
HARMLESS = ("none", "latency")
"""Besides `completed`, which is what a server of rendered texts has to do."""
FORMS_OF = {"vllm": EVERY, "sglang": ("token_ids", "texts"), "rewardlab": ("token_ids", "messages")}


def test_the_page_holds_no_other_messages_than_these() -> None:
    told = len([name for name in CAUGHT if name not in ("double_bos", "precision_mismatch")])
    assert len(messages_on_page()) == told + 1 + 3, "and that of precision, and those of three frameworks"
    assert len(set(messages_on_page())) == len(messages_on_page())


def test_every_sabotage_is_in_the_table() -> None:
    assert set(CAUGHT) | set(HARMLESS) | {"completed"} == set(SABOTAGES)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("dialect", "sabotage"),
    [
        *(("vllm", name) for name in CAUGHT),
        *(
            ("rewardlab", name)
            for name in ("sigmoid", "double_bos", "other_template", "zero_head", "bf16", "not_finite")
        ),
        *(("sglang", name) for name in ("sigmoid", "double_bos in texts", "other_tokens", "truncates")),
    ],
)
def test_every_sabotage_of_an_endpoint_is_caught_under_its_name(
    engine, url, folder, capsys, tmp_path, dialect, sabotage
):
    fault, forms = CAUGHT[sabotage]
    engine.be(sabotage, dialect=dialect)
    status, out, err = said(capsys, url, "--model", folder, "--json", tmp_path / "found.json")
    assert status == 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["faults"] == [fault]
    assert found["right"] is False
    wrong = {one["form"]: not one["right"] for one in found["forms"]}
    assert wrong == {form: form in forms for form in FORMS_OF[dialect]}
    assert err == f"error: {found['verdict']}\n"
    assert f"({fault})" in err
    assert out.count("WRONG") == sum(wrong.values())
    if dialect == "vllm" and sabotage not in ("double_bos", "precision_mismatch"):
        assert err.replace(url, "http://127.0.0.1:8000").strip() in messages_on_page(), "docs/wrong-scores.md"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "rewardlab"])
@pytest.mark.parametrize("harmless", HARMLESS)
def test_a_sound_endpoint_is_right_in_every_form(engine, url, folder, capsys, dialect, harmless):
    engine.be(harmless, dialect=dialect)
    status, out, _ = said(capsys, url, "--model", folder)
    assert status == 0
    assert "WRONG" not in out
    assert f"{url}: verified: the scores are those of the model, in float32." in out
    asked = [body for path, body in engine.asked if path == "/classify" and dialect == "vllm"]
    assert all(body["use_activation"] is False for body in asked)
    textual = len(FORMS_OF[dialect]) - 1
    assert out.count("control tokens typed in a reply are obeyed") == (0 if dialect == "rewardlab" else textual)


@pytest.mark.slow
def test_our_own_server_is_compared_with_what_it_says_of_itself(engine, url, capsys):
    engine.be(dialect="rewardlab")
    status, out, _ = said(capsys, url)
    assert status == 0
    assert "8 canaries of the server itself" in out
    assert "--model FOLDER also finds stale weights" in out
    engine.be("shifted_position", dialect="rewardlab")
    status, _, err = said(capsys, url)
    assert status == 2
    assert "the score read one token before the end (shifted_position)" in err


def test_another_digest_is_stale_weights_whatever_the_scores(engine, url, folder, capsys):
    engine.be("stale_weights", dialect="rewardlab", digest="f" * 64)
    assert "other weights" in said(capsys, url, "--model", folder)[2]
    engine.be(dialect="rewardlab", digest="f" * 64)
    status, _, err = said(capsys, url, "--model", folder)
    assert status == 2
    assert "(stale_weights): its digest is ffffffffffff, the folder's is" in err


@pytest.fixture(scope="module")
def half(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for engines in bfloat16."""
    target = tmp_path_factory.mktemp("half") / "rm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewardlab.serve.folders.export.verify_in_clean_process", lambda folder: None)
        export(folder, target, dtype="bfloat16")
    return target


@pytest.mark.slow
def test_the_precision_is_found_out_and_held_against_what_was_expected(half, capsys):
    engine = FakeEngine(half)
    with running(app_of(engine)) as url:
        engine.be("bf16")
        status, out, _ = said(capsys, url, "--model", half)
        assert status == 0
        assert "computed in bfloat16, as far as the references of each precision tell" in out
        assert "in half precision another model passes whose canaries score within 0.15 of this one's" in out
        assert said(capsys, url, "--model", half, "--precision", "bf16")[0] == 0
        status, _, err = said(capsys, url, "--model", half, "--precision", "fp32")
        assert status == 2
        assert "(precision): the scores are those of bfloat16, where float32 was expected" in err
        assert err.replace(url, "http://127.0.0.1:8000").strip() in messages_on_page()
        engine.be()
        status, _, err = said(capsys, url, "--model", half, "--precision", "bf16")
        assert status == 2
        assert "(precision): the scores are those of float32, where bfloat16 was expected" in err
        engine.be("bf16", dialect="rewardlab", dtype="float32")
        assert "(precision)" in said(capsys, url)[2], "a server that says another precision than it has"


@pytest.mark.slow
def test_an_endpoint_that_does_not_count_tokens_is_judged_by_scores_alone(engine, url, folder, capsys):
    engine.be("truncates", reports_tokens=False)
    assert "(truncates): conversations of up to " in said(capsys, url, "--model", folder)[2]


@pytest.mark.slow
def test_a_form_that_is_not_taken_is_left_out_and_an_endpoint_that_takes_none_fails(engine, url, folder, capsys):
    engine.be(refuses_ids=True)
    status, out, _ = said(capsys, url, "--model", folder)
    assert status == 0
    assert "token ids, POST /classify: not taken (conversation 0: HTTP 400" in out
    engine.be("other_template", refuses_ids=True)
    assert "(other_template)" in said(capsys, url, "--model", folder)[2], "texts show that the model is right"
    engine.be("stale_weights", refuses_ids=True)
    status, _, err = said(capsys, url, "--model", folder)
    assert status == 2
    assert "(stale_weights), or another chat template" in err, "which of the two cannot be told without token ids"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "FOLDER", "--timeout-s", "0.01"], "the endpoint does not answer with scores (failed): "),
        ([], "it is not a rewardlab server, so it does not say what its scores should be. Give the folder"),
        (["--token-env", "NOSUCH_TOKEN"], "--token-env NOSUCH_TOKEN: the environment has no such variable"),
        (["--as", "verl"], "--as verl: give the folder that the endpoint is to serve"),
    ],
)
def test_what_cannot_be_verified_is_told_in_a_sentence(engine, url, folder, capsys, arguments, message):
    engine.be("latency")
    status, _, err = said(capsys, url, *(folder if word == "FOLDER" else word for word in arguments))
    assert status == 2
    assert err.startswith("error: ")
    assert message in err


def test_addresses_and_engines_that_are_none_are_told(engine, url, folder, capsys):
    engine.be(dialect="other")
    assert "no server that this client knows: it has no /v1/spec" in said(capsys, url, "--model", folder)[2]
    assert "is not an address of http" in said(capsys, "http://", "--model", folder)[2]
    _, out, err = said(capsys, "http://me:secret-1@127.0.0.1:9", "--model", folder)
    assert "it holds a user or a password" in err
    assert "--token-env NAME" in err
    assert "secret-1" not in out + err
    dead = said(capsys, "http://127.0.0.1:9", "--model", folder)[2]
    assert "ConnectError" in dead
    assert dead.endswith("refused. See that the server is up and its address is right.\n")
    assert "--model is for a live endpoint, and x is a folder" in said(capsys, "x", "--model", folder)[2]
    engine.be(dialect="rewardlab")
    assert "has no 'b'; it has rm" in said(capsys, url, "--served-name", "b")[2]


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "Give its token: --token-env NAME, an environment variable that holds it."),
        (503, "Ask again when it is ready."),
        (400, "See that the address is right."),
    ],
)
def test_what_an_endpoint_refuses_before_it_says_what_it_is_is_told_with_a_remedy(capsys, status, remedy):
    async def refuse(request: Request) -> Response:
        return PlainTextResponse("no", status_code=status)

    with running(Starlette(routes=[Route("/v1/spec", refuse)])) as url:
        assert said(capsys, url)[2] == f"error: {url}: GET /v1/spec failed: HTTP {status}: no. {remedy}\n"


@pytest.mark.parametrize("body", ["[" * 100_000, '{"a": ' * 100_000, "{"])
def test_an_answer_that_no_parser_reads_is_told_as_no_json(capsys, body):
    async def answer(request: Request) -> Response:
        return PlainTextResponse(body)

    with running(Starlette(routes=[Route("/v1/spec", answer)])) as url:
        assert f"{url}: GET /v1/spec failed: no JSON: " in said(capsys, url)[2]


@pytest.mark.parametrize(
    ("score", "tokens", "fault", "counted"),
    [(10**400, 3, "failed", ()), (0.5, {}, "", (None,)), (0.5, "3", "", (None,)), (0.5, 3, "", (3,))],
    ids=["too large", "counts of another kind", "counts as text", "as they should be"],
)
def test_numbers_of_an_odd_kind_are_a_failure_or_not_counted(score, tokens, fault, counted):
    class Odd(Wire):
        def post(self, path: str, body: object) -> object:
            return {"data": [{"index": 0, "probs": [score]}], "usage": {"prompt_tokens": tokens}}

    with Odd("http://127.0.0.1:9") as wire:
        heard = hear(wire, Foreign(spoken=VLLM_CLASSIFY), "token_ids", [[1, 2, 3]])
    assert (heard.fault, heard.num_tokens) == (fault, counted)


@pytest.mark.slow
def test_the_token_is_sent_and_never_shown(engine, url, folder, capsys, monkeypatch):
    engine.be(token="secret-1")
    status, out, err = said(capsys, url, "--model", folder)
    assert status == 2
    assert "HTTP 401" in err
    monkeypatch.setenv("RM_TOKEN", "secret-1")
    status, out, err = said(capsys, url, "--model", folder, "--token-env", "RM_TOKEN")
    assert status == 0
    assert "secret-1" not in out + err


@pytest.mark.slow
def test_of_several_models_one_is_named(engine, url, folder, capsys):
    engine.be(names=("other", "rm"))
    status, _, err = said(capsys, url, "--model", folder)
    assert status == 2
    assert "has several models; give one of other, rm" in err
    assert "has no 'b'; it has other, rm" in said(capsys, url, "--model", folder, "--served-name", "b")[2]
    assert said(capsys, url, "--model", folder, "--served-name", "rm")[0] == 0
    assert {body["model"] for _, body in engine.asked} == {"rm"}
    engine.be(dialect="sglang")
    assert "takes no name at /classify" in said(capsys, url, "--model", folder, "--served-name", "rm")[2]


@pytest.mark.slow
def test_the_path_of_an_address_is_before_every_route(engine, folder, capsys):
    engine.be(dialect="rewardlab")
    with running(Starlette(routes=[Mount("/some/prefix", app_of(engine))])) as url:
        assert said(capsys, f"{url}/some/prefix/", "--model", folder)[0] == 0
        assert said(capsys, url, "--model", folder)[0] == 2


def test_scores_that_depend_on_their_neighbours_are_held_to_the_precision_that_was_found(folder):
    canaries = read_spec(folder).canaries
    scores = tuple(canary.score for canary in canaries)
    heard = Heard(form="token_ids", route="POST /classify", scores=scores, together=tuple(one + 0.01 for one in scores))
    found = find(canaries, heard)
    assert (found.faults, found.precision) == (("mixed",), "float32")
    assert find(canaries, replace(heard, together=tuple(one + 5e-5 for one in scores))).faults == ()
    halves = [replace(canary, references={"bfloat16": canary.score + 0.02}) for canary in canaries]
    rounded = replace(heard, scores=tuple(one + 0.02 for one in scores), together=tuple(one + 0.04 for one in scores))
    assert find(halves, rounded).faults == (), "half precision moves scores by as much"


def test_a_form_in_half_precision_beside_one_that_is_exactly_float32s_reads_other_tokens(folder):
    canaries = read_spec(folder).canaries
    exact = tuple(one.score for one in canaries)
    near = tuple(one.score + 0.04 for one in canaries)
    ids = Finding(heard=Heard(form="token_ids", route="", scores=exact), faults=(), precision="float32", distance=0.0)
    texts = Finding(heard=Heard(form="texts", route="", scores=near), faults=(), precision="bfloat16", distance=0.04)
    expected = replace(texts, faults=("precision",), heard=replace(texts.heard, said="float32 was expected"))
    for other in (texts, expected):
        found = of_one_arithmetic(canaries, [ids, other])
        assert found[0] == ids
        assert (found[1].faults, found[1].precision, found[1].heard.said) == (("unknown",), "", "")
        assert found[1].distance == pytest.approx(0.04, rel=0.5)
    both = [replace(ids, precision="bfloat16"), texts]
    assert of_one_arithmetic(canaries, both) == both
