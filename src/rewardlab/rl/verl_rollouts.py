"""What verl hands to a reward manager, read without verl: the prompt, the reply, and the rollout's name.

Facts of verl 0.10.0.dev (1dda039) and 0.9.1: `experimental/agent_loop/agent_loop.py` makes the data,
`experimental/reward_loop/reward_manager/naive.py` shows how it is read. One call holds one trajectory; its reply is
right-padded, and `response_len` counts it where the agent loop made the data, the mask of attention everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.rl.configured import Configured, Part, from_parts, parts_of_environment
from rewardlab.rl.rollouts import RolloutError

SECTION: Final = "reward.rewardlab"
"""Section of verl's configuration with our settings."""
TAKES: Final = ("how", "coefficient")
MOST_TURNS: Final = 2
"""`__num_turns__` of a rollout whose reply is one turn: the prompt and the reply."""


@dataclass(frozen=True, kw_only=True)
class VerlRollout:
    """One trajectory of verl."""

    name: str
    messages: Any
    """`raw_prompt`: the messages of the prompt."""
    reply: str
    """The policy's reply, without the special tokens at its end; those inside stay, as text."""
    plain_reply: str
    """The same without any special token, which is what verl gives to its own reward functions."""
    fields: Mapping[str, Any]
    """`non_tensor_batch`: the columns of the dataset, and what the agent loop adds."""


def read_rollout(data: Any, tokenizer: Any, special: Collection[int]) -> VerlRollout:
    """Return the trajectory in verl's data, its reply decoded by the policy's tokenizer, which has `special_ids`.

    Raises RolloutError naming the rollout if it is not one prompt and one reply.
    """
    item = data[len(data) - 1]
    fields: Mapping[str, Any] = item.non_tensor_batch
    name = name_of(fields)
    if len(data) > 1:
        raise RolloutError(
            f"{name}: the trajectory has {len(data)} sequences of tokens, and only one conversation can be scored. "
            f"Score it in a reward manager of your own that knows what each of them is."
        )
    if fields.get("raw_prompt") is None:
        raise RolloutError(f"{name}: verl gave no raw_prompt, without which there are no messages to score.")
    turns = fields.get("__num_turns__")
    if turns is not None and int(turns) > MOST_TURNS:
        raise RolloutError(
            f"{name}: it has {int(turns)} turns, and its reply holds the texts of tools or users, rendered by the "
            f"policy's template. They cannot be turned back into messages without guessing. Score such rollouts in a "
            f"reward manager of your own that keeps the messages."
        )
    tokens = _reply_tokens(item)
    return VerlRollout(
        name=name,
        messages=fields["raw_prompt"],
        reply=_decoded(tokenizer, without_special_end(tokens, special)),
        plain_reply=tokenizer.decode(tokens, skip_special_tokens=True),
        fields=fields,
    )


def name_of(fields: Mapping[str, Any]) -> str:
    """Return the name of a rollout in messages, from those of verl's and the dataset's fields that are there."""
    extra = fields.get("extra_info")
    known = {
        "uid": fields.get("uid"),
        "session": fields.get("session_id"),
        "source": fields.get("data_source"),
        "index": extra.get("index") if isinstance(extra, Mapping) else fields.get("index"),
    }
    said = ", ".join(f"{key} {value!s:.60}" for key, value in known.items() if value is not None)
    return f"verl's rollout ({said})" if said else "a rollout of verl"


def _reply_tokens(item: Any) -> list[int]:
    responses = item.batch["responses"]
    width = int(responses.shape[-1])
    counted = item.non_tensor_batch.get("response_len")
    length = int(item.batch["attention_mask"][-width:].sum()) if counted is None else int(counted)
    return [int(token) for token in responses[:length].tolist()]


def special_ids(tokenizer: Any) -> set[int]:
    """Return the special tokens of a tokenizer: those that it has a name for, and those that its file marks as special.

    Gemma 3 and Phi-3 end a turn with a token of the latter kind alone, for which `all_special_ids` has no place.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def without_special_end(tokens: Sequence[int], special: Collection[int]) -> list[int]:
    """Return tokens without the special ones at their end."""
    known = set(special)
    length = len(tokens)
    while length and tokens[length - 1] in known:
        length -= 1
    return list(tokens[:length])


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    # With clean-up the tokenizer would take spaces out of replies, such as those before a full stop.
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def configured_by(config: Any) -> Configured:
    """Return the reward that verl's configuration describes in `SECTION`, or else the environment.

    Raises ConfigError if neither describes one, if both do, or if each of verl's workers would load its own model.
    """
    parts: list[Part] = []
    section = plain(_reward_section(config).get("rewardlab"))
    if section is not None:
        if not isinstance(section, dict):
            raise ConfigError(f"{SECTION}: expected settings, got {section!r:.60}. Write +{SECTION}.source=…")
        parts.append((SECTION, section))
    configured = from_parts([*parts, *parts_of_environment()], takes=TAKES)
    _require_a_server(configured, config)
    return configured


def _require_a_server(configured: Configured, config: Any) -> None:
    """Raise ConfigError unless the model is on a server or there is a single worker."""
    workers = _reward_section(config).get("num_workers")
    if not configured.is_remote and workers != 1:
        raise ConfigError(
            f"{configured.where}: source is a folder, and each of verl's {workers} reward workers would load it. Serve "
            f"it (rewardlab serve FOLDER) and give the address, or set reward.num_workers=1."
        )
    reward_model = _reward_section(config).get("reward_model") or {}
    if reward_model.get("enable"):
        raise ConfigError(
            "reward.reward_model.enable=True: verl would score with a model of its own and never ask this manager. Set "
            "it to False."
        )


def _reward_section(config: Any) -> Any:
    return config.get("reward") or {}


def plain(value: Any) -> Any:
    """Return a value of verl's configuration (OmegaConf's containers) as dictionaries, lists and plain values."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "items"):
        return {str(key): plain(one) for key, one in value.items()}
    if hasattr(value, "__iter__"):
        return [plain(one) for one in value]
    return value


def rule_arguments(rollout: VerlRollout) -> dict[str, Any]:
    """Return the arguments of verl's own reward function for a rollout, as its `naive` manager makes them.

    Raises RolloutError naming the rollout and the column that is missing.
    """
    fields = rollout.fields
    truth = fields.get("reward_model")
    if "data_source" not in fields or not isinstance(truth, Mapping) or "ground_truth" not in truth:
        raise RolloutError(
            f"{rollout.name}: verl's own score needs the columns data_source and reward_model.ground_truth. Add them "
            f"to the dataset, or say how: replace, which takes the reward model's score alone."
        )
    tools = fields.get("tool_extra_fields")
    extra = {**(fields.get("extra_info") or {}), **(tools if tools is not None else {})}
    extra["num_turns"] = fields.get("__num_turns__")
    extra["rollout_reward_scores"] = fields.get("reward_scores", {})
    return {
        "data_source": fields["data_source"],
        "solution_str": rollout.plain_reply,
        "ground_truth": truth["ground_truth"],
        "extra_info": extra,
    }
