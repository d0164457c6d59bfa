"""`rewardlab gold sample` from servers: seeds, faults, kills, parts, and what is taken over."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chat_server
from chat_server import ChatServer, chatting, reply_of
from killing import killed_while_keeping, run_program
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError, EndpointError
from rewardlab.core.types import Message
from rewardlab.gold.files.parts import parts_of
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.sampling.config import DrawConfig, SampleConfig, SamplerConfig
from rewardlab.gold.sampling.report import text_report
from rewardlab.gold.sampling.run import Sampled, sample

QUESTIONS = [f"question {number}" for number in range(12)]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    import stamina

    monkeypatch.setattr("rewardlab.client.http.MAX_WAIT_S", 0.01)
    stamina.set_testing(False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(QUESTIONS))
    return path


@pytest.fixture
def server() -> ChatServer:
    return ChatServer()


@pytest.fixture
def url(server: ChatServer) -> Iterator[str]:
    with chatting(server) as address:
        yield address


def config(prompts: Path, *urls: str, output: str = "samples.jsonl", num: int = 3, **more: Any) -> SampleConfig:
    sampler = {"attempts": 2, "timeout_s": 5.0, "concurrency": 4} | more.pop("sampler", {})
    draw = {"num_responses": num, "max_tokens": 16} | more.pop("draw", {})
    return SampleConfig(
        prompts=str(prompts),
        output=prompts.parent / output,
        draw=DrawConfig(**draw),
        sampler=SamplerConfig(backend="http", url=urls, **sampler),
        **more,
    )


def content(found: Sampled) -> tuple[bytes, bytes]:
    return found.place.rows.read_bytes(), found.place.twin.read_bytes()


@pytest.fixture
def undisturbed(prompts: Path, url: str) -> tuple[bytes, bytes]:
    """What a run writes that nothing disturbs."""
    return content(sample(config(prompts, url, output="undisturbed.jsonl")))


def test_every_reply_is_asked_for_with_a_seed_of_its_own(prompts, url, server) -> None:
    found = sample(config(prompts, url))
    seeds = [body["seed"] for body in server.asked]
    assert len(set(seeds)) == len(seeds) == 36
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert {(body["temperature"], body["top_p"], body["max_tokens"], body["n"]) for body in server.asked} == {
        (1.0, 1.0, 16, 1)
    }
    rows = list(read_gold_rows(found.place.rows))
    for row, question in zip(rows, QUESTIONS, strict=True):
        turns = [{"role": "user", "content": question}]
        assert [turn.as_dict() for turn in row.prompt] == turns
        assert list(row.responses) == [reply_of(turns, facts["seed"]) for facts in row.samples]
        for text, facts in zip(row.responses, row.samples, strict=True):
            num = len(str(text).split())
            assert facts["tokens"] == num
            assert facts["logprob"] == pytest.approx(-0.5 * num)
            assert facts["stop"] == ("length" if num > 6 else "stop")
    assert found.counts["cut"] == sum(sum(row.is_cut) for row in rows) > 0


def test_the_twin_is_the_layout_with_numbered_responses_in_the_order_of_prompts(prompts, url) -> None:
    found = sample(config(prompts, url))
    rows = list(read_gold_rows(found.place.rows))
    assert json.loads(found.place.twin.read_text()) == [
        {f"response_{k + 1}": text for k, text in enumerate(row.responses)} for row in rows
    ]


FAULTS = {
    "too many requests": [429] * 5,
    "an error inside": [500] * 3,
    "starting": [503, 503],
    "a broken connection": ["drop"] * 4,
    "no choice": ["none"] * 3,
    "too many choices": ["two"],
    "no text": ["null"],
    "no JSON": ["garbage"],
    "out of order": [0.2, 0.0, 0.1, 0.0, 0.15],
    "all of it": [429, "drop", 500, "none", 0.1, "garbage", 503, "null", "two"],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_faults_that_pass_change_nothing(prompts, url, server, undisturbed, faults) -> None:
    server.faults = list(faults)
    assert content(sample(config(prompts, url))) == undisturbed
    assert not server.faults


def test_a_server_that_hangs_is_asked_again(prompts, url, server, undisturbed) -> None:
    server.faults = [0.8]
    assert content(sample(config(prompts, url, sampler={"timeout_s": 0.4}))) == undisturbed


def test_a_log_probability_that_is_no_number_is_left_out(prompts, url, server) -> None:
    server.faults = ["nan"]
    found = sample(config(prompts, url, num=1))
    lacking = [row for row in read_gold_rows(found.place.rows) if "logprob" not in row.samples[0]]
    assert len(lacking) == 1
    assert lacking[0].responses[0]


def test_what_no_server_should_say_of_its_model_and_tokens_ends_nothing(prompts, url, server, monkeypatch) -> None:
    """The name of a model has half a surrogate pair, its root is NaN, and counts and log-probabilities overflow."""
    server.models, server.root = ("tiny\ud800",), math.nan
    real = chat_server._answer

    def hostile(*asked: Any) -> dict[str, Any]:
        answer = real(*asked)
        answer["usage"] = {"completion_tokens": 10**400, "prompt_tokens": -1}
        answer["choices"][0]["logprobs"] = {"content": [{"logprob": -1e308}] * 20}
        return answer

    monkeypatch.setattr(chat_server, "_answer", hostile)
    found = sample(config(prompts, url))
    assert {body["model"] for body in server.asked} == {"tiny\ud800"}
    for row in read_gold_rows(found.place.rows):
        assert all(row.responses)
        assert not any({"tokens", "logprob"} & facts.keys() for facts in row.samples)
    assert found.counts["replies"] == 36


@pytest.mark.slow
def test_killed_ten_times_it_writes_what_a_run_in_one_piece_writes(prompts, url, server, undisturbed) -> None:
    asked = config(prompts, url)
    # Two requests at a time: at most two replies are kept together, so ten kills at the second time leave some to do.
    killed = run_program(killed_while_keeping("import rewardlab.gold.sampling.run", at=2), ["10", *words(asked)])
    assert killed.stdout.splitlines() == [f"{-signal.SIGKILL} False"] * 10, killed.stderr
    kept = (prompts.parent / ".samples.jsonl.partial" / "kept.jsonl").read_text().count("\n")
    before = len(server.asked)
    assert content(sample(asked)) == undisturbed
    assert len(server.asked) - before == 36 - kept, "what the killed runs finished is not asked for again"
    assert kept >= 10


def test_a_prompt_that_a_server_cannot_answer_costs_no_other(prompts, url, server, undisturbed) -> None:
    server.poisoned = "question 5"
    found = sample(config(prompts, url))
    rows = list(read_gold_rows(found.place.rows))
    assert rows[5].responses == (None, None, None)
    assert all("500" in facts["error"] for facts in rows[5].samples)
    assert found.counts["errors"] == 3
    assert all(None not in row.responses for row in rows if row.id != "5")
    server.poisoned = ""
    before = len(server.asked)
    assert content(sample(config(prompts, url))) == undisturbed
    assert len(server.asked) - before == 3, "only what was missing is asked for again"


def test_a_refused_request_is_asked_once_and_told(prompts, url, server, capsys) -> None:
    server.refused = "question 3"
    main(words(config(prompts, url)))
    assert "3 replies are missing" in capsys.readouterr().out
    assert sum("question 3" in body["messages"][-1]["content"] for body in server.asked) == 3


def words(asked: SampleConfig) -> list[str]:
    flags = ["--prompts", asked.prompts, "--backend", "http"]
    flags += ["--url", *asked.sampler.url, "--num-responses", "3", "--max-tokens", "16", "--attempts", "2"]
    return ["gold", "sample", *flags, "--concurrency", "2", "--output", str(asked.output)]


def test_too_many_errors_fail_after_the_file_is_written(prompts, url, server) -> None:
    server.refused = "question"
    with pytest.raises(DataError, match="36 of 36 replies failed, more than --max-error-fraction 0.1"):
        sample(config(prompts, url))
    assert len(list(read_gold_rows(prompts.parent / "samples.jsonl"))) == 12


def test_a_server_that_is_gone_ends_with_what_is_kept_and_another_goes_on(prompts, url, server, undisturbed, log):
    gone = ChatServer(faults=[None] * 6 + [503] * 500)
    with chatting(gone) as dying, pytest.raises(EndpointError, match="what is finished is kept"):
        sample(config(prompts, dying))
    assert "results are kept in" in log.text
    before = len(server.asked)
    assert content(sample(config(prompts, url))) == undisturbed
    assert len(server.asked) - before == 30


def test_several_servers_share_the_work_and_one_may_die(prompts, url, server, undisturbed, log) -> None:
    other = ChatServer(faults=[None] * 4 + ["drop"] * 500)
    before = len(server.asked)
    with chatting(other) as dying:
        assert content(sample(config(prompts, url, dying))) == undisturbed
    assert len(server.asked) - before >= 20
    assert other.asked


def test_servers_of_different_models_are_refused(prompts, url) -> None:
    with chatting(ChatServer(models=("another",))) as other, pytest.raises(ConfigError, match="different models"):
        sample(config(prompts, url, other))


def test_parts_together_are_the_whole(prompts, url) -> None:
    whole = list(read_gold_rows(sample(config(prompts, url)).place.rows))
    for number in range(1, 6):
        sample(config(prompts, url, output="divided.jsonl", shard=f"{number}/5"))
    divided = prompts.parent / "divided.jsonl"
    assert len(parts_of(divided)) == 5
    assert [row.as_json() for row in read_gold_rows(divided)] == [row.as_json() for row in whole]


def test_a_prompt_that_comes_again_in_another_part_has_other_seeds(tmp_path, url, server) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["the same"] * 4 + ["another", "the same"]))
    whole = sample(config(prompts, url, output="whole.jsonl"))
    asked = sorted(body["seed"] for body in server.asked)
    assert len(set(asked)) == len(asked) == 18
    for number in (1, 2, 3):
        sample(config(prompts, url, output="divided.jsonl", shard=f"{number}/3"))
    parts = [path.read_bytes() for path in parts_of(tmp_path / "divided.jsonl")]
    assert b"".join(parts) == whole.place.rows.read_bytes()


def test_more_replies_keep_those_that_are_there(prompts, url, server) -> None:
    few = list(read_gold_rows(sample(config(prompts, url, num=2)).place.rows))
    before = len(server.asked)
    with pytest.raises(ConfigError, match="num_responses was 2, now 4"):
        sample(config(prompts, url, num=4))
    many = list(read_gold_rows(sample(config(prompts, url, num=4, overwrite=True)).place.rows))
    assert [row.responses[:2] for row in many] == [row.responses for row in few]
    assert len(server.asked) - before == 24


def test_another_temperature_draws_everything_anew(prompts, url, server) -> None:
    sample(config(prompts, url))
    before = len(server.asked)
    sample(config(prompts, url, draw={"temperature": 0.5}, overwrite=True))
    assert len(server.asked) - before == 36


def test_a_complete_output_asks_nobody(prompts, url, server, capsys) -> None:
    main(words(config(prompts, url)))
    before = len(server.asked)
    main(words(config(prompts, url)))
    assert len(server.asked) == before
    assert "(all of them before)" in capsys.readouterr().out


def test_changed_prompts_are_refused_by_their_hash(prompts, url) -> None:
    sample(config(prompts, url))
    prompts.write_text(json.dumps([*QUESTIONS[:-1], "another"]))
    with pytest.raises(ConfigError, match=r"prompts\.json was .*, now .*--overwrite"):
        sample(config(prompts, url))


def test_a_prompt_that_comes_twice_has_other_seeds_and_replies(prompts, url) -> None:
    prompts.write_text(json.dumps(["the same", "the same"]))
    first, second = read_gold_rows(sample(config(prompts, url)).place.rows)
    assert {facts["seed"] for facts in first.samples}.isdisjoint(facts["seed"] for facts in second.samples)


def test_a_part_without_prompts_is_refused(prompts, url) -> None:
    with pytest.raises(ConfigError, match="this part has no rows, since there are 12"):
        sample(config(prompts, url, shard="1/13"))


def test_prompts_of_preferences_that_end_with_the_assistant_are_left_out_and_counted(prompts, url, log) -> None:
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Well,"}]
    rows = [{"prompt": begun, "chosen": "a", "rejected": "b"}, {"prompt": "hi", "chosen": "a", "rejected": "b"}]
    path = prompts.with_name("preferences.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sample(config(path, url)).counts["prompts"] == 1
    assert "1 prompt ends with a turn of the assistant and is left out" in log.text


def test_a_prompt_with_half_a_surrogate_pair_costs_no_other(prompts, url) -> None:
    prompts.write_text(json.dumps(["whole", "half \ud83d"]))
    whole, half = read_gold_rows(sample(config(prompts, url, max_error_fraction=1)).place.rows)
    assert None not in whole.responses
    assert half.responses == (None, None, None)
    assert "half of a surrogate pair" in half.samples[0]["error"]


def test_a_reply_that_the_server_broke_off_is_no_reply(prompts, url, server, undisturbed) -> None:
    server.faults = ["abort", "abort"]
    assert content(sample(config(prompts, url))) == undisturbed
    assert not server.faults


def test_flags_that_would_change_nothing_are_refused(prompts, url) -> None:
    with pytest.raises(ConfigError, match="--precision: only with --backend local"):
        config(prompts, url, sampler={"precision": "bf16"})
    with pytest.raises(ConfigError, match="--served-model-name: only with --backend http"):
        SamplerConfig(served_model_name="x")


def test_a_system_turn_goes_to_the_server_and_into_the_rows(prompts, url, server) -> None:
    found = sample(config(prompts, url, num=1, system=""))
    assert all(body["messages"][0] == {"role": "system", "content": ""} for body in server.asked)
    assert all(row.prompt[0].role == "system" for row in read_gold_rows(found.place.rows))


def test_arguments_of_the_template_go_to_the_server(prompts, url, server) -> None:
    sample(config(prompts, url, num=1, draw={"template_arguments": ("enable_thinking=false",)}))
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.asked)
    assert not any("template_arguments" in body for body in server.asked)
    with pytest.raises(ConfigError, match="wanted NAME=VALUE"):
        config(prompts, url, draw={"template_arguments": ("enable_thinking",)})


def test_replies_that_hold_thoughts_are_counted_and_told(prompts, url, monkeypatch) -> None:
    found = sample(config(prompts, url, num=1))
    assert found.counts["thoughts"] == 0
    assert "thoughts" not in text_report(found)
    monkeypatch.setattr("rewardlab.gold.sampling.run.THOUGHTS", ("",))
    found = sample(config(prompts, url, num=1, output="again.jsonl"))
    assert found.counts["thoughts"] == found.counts["replies"] > 0
    assert f"{found.counts['thoughts']:,} (100.0%) hold thoughts (<think>)" in text_report(found)


@pytest.mark.slow
def test_flags_of_the_scripts_that_it_replaces(prompts, url) -> None:
    target = prompts.parent / "rm_sft.json"
    asked = ["gold", "sample", "--prompts_path", str(prompts), f"--target_path={target}", "--num_responses", "2"]
    main([*asked, "--backend", "http", "--url", url, "--max-tokens", "16"])
    rows = json.loads(target.read_text())
    assert len(rows) == 12
    assert set(rows[0]) == {"response_1", "response_2"}


def test_a_wrong_name_of_a_model_says_which_there_are(prompts, url) -> None:
    with pytest.raises(ConfigError, match="has no model 'big'; it serves tiny-chat"):
        sample(config(prompts, url, sampler={"served_model_name": "big"}))


def test_a_server_that_is_away_is_told_once(prompts, capsys, log) -> None:
    words = ["--prompts", str(prompts), "--output", str(prompts.parent / "x.jsonl"), "--attempts", "1"]
    with pytest.raises(SystemExit):
        main(["gold", "sample", "--backend", "http", "--url", "http://127.0.0.1:9", *words])
    assert capsys.readouterr().err.count("http://127.0.0.1:9") == 1
    assert "left out" not in log.text
    words[1] = "nope.json"
    with pytest.raises(SystemExit):
        main(["gold", "sample", "--backend", "http", "--url", "http://127.0.0.1:9", *words])
    assert "error: --prompts nope.json, split 'train': no such file." in capsys.readouterr().err


def test_drawn_prompts_in_parts_are_those_of_the_whole(prompts, url) -> None:
    whole = sample(config(prompts, url, limit=7)).place.rows.read_bytes()
    assert whole.count(b"\n") == 7
    parts = [sample(config(prompts, url, limit=7, output="divided.jsonl", shard=f"{k}/3")) for k in (1, 2, 3)]
    assert b"".join(part.place.rows.read_bytes() for part in parts) == whole


def test_another_model_of_the_same_name_does_not_complete_an_output(prompts, url, server) -> None:
    server.refused = "question 3"
    before = content(sample(config(prompts, url)))
    server.refused, server.root = "", "other-weights"
    with pytest.raises(ConfigError, match='by another model than the one that is there now: root was .*"?tiny-chat'):
        sample(config(prompts, url))
    assert content(sample(config(prompts, url, overwrite=True))) != before


def test_the_commit_of_prompts_of_the_hub_is_in_the_manifest(tmp_path, url, monkeypatch) -> None:
    from rewardlab.gold.files.prompts import Prompt
    from rewardlab.gold.sampling import run

    commit = "0" * 40
    one = Prompt(id="0", prompt=(Message("user", "why?"),))
    monkeypatch.setattr(run, "hub_facts", lambda name, split, **_: {"commit": commit})
    monkeypatch.setattr(run, "read_prompts", lambda name, **_: iter([one]))
    given = {"sampler": SamplerConfig(backend="http", url=(url,)), "output": tmp_path / "samples.jsonl"}
    found = sample(SampleConfig(prompts="somebody/prompts", **given))
    assert json.loads(found.place.manifest.read_text())["asked"]["inputs"] == {"somebody/prompts[train]": commit}
    commit = "1" * 40
    with pytest.raises(ConfigError, match=r"somebody/prompts\[train\] was 000"):
        sample(SampleConfig(prompts="somebody/prompts", **given))
