"""Rewards that a framework for reinforcement learning would get from an endpoint: canaries sent as it sends samples.

Sources: OpenRLHF 3c3be62 (utils/agent.py), verl 1dda039 (experimental/reward_loop/reward_loop.py), slime 624b824
(rollout/rm_hub). Each framework has its own way of turning a conversation into text and of reading an answer. A test of
the endpoint needs a tokenizer of the policy, so that of the folder is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.endpoint_faults import DESCRIPTIONS, PRECISIONS, REMEDIES, Finding, Heard, find
from rewardlab.client.offers import chosen
from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import Canary
from rewardlab.core.types import Conversation, Message
from rewardlab.data.chat import Renderer
from rewardlab.serve.verifying.endpoints import NAMED_BY, Answer, Question, Wire, engine_of, spec_of
from rewardlab.serve.verifying.live import LiveVerification, also_stale, hear, left_out, look_again
from rewardlab.serve.verifying.reference import Reference, reference_of

TAKE_A_ROUTE: Final = ("openrlhf", "slime")
"""Frameworks that are given the whole address of a route, and that name no model."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way in which a framework sends a sample and reads the answer; a dialect with a single form."""

    name: str
    path: str
    body: Callable[[Any], Mapping[str, Any]]
    """What is sent -> the body of the request."""
    read: Callable[[Any], float]
    """The answer -> the reward. Raises LookupError, TypeError or ValueError for one of another shape."""
    sent: Callable[[Renderer, Conversation], Any]
    """The conversation -> what is sent of it."""
    takes_out: str = ""
    """What the framework takes out of replies, so that conversations that hold it cannot be compared."""
    forms: Sequence[str] = ("texts",)

    def ask(self, form: str, conversations: Sequence[Any]) -> Question:
        """See `Dialect`: one sample a request."""
        (sample,) = conversations
        return Question(path=self.path, body=self.body(sample))

    def hear(self, answer: Any) -> Answer:
        """See `Dialect`."""
        return Answer(scores=[self.read(answer)], num_tokens=[None])


def generated(renderer: Renderer, conversation: Conversation) -> tuple[str, str]:
    """Return (the prompt, the reply) as texts of the policy: its template's prompt, and the reply as it ended it.

    A policy stops at the token that ends its turn. It does not generate what the template writes behind that token, so
    none of the texts that these frameworks send has it.
    """
    prompt = renderer.text(conversation[:-1], add_generation_prompt=True)
    whole, ending = renderer.text(conversation), renderer.tokenizer.eos_token or ""
    reply = whole[len(prompt) :] if whole.startswith(prompt) else conversation[-1].content + ending
    place = reply.rfind(ending) if ending else -1
    return prompt, reply[: place + len(ending)] if place >= 0 else reply.rstrip()


def as_verl_renders(renderer: Renderer, conversation: Conversation) -> str:
    """Return the text that verl sends: the reward model's template without arguments, and its BOS cut off.

    The policy's end token is taken out of the reply, wherever it stands in it.
    """
    ending, bos = renderer.tokenizer.eos_token or "", renderer.tokenizer.bos_token
    reply = conversation[-1].content.replace(ending, "") if ending else conversation[-1].content
    plain = Renderer(renderer.tokenizer, replace(renderer.spec, template_arguments={}))
    text = plain.text((*conversation[:-1], Message(conversation[-1].role, reply)))
    return text[len(bos) :] if bos and text.startswith(bos) else text


def _rewards(answer: Any) -> float:
    """Return OpenRLHF's reward: `rewards`, a number or a list of one."""
    value = answer["rewards"]
    return float(value[0] if isinstance(value, list) else value)


def ways_of(consumer: str, *, path: str, model: str, engine: str, ending: str = "") -> list[Way]:
    """Return how a framework sends a sample, first the way that it has built in.

    `path` is the path of the URL, where the framework takes a whole URL; `model` and `engine` are those of the server;
    `ending` is the token with which the policy ends a turn.
    """
    if consumer == "openrlhf":
        return [
            Way(
                name="OpenRLHF",
                path=path or "/get_reward",
                sent=generated,
                body=lambda pair: {"query": ["".join(pair)], "prompts": [pair[0]], "labels": [""]},
                read=_rewards,
            )
        ]
    if consumer == "slime":
        return [
            Way(
                name="slime",
                path=path or ("/slime" if engine == "rewardlab" else "/"),
                sent=generated,
                body=lambda pair: {"prompt": pair[0], "response": pair[1], "label": ""},
                read=float,
            )
        ]
    if engine == "SGLang":
        return [
            Way(
                name="verl",
                path="/v1/embeddings",
                takes_out=ending,
                sent=as_verl_renders,
                body=lambda text: {"model": model, "input": text},
                read=lambda answer: float(answer["data"][-1]["embedding"][-1]),
            )
        ]

    def of_classify(answer: Any) -> float:
        return float(answer["data"][-1]["probs"][-1])

    own = Way(
        name="verl",
        path="/classify",
        takes_out=ending,
        sent=as_verl_renders,
        body=lambda text: {"model": model, "input": text, "use_activation": False},
        read=of_classify,
    )
    # verl's documentation shows this body, on its page about reward loops, for custom reward functions.
    documented = replace(
        own,
        name='verl, a function copied from its documentation ("activation": false)',
        body=lambda text: {"model": model, "input": text, "activation": False},
    )
    return [own, documented]


CHANGES: Final[dict[tuple[str, str], str]] = {
    ("openrlhf", "failed"): 'OpenRLHF logs "Failed to fetch reward" and goes on without a reward. A rewardlab server '
    "answers rendered texts only where it is told to. Give it the function of rewardlab.rl.openrlhf in place of a "
    "URL, which sends messages.",
    (
        "openrlhf",
        "shifted_position",
    ): "OpenRLHF's query ends where the policy stopped, without what the template writes "
    "behind its end token. Give it the function of rewardlab.rl.openrlhf in place of a URL, which sends messages.",
    ("slime", "failed"): "slime retries ten times, also what was refused for good, and then ends. Give it the URL of a "
    "route for its shape, or --custom-rm-path rewardlab.rl.slime.reward, which sends messages.",
    ("slime", "shifted_position"): "slime's response ends where the policy stopped, without what the template writes "
    "behind its end token. Give it --custom-rm-path rewardlab.rl.slime.reward, which sends messages.",
    ("verl", "failed"): "verl asks /classify of vLLM and /v1/embeddings of SGLang. Serve one of them, or give verl "
    "the RewardManager of rewardlab.rl.verl, which sends messages.",
    ("verl", "sigmoid"): 'Change "activation" to "use_activation" in your reward function: current vLLM ignores the '
    "former.",
    ("verl", "missing_bos"): "verl cuts the BOS off and counts on the engine to add one: start vLLM with a tokenizer "
    "that does, or take the RewardManager of rewardlab.rl.verl, which sends messages.",
    ("verl", "unknown"): "verl renders with the tokenizer's template alone. Take the RewardManager of "
    "rewardlab.rl.verl, which sends messages.",
}
"""(consumer, fault) -> what to change on the side of the consumer; other faults get the general advice."""
CHANGES_OF_OURS: Final[dict[tuple[str, str], str]] = {
    ("verl", "missing_bos"): "verl cuts the BOS off and counts on the engine to add one, and a rewardlab server adds "
    "no token to texts. Take the RewardManager of rewardlab.rl.verl, which sends messages.",
}
"""The same where the engine is rewardlab's own server."""


def verify_as(
    wire: Wire, consumer: str, *, folder: Path, name: str | None = None, precision: str = "auto"
) -> LiveVerification:
    """Send the canaries as a framework would, and return what it would get and what to change.

    `name` chooses among several models of a server. Raises as `verify_live` does, and ConfigError for the name of a
    model for which the framework cannot ask.
    """
    whole = reference_of(folder)
    reference = whole.of_whole_canaries()
    said = spec_of(wire)
    expected = PRECISIONS.get(precision)
    model, engine, digest = "", "", ""
    if said is not None:
        served = chosen(said, name, url=wire.base, setting=NAMED_BY)
        if consumer in TAKE_A_ROUTE and served != said.models[0]:
            raise ConfigError(
                f"{NAMED_BY} {name}: {consumer} names no model, so the server's first one answers it, "
                f"{said.models[0].name}. Leave the flag out."
            )
        model, engine, digest = served.name, "rewardlab", served.digest
        expected = expected or served.dtype
    elif consumer in TAKE_A_ROUTE and name is not None:
        raise ConfigError(f"{NAMED_BY} {name}: {consumer} names no model. Leave the flag out.")
    elif consumer == "verl":
        dialect = engine_of(wire, name=name)
        model, engine = getattr(dialect, "model", ""), dialect.name
    ending = reference.renderer.tokenizer.eos_token or ""
    ways = ways_of(consumer, path=wire.path, model=model, engine=engine, ending=ending)
    canaries = [one for one in reference.spec.canaries if not _holds(ways[0].takes_out, one)]
    taken_out = len(reference.spec.canaries) - len(canaries)
    reference = replace(reference, spec=replace(reference.spec, canaries=canaries))
    findings = [_find(wire, way, reference, expected) for way in ways]
    findings = also_stale(findings, digest, reference.digest)
    # Only the first way, the framework's own, decides: a function copied from its documentation may send a wrong body
    # to a right endpoint. It is shown as a note.
    faults = () if findings[0].is_right else findings[0].faults
    notes = [_trap(consumer, ways[n], one, engine) for n, one in enumerate(findings) if n and not one.is_right]
    if taken_out:
        notes.append(f"{ways[0].name} takes {ending} out of replies: {taken_out} canaries that hold it are left out")
    notes += left_out(whole)
    return LiveVerification(
        url=wire.base,
        engine=engine or "an engine of unknown kind",
        model=model,
        digest=digest,
        compared_with=str(folder),
        findings=tuple(findings),
        faults=faults,
        notes=tuple(notes),
        verdict=f"{wire.base}: {_verdict(consumer, ways[0], findings[0], engine)}",
        num_canaries=len(reference.spec.canaries),
    )


def _holds(text: str, canary: Canary) -> bool:
    """Return whether the reply of a canary holds a text."""
    return bool(text) and text in canary.messages[-1]["content"]


def _find(wire: Wire, way: Way, reference: Reference, expected: str | None) -> Finding:
    """Return the finding for a framework that sends the canaries in this way."""
    samples = [way.sent(reference.renderer, conversation) for conversation in reference.conversations()]
    heard: Heard = replace(hear(wire, way, "texts", samples), form=way.name)
    if heard.fault == "not_taken":
        heard = replace(heard, fault="failed")
    found = find(reference.spec.canaries, heard, expected=expected)
    (found,) = look_again([found], reference, expected)
    return found


def _verdict(consumer: str, way: Way, found: Finding, engine: str) -> str:
    """Return what the framework gets, and what to change."""
    if found.is_right:
        but = ", but control tokens typed in a reply are obeyed (special_tokens)" if found.faults else ""
        return f"verified: {way.name} gets the scores of the model, in {found.precision}{but}."
    fits = ", or ".join(f"{DESCRIPTIONS[name]} ({name})" for name in found.faults)
    said = f": {found.heard.said}" if found.heard.said else ""
    return f"{way.name} gets wrong scores: {fits}{said}. {_change(consumer, found, engine)}"


def _trap(consumer: str, way: Way, found: Finding, engine: str) -> str:
    fits = ", or ".join(f"{DESCRIPTIONS[name]} ({name})" for name in found.faults)
    return f"{way.name} would get: {fits}. {_change(consumer, found, engine)}"


def _change(consumer: str, found: Finding, engine: str) -> str:
    known = CHANGES | CHANGES_OF_OURS if engine == "rewardlab" else CHANGES
    return " ".join(dict.fromkeys(known.get((consumer, name), REMEDIES[name]) for name in found.faults))
