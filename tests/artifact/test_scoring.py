"""A loaded model scores conversations: what it takes, what it refuses, and that company changes nothing."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from artifacts import save
from common import set_layout
from rewardlab.artifact import load as load_module
from rewardlab.artifact.load import load
from rewardlab.core.errors import ArtifactError, RenderError
from rewardlab.model.layers import decoder_layers
from rewardlab.model.rotary import _rotating


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring") / "rm"
    save(folder)
    return folder


REFUSED = """
import rewardlab, sys
from rewardlab.client import RewardClient
from rewardlab.rl import BlockingScorer, RewardScorer
from rewardlab.training.settings.config import RunConfig, TrainingDataConfig
scorer = rewardlab.load(sys.argv[1])
from rewardlab.client.rows import rows_of_conversations, rows_of_groups, rows_of_tokens
turn, reply = {"role": "user", "content": "a"}, [{"role": "assistant", "content": "a"}]
for wrong in (
    lambda: scorer.score("text"),
    lambda: scorer.score([turn]),
    lambda: scorer.score(turn),
    lambda: scorer.score([rewardlab.Message("user", "a")]),
    lambda: scorer.score(["text"]),
    lambda: scorer.score([["text"]]),
    lambda: scorer.score([[3]]),
    lambda: scorer.score_replies("How?", "text"),
    lambda: scorer.score_replies("How?", [3]),
    lambda: scorer.score_replies(turn, ["b"]),
    lambda: scorer.score([None]),
    lambda: scorer.score_replies(float("nan"), ["b"]),
    lambda: scorer.score_replies("How?", None),
    lambda: rows_of_conversations([[*reply], None]),
    lambda: rows_of_groups([("How?", ["b"]), (None, ["b"])]),
    lambda: rows_of_groups([("How?", ["b"]), ("How?", None)]),
    lambda: scorer.score(None),
    lambda: scorer.score(3),
    lambda: rows_of_groups(3),
    lambda: rows_of_groups([("How?", ["b"]), "How?"]),
    lambda: rows_of_tokens(None),
    lambda: BlockingScorer(sys.argv[1]).score(3),
    lambda: RewardScorer(None),
    lambda: RewardScorer([3]),
    lambda: RewardScorer(scorer.model),
    lambda: RewardScorer(scorer),
    lambda: RewardScorer(sys.argv[1], truncate="yes"),
    lambda: RewardScorer(sys.argv[1], client=3),
    lambda: RewardScorer(sys.argv[1], render_fn="x"),
    lambda: RewardScorer(sys.argv[1], token_budget=0),
    lambda: RewardClient("http://127.0.0.1:9", truncate="no"),
    lambda: RewardClient("http://127.0.0.1:9", artifact=3),
    lambda: RewardClient("http://127.0.0.1:9", render_fn=3),
    lambda: rewardlab.load(3),
    lambda: rewardlab.verify(None),
    lambda: rewardlab.verify(sys.argv[1], precision=["fp32"]),
    lambda: rewardlab.load(sys.argv[1], precision=["fp32"]),
    lambda: rewardlab.load(sys.argv[1], attention="share"),
    lambda: rewardlab.load(sys.argv[1], device=1.5),
    lambda: rewardlab.load(sys.argv[1], check="no"),
    lambda: rewardlab.load(sys.argv[1], trust_remote_code="false"),
    lambda: rewardlab.load(sys.argv[1], compute={}),
    lambda: rewardlab.load(sys.argv[1], log="lines.txt"),
    lambda: scorer.score_replies("How?", {"a": 1}),
    lambda: scorer.score_replies("How?", {"a", "b"}),
    lambda: rows_of_groups([("How?", {"a", "b"})]),
    lambda: scorer.score({(rewardlab.Message("user", "a"), rewardlab.Message("assistant", "b"))}),
    lambda: BlockingScorer(sys.argv[1]).score({("How?", "b")}),
    lambda: RewardScorer(sys.argv[1], {"output": "raw"}),
    lambda: rewardlab.evaluate([{"score": 1.0}], beta=1.0),
    lambda: TrainingDataConfig(limit="3"),
    lambda: RunConfig(steps=1e3),
):
    try:
        print("scored", wrong())
    except rewardlab.RewardlabError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_is_no_conversation_is_refused_in_words(saved):
    """In a process whose types nobody checks, as users have it."""
    command = [sys.executable, "-c", REFUSED, str(saved)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    expected = [
        *["score takes a list of conversations"] * 4,
        "conversation 0: a conversation is a list of messages, got 'text'",
        "conversation 0: a message has a role and a content, got 'text'",
        "conversation 0: a message has a role and a content, got 3",
        *["replies are a list of texts"] * 2,
        "a conversation is a list of messages, got {'role'",
        "conversation 0: a conversation is a list of messages, got None",
        "a conversation is a list of messages, got nan",
        "replies are a list of texts",
        "conversation 1: a conversation is a list of messages, got None",
        "prompt of group 1: a conversation is a list of messages, got None",
        "replies of group 1 are a list of texts",
        *["score takes a list of conversations"] * 2,
        "wanted a list of (prompt, replies), got 3",
        'group 1: wanted (prompt, replies), got "How?"',
        "wanted a list of lists of token ids, got null",
        "wanted a list of rollouts, got 3",
        "a scorer needs a reward-model folder or the address of a server, got a NoneType",
        "a scorer needs a reward-model folder or the address of a server, got a int",
        "a scorer needs a reward-model folder or the address of a server, got a RewardModel. A model in memory does "
        "not tell how conversations are rendered for it: name its folder",
        "a scorer needs a reward-model folder or the address of a server, got a Scorer. A model in memory",
        "ScorerConfig: truncate: expected bool, got 'yes'",
        "client: expected a mapping, got 3",
        "render_fn: expected a function, got 'x'",
        "token_budget: expected at least 1, got 0",
        "truncate: expected bool, got 'no'",
        "artifact: expected str or Path, got 3",
        "render_fn: expected a function, got 3",
        "folder: expected Path, got 3",
        "folder: expected Path, got None",
        "precision: ['fp32'] is not one of 'fp32', 'bf16', 'fp16'",
        "precision: ['fp32'] is not one of 'fp32', 'bf16', 'fp16'",
        "attention: 'share' is not one of 'auto', 'shared', 'padded'. Did you mean 'shared'?",
        "device '1.5' cannot be used here",
        "check: expected bool, got 'no'. Write false, without quotes.",
        "trust_remote_code: expected bool, got 'false'. Write false, without quotes.",
        "compute: expected a ComputeConfig",
        "log: expected a function of a line",
        *["replies are a list of texts"] * 2,
        "replies of group 0 are a list of texts",
        "score takes a list of conversations",
        "wanted a list of rollouts, got {('How?', 'b')}",
        "config: got a dict; wanted a ScorerConfig",
        "rows: wanted a list of ScoreRow",
        "TrainingDataConfig: limit: expected int, got '3'",
        "RunConfig: steps: expected int, got 1000.0",
    ]
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


def test_a_prompt_may_be_a_text(saved):
    scorer = load(saved)
    asked = scorer.score_replies([{"role": "user", "content": "How?"}], ["So.", "No."])
    assert scorer.score_replies("How?", ["So.", "No."]) == asked
    opened = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: How?\n\nAssistant:"
    turns = [
        {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes?"), ("user", "How?"))
    ]
    assert scorer.score_replies(opened, [" So."]) == scorer.score_replies(turns, ["So."])
    conversations = [[{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]]
    assert scorer.score(iter(conversations)) == scorer.score(conversations)


def test_scores_do_not_depend_on_what_is_scored_beside_them(saved):
    scorer = load(saved)
    conversations = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        for prompt, reply in [("a", "yes"), ("a", "no no"), ("b", "yes"), ("a", "yes")]
    ]
    alone = [scorer.score([conversation])[0] for conversation in conversations]
    assert scorer.score(conversations) == pytest.approx(alone, abs=1e-5)
    assert scorer.score(conversations[::-1]) == pytest.approx(alone[::-1], abs=1e-5)


def test_threads_that_share_a_scorer_get_the_scores_that_each_gets_alone(saved):
    """The other thread asks in the middle of the last layer, where hooks keep at which tokens scores are read."""
    scorer = load(saved)
    asked, found, threads = threading.Event(), {}, []
    prompts = ("How do I keep basil alive?", "What is the capital of France, and why?")
    alone = {prompt: scorer.score_replies(prompt, ["yes", "no! 3"]) for prompt in prompts}

    class Told:
        def __enter__(self):
            asked.set()
            turn.__enter__()

        def __exit__(self, *error):
            turn.__exit__(*error)

    def score(prompt):
        try:
            found[prompt] = scorer.score_replies(prompt, ["yes", "no! 3"])
        finally:
            asked.set()

    def another(*_):
        if not threads:
            asked.clear()
            threads.append(threading.Thread(target=score, args=prompts[1:]))
            threads[0].start()
            assert asked.wait(60)

    turn, scorer._turn = scorer._turn, Told()
    attention = decoder_layers(scorer.model.backbone)[-1].self_attn
    attention.register_forward_hook(another)
    score(prompts[0])
    threads[0].join()
    for prompt in prompts:
        assert found[prompt] == pytest.approx(alone[prompt], abs=2e-5)


def test_a_copy_of_a_scorer_has_a_lock_of_its_own(saved):
    scorer = load(saved)
    with scorer._turn:
        copied = copy.deepcopy(scorer)
    thread = threading.Thread(target=copied._turn.__enter__, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert pickle.loads(pickle.dumps(scorer._turn))._lock is not scorer._turn._lock


def test_a_copy_scores_by_itself_while_the_original_is_in_the_middle_of_a_batch(saved):
    scorer = load(saved)
    alone = scorer.score_replies("How are you today?", ["well", "not so well"])
    copied = copy.deepcopy(scorer)
    attention = decoder_layers(scorer.model.backbone)[-1].self_attn
    attention.register_forward_hook(
        lambda *_: copied.score_replies("How?", ["yes, and this is a longer one", "no"]) and None
    )
    assert scorer.score_replies("How are you today?", ["well", "not so well"]) == pytest.approx(alone, abs=2e-5)


def test_models_are_made_one_after_the_other_since_transformers_changes_the_default_dtype(tmp_path, monkeypatch):
    save(tmp_path / "half", dtype=torch.bfloat16)
    found, make = [], load_module.read_classifier

    def watched(*arguments, **named):
        other = threading.Thread(target=lambda: found.append(load_module._MAKING.acquire(blocking=False)))
        other.start()
        other.join()
        return make(*arguments, **named)

    monkeypatch.setattr(load_module, "read_classifier", watched)
    load(tmp_path / "half")
    assert found == [False]
    scorers = []
    threads = [threading.Thread(target=lambda: scorers.append(load(tmp_path / "half"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scorers) == 3
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.quick_cases(1)
def test_a_scorer_that_is_sent_to_another_process_gives_its_scores_there(tmp_path, family):
    save(tmp_path / "rm", family)
    scorer = load(tmp_path / "rm")
    sent = pickle.dumps(scorer)
    _rotating.cache_clear()  # another process has no such classes yet
    arrived = pickle.loads(sent)
    asked = "How are you today?", ["well", "not so well"]
    assert arrived.score_replies(*asked) == pytest.approx(scorer.score_replies(*asked), abs=2e-5)
    kinds = [[type(part).__name__ for part in one.model.modules()] for one in (scorer, arrived)]
    assert kinds[0] == kinds[1]
    assert any(kind.startswith("Rotating") for kind in kinds[0])


FORKED = """
import multiprocessing, sys, torch, rewardlab

def ask(number):
    return scorer.score_replies("How?", [f"So {number}."])

def other(_):
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).exp().mean())

torch.set_num_threads(2)
scorer = rewardlab.load(sys.argv[1])
alone = [ask(number) for number in range(3)]
with multiprocessing.get_context("fork").Pool(1) as pool:
    pool.map(other, range(3))
    there = pool.map(ask, range(3))
    assert pool.apply(torch.get_num_threads) == 1
assert torch.get_num_threads() == 2
print(max(abs(a - b) for one, other in zip(alone, there) for a, b in zip(one, other)) < 2e-5)
"""


@pytest.mark.slow
def test_a_process_that_is_forked_after_many_threads_have_computed_scores_with_one(saved):
    # Threads that wait without turning in a circle leave a busy machine its cores.
    settings = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", FORKED, str(saved)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "True", done.stderr
    assert done.stderr.count("this process was forked") == 1


def test_layouts_agree_after_loading(saved):
    scorer = load(saved)
    assert scorer.model.layout == "shared"
    conversations = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": r}] for r in ("a", "bb c")]
    shared = scorer.score(conversations)
    set_layout(scorer.model, "padded")
    assert scorer.score(conversations) == pytest.approx(shared, abs=1e-5)
    assert load(saved, attention="padded").score(conversations) == pytest.approx(shared, abs=1e-5)


@pytest.mark.parametrize(("prompt", "reply"), [("How?", "So\udcff"), ("How\ud800?", "So.")])
def test_half_a_surrogate_pair_is_refused_with_the_number_of_the_conversation(saved, prompt, reply):
    with pytest.raises(RenderError, match="conversation 1: a text has half a surrogate pair"):
        load(saved).score(
            [
                [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
                for one, other in (("How?", "So."), (prompt, reply))
            ]
        )


@pytest.mark.parametrize(("is_link", "said"), [(True, "a link to a file that is missing"), (False, "no weights")])
def test_weights_that_are_gone_are_named(saved, tmp_path, is_link, said):
    folder = tmp_path / "rm"
    shutil.copytree(saved, folder)
    (folder / "model.safetensors").unlink()
    if is_link:
        (folder / "model.safetensors").symlink_to(tmp_path / "moved")
    with pytest.raises(ArtifactError, match=f"model.safetensors.*{said}|{said}: model.safetensors is missing"):
        load(folder)


def test_conversations_that_are_cut_are_told(saved, log):
    scorer = load(saved)
    long, limit = "word " * scorer.renderer.spec.max_length, scorer.renderer.spec.max_length
    scorer.score_replies("How?", ["So.", "Thus."])
    assert not [line for line in log.messages if "cut" in line]
    scorer.score_replies(long, ["So.", "Thus."])
    (told,) = [line for line in log.messages if "cut" in line]
    assert told.startswith(f"2 of 2 conversations were cut to the model's limit of {limit} tokens")
    log.clear()
    scorer.tells_cuts = False
    scorer.score_replies(long, ["So."])
    assert not log.messages
