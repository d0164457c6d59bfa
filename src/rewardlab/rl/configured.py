"""A reward by settings alone: what the environment, a file, or a trainer's own configuration says about it.

The trainers load a reward function by its name and give it no arguments, so its settings come from elsewhere. They are
read strictly: an unknown name, a value of another type and a setting that the trainer at hand does not follow are
errors, and so is a setting that is given twice.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rewardlab.client.config import ClientConfig, token_in
from rewardlab.core.config import from_mapping, read_settings, settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.terminal import brief
from rewardlab.core.values import Section, did_you_mean
from rewardlab.rl.config import ScorerConfig
from rewardlab.rl.credit import How
from rewardlab.rl.scorer import RewardScorer
from rewardlab.rl.turns import PromptAs

SOURCE: Final = "REWARDLAB_RL_SOURCE"
"""Environment variable: the folder of a reward model, or the address of a server."""
FILE: Final = "REWARDLAB_RL_CONFIG"
"""Environment variable: a YAML, TOML or JSON file with settings."""
ALWAYS: Final = ("source", "token_env")
"""Settings that every trainer follows."""
NOT_IN_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "token": "a token does not belong in a file. Export it, and name the variable: token_env.",
        "client": "give its settings by their own names, beside the others.",
        "render_fn": "a function cannot be given here. Make a RewardScorer in a function of your own.",
        "httpx_options": "these cannot be given here. Make a RewardScorer in a function of your own.",
    }
)
"""Setting of a scorer or a client -> why it is not taken."""
Part = tuple[str, Mapping[str, object]]
"""Where settings are from, as messages call it, and the settings."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Section):
    """Settings of a reward in a trainer's loop, besides those of its scorer."""

    source: tuple[str, ...] = ()
    """Folder of a reward model or address of a server; several of them are an ensemble."""
    token_env: str | None = None
    """Environment variable with the server's token."""
    how: How = "replace"
    """How the trainer's own score of a rollout and that of the reward model become one reward: `replace` takes the
    reward model's alone."""
    coefficient: float | None = None
    """The coefficient of `how`. None means 1, except that `weighted` has to be given one."""
    environment: str | None = None
    """Column of the dataset with the environment's reward, for trainers that hand over columns."""
    noise_floor: bool = True
    """Whether differences within the noise of the scores are taken out of the rewards of a group."""
    group_size: int | None = None
    """Replies to one prompt that make a group; None takes consecutive rollouts of equal prompts."""
    log_dir: str | None = None
    """Folder for the record of all rollouts."""
    evidence: tuple[str, ...] = ()
    """Columns that are kept in that record as evidence; they have to differ from reply to reply."""
    reply_ends: tuple[str, ...] | None = None
    """Texts with which the policy ends its turn, one of which is taken off the end of a reply, such as `<|im_end|>`;
    an empty list if replies come without."""
    prompt_as: PromptAs = "messages"
    """What the dataset's label is: the messages of the prompt (a list, or its JSON text), or the text of its only turn
    (`text`)."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A reward as it was configured."""

    loop: LoopConfig
    scorer: Mapping[str, object] = field(default_factory=dict)
    """Settings of `RewardScorer`, by name; those that were not given keep its defaults."""
    client: Mapping[str, object] = field(default_factory=dict)
    """Settings of the client of each server, likewise."""
    where: str = ""
    """Where the settings are from, for messages."""

    @property
    def sources(self) -> Sequence[str]:
        """Folders and addresses."""
        return self.loop.source

    @property
    def is_remote(self) -> bool:
        """Whether every source is the address of a server."""
        return all("://" in source for source in self.sources)

    def reply_ends(self) -> tuple[str, ...]:
        """Return the texts that end a reply. Raises ConfigError if the settings do not say them."""
        if (ends := self.loop.reply_ends) is None:
            raise ConfigError(
                f"{self.where}: reply_ends is missing: the texts with which the policy ends its turn, such as "
                f'["<|im_end|>"], which are not part of a reply. An empty list says that replies come without.'
            )
        return ends

    def make_scorer(self) -> RewardScorer:
        """Return a new scorer. Raises ConfigError if the environment lacks the token, and as `RewardScorer` does."""
        settings: dict[str, Any] = dict(self.scorer)
        client = dict(self.client)
        if (token := token_in(self.loop.token_env, flag="token_env")) is not None:
            client["token"] = token
        if client:
            settings["client"] = client
        source = self.sources[0] if len(self.sources) == 1 else list(self.sources)
        return RewardScorer(source, **settings)


def from_environment(*, takes: Collection[str], environ: Mapping[str, str] | None = None) -> Configured:
    """Return the reward that the environment describes, by `SOURCE`, `FILE` or both.

    `takes` names the settings of `LoopConfig`, besides `ALWAYS`, that the caller follows.

    Raises ConfigError for settings that cannot be used, and if no source is given.
    """
    return from_parts(parts_of_environment(environ), takes=takes)


def parts_of_environment(environ: Mapping[str, str] | None = None) -> list[Part]:
    """Return the settings in the environment and in the file that it names.

    Raises ConfigError for a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    parts: list[Part] = []
    if path := environ.get(FILE, "").strip():
        parts.append((f"{FILE} {path}", read_settings(at_home(path), given_by=FILE)))
    if source := environ.get(SOURCE, "").strip():
        parts.append((SOURCE, {"source": source}))
    return parts


def from_parts(parts: Iterable[Part], *, takes: Collection[str]) -> Configured:
    """Return the reward that settings from one or several places describe, as `from_environment` does.

    Raises ConfigError for a setting that is unknown, cannot be used or is given in two places, and if no source is
    given.
    """
    loop: dict[str, object] = {}
    scorer: dict[str, object] = {}
    client: dict[str, object] = {}
    given: dict[str, str] = {}
    for where, settings in parts:
        for name, value in settings.items():
            key = name.replace("-", "_")
            if key in given:
                raise ConfigError(f"{where}: {key} is also given by {given[key]}. Keep one.")
            given[key] = where
            if key in settings_of(LoopConfig):
                loop |= _checked(LoopConfig, key, value, where)
                _require_followed(key, takes, where)
            elif key in NOT_IN_FILES:
                raise ConfigError(f"{where}: {key}: {NOT_IN_FILES[key]}")
            elif key in settings_of(ScorerConfig):
                scorer |= _checked(ScorerConfig, key, value, where)
            else:
                client |= _client_setting(key, value, where)
    where = " and ".join(dict.fromkeys(given.values())) or f"{SOURCE} and {FILE}"
    config = from_mapping(LoopConfig, loop, where=where)
    if not config.source:
        raise ConfigError(
            f"{where}: no source of rewards. Set {SOURCE}, or `source` in the file that {FILE} names, to the folder of "
            f"a reward model or the address of a server, such as http://127.0.0.1:8000."
        )
    return Configured(loop=config, scorer=scorer, client=client, where=where)


def _require_followed(name: str, takes: Collection[str], where: str) -> None:
    if name not in (*ALWAYS, *takes):
        raise ConfigError(
            f"{where}: {name} is not followed here. Take it out; settings are {', '.join((*ALWAYS, *takes))}, and "
            f"those of a scorer."
        )


def _client_setting(name: str, value: object, where: str) -> Mapping[str, object]:
    """Return one setting of a client, converted to its type. Raises ConfigError."""
    if name in settings_of(ClientConfig):
        return _checked(ClientConfig, name, value, where)
    known = sorted(
        {*settings_of(LoopConfig), *settings_of(ScorerConfig), *settings_of(ClientConfig)} - set(NOT_IN_FILES)
    )
    raise ConfigError(
        f"{where}: unknown setting {brief(name)}.{did_you_mean(name, known)} Settings: {', '.join(known)}."
    )


def _checked(kind: type, name: str, value: object, where: str) -> dict[str, object]:
    """Return a setting of a configuration as its type wants it. Raises ConfigError if it cannot be used."""
    try:
        checked: Any = from_mapping(kind, {name: value}, where=where)
    except ConfigError as error:
        said = str(error)
        # An error that a section raises itself does not say where the setting was given.
        raise ConfigError(said if said.startswith(where) else f"{where}: {said}") from error
    return {name: getattr(checked, name)}
