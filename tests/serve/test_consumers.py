"""`rewardlab verify URL --as`: what OpenRLHF, verl and slime would get of an endpoint, and what to change."""

from __future__ import annotations

import pytest

from live_endpoint import engine, folder, messages_on_page, said, url

__all__ = ["engine", "folder", "url"]


def test_verl_sends_one_rendered_text_without_its_bos_and_reads_the_raw_score(engine, url, folder, capsys):
    engine.be(adds_bos=True)
    status, out, _ = said(capsys, url, "--model", folder, "--as", "verl")
    assert status == 0
    assert f"{url}: verified: verl gets the scores of the model, in float32" in out
    assert "verl takes <|im_end|> out of replies: 1 canaries that hold it are left out" in out
    bodies = [body for path, body in engine.asked if path == "/classify"]
    assert set(bodies[0]) == {"model", "input", "use_activation"}
    assert bodies[0]["input"].startswith("user\n"), "the BOS is cut off"


def test_the_body_on_a_page_of_verl_is_shown_to_give_probabilities(engine, url, folder, capsys):
    engine.be(adds_bos=True)
    _, out, _ = said(capsys, url, "--model", folder, "--as", "verl")
    assert 'a function copied from its documentation ("activation": false) would get: a sigmoid applied' in out
    assert 'Change "activation" to "use_activation" in your reward function' in out
    assert any("activation" in body for _, body in engine.asked)


@pytest.mark.slow
def test_verl_reads_no_bos_where_the_engine_adds_none(engine, url, folder, capsys):
    engine.be()
    status, _, err = said(capsys, url, "--model", folder, "--as", "verl")
    assert status == 2
    assert "verl gets wrong scores: no BOS token in front of the conversation" in err
    assert "(missing_bos)" in err
    assert "verl cuts the BOS off and counts on the engine to add one" in err
    assert err.replace(url, "http://127.0.0.1:8000").strip() in messages_on_page()


def test_verl_asks_sglang_for_embeddings(engine, url, folder, capsys):
    engine.be(dialect="sglang", adds_bos=True)
    assert said(capsys, url, "--model", folder, "--as", "verl")[0] == 0
    assert {path for path, _ in engine.asked} == {"/v1/embeddings"}


@pytest.mark.parametrize(
    ("consumer", "path", "fields"),
    [("openrlhf", "", {"query", "prompts", "labels"}), ("slime", "/rm", {"prompt", "response", "label"})],
)
def test_what_the_template_writes_behind_a_reply_is_in_no_text_of_a_policy(
    engine, url, folder, capsys, consumer, path, fields
):
    """The template ends a turn with a line break behind its end token, where the score is read."""
    engine.be()
    status, _, err = said(capsys, f"{url}{path}", "--model", folder, "--as", consumer)
    assert status == 2
    assert "gets wrong scores: the score read one token before the end (shifted_position)" in err
    assert "which sends messages" in err
    assert err.replace(url, "http://127.0.0.1:8000").strip() in messages_on_page()
    bodies = [body for _, body in engine.asked]
    assert all(set(body) == fields for body in bodies)
    sent = bodies[0]["query"][0] if consumer == "openrlhf" else bodies[0]["prompt"] + bodies[0]["response"]
    assert sent.endswith("Lisbon.<|im_end|>")


@pytest.mark.parametrize(("consumer", "path"), [("openrlhf", ""), ("slime", "/rm")])
def test_a_server_that_completes_the_rendering_gives_them_the_right_scores(engine, url, folder, capsys, consumer, path):
    engine.be("completed")
    status, out, _ = said(capsys, f"{url}{path}", "--model", folder, "--as", consumer)
    assert status == 0
    assert "gets the scores of the model, in float32" in out


@pytest.mark.parametrize(
    ("consumer", "message"),
    [
        ("openrlhf", 'OpenRLHF logs "Failed to fetch reward" and goes on without a reward'),
        ("slime", "slime retries ten times, also what was refused for good"),
        ("verl", "verl asks /classify of vLLM and /v1/embeddings of SGLang"),
    ],
)
def test_an_endpoint_without_their_route_is_told_with_what_they_do_then(engine, url, folder, capsys, consumer, message):
    engine.be("failed", dialect="rewardlab")
    status, _, err = said(capsys, url, "--model", folder, "--as", consumer)
    assert status == 2
    assert "(failed)" in err
    assert message in err


def test_the_model_is_named_where_a_framework_names_one(engine, url, folder, capsys):
    engine.be(adds_bos=True, names=("other", "rm"))
    assert "has several models; give one of other, rm" in said(capsys, url, "--model", folder, "--as", "verl")[2]
    assert said(capsys, url, "--model", folder, "--as", "verl", "--served-name", "rm")[0] == 0
    assert {body["model"] for _, body in engine.asked} == {"rm"}
    engine.be("completed", names=("other", "rm"))
    _, _, err = said(capsys, url, "--model", folder, "--as", "openrlhf", "--served-name", "rm")
    assert "--served-name rm: openrlhf names no model" in err
    engine.be("completed", dialect="rewardlab", names=("other", "rm"))
    _, _, err = said(capsys, url, "--model", folder, "--as", "openrlhf", "--served-name", "rm")
    assert "so the server's first one answers it, other" in err
    assert said(capsys, url, "--model", folder, "--as", "openrlhf", "--served-name", "other")[0] == 0


def test_another_digest_is_stale_weights_for_every_framework(engine, url, folder, capsys):
    engine.be("completed", dialect="rewardlab", digest="f" * 64)
    status, _, err = said(capsys, url, "--model", folder, "--as", "openrlhf")
    assert status == 2
    assert "(stale_weights): its digest is ffffffffffff, the folder's is" in err


def test_verl_is_not_told_to_start_vllm_where_our_own_server_answers(engine, url, folder, capsys):
    engine.be(dialect="rewardlab")
    _, _, err = said(capsys, url, "--model", folder, "--as", "verl")
    assert "(missing_bos)" in err
    assert "a rewardlab server adds no token to texts" in err
    assert "start vLLM" not in err
