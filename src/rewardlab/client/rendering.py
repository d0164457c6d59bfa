"""Rendering of conversations for other engines, to tokens or text, by the caller's function or a local folder.

Imports transformers when a folder is opened, for its tokenizer; where torch is installed, transformers imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.analysis.faults import name_token_fault
from rewardlab.client.config import RenderFn
from rewardlab.client.dialects import Item
from rewardlab.core.errors import ArtifactError, ConfigError, RenderError
from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED, REFUSING, REMEDY, RewardSpec, read_spec
from rewardlab.core.types import Conversation
from rewardlab.data.bulk import render_conversations
from rewardlab.data.chat import Overlong, Renderer, load_tokenizer, to_messages
from rewardlab.data.cut_canaries import faults_of_cuts
from rewardlab.data.layout import Rendered

KEY: Final = "rewardlab_spec_sha256"
"""Key of a folder's digest in its config.json."""


_FIRST: Final = threading.Lock()
"""Held while a tokenizer is loaded: transformers fails if several threads are the first to ask it for one.

Of the process, as the modules of transformers are.
"""


def digest_in(folder: Path) -> str | None:
    """Return the digest of a reward-model folder; None for one of an early version.

    Raises ArtifactError if its config.json cannot be read.
    """
    digest = read_object(folder / "config.json", DAMAGED).get(KEY)
    return digest if isinstance(digest, str) else None


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A conversation as it is sent to an engine."""

    item: Item
    truncated_tokens: int | None
    """Tokens of the prompt that were cut; None where the caller's function rendered it."""
    truncated_reply_tokens: int | None = None
    """Tokens that were cut from the middle of the reply; None where the caller's function rendered it."""


@runtime_checkable
class Formatting(Protocol):
    """Renders conversations for an engine."""

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendering | RenderError]:
        """Return each conversation rendered, or why it cannot be."""


class ByFunction:
    """Renders by a function of the caller."""

    def __init__(self, render_fn: RenderFn) -> None:
        self._render_fn = render_fn

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendering | RenderError]:
        """Return each conversation as `render` does, or its RenderError."""
        made: list[Rendering | RenderError] = []
        for conversation in conversations:
            try:
                made.append(self.render(conversation))
            except RenderError as error:
                made.append(error)
        return made

    def render(self, conversation: Conversation) -> Rendering:
        """Return a conversation as the caller's function renders it. Errors of the function are not caught.

        Raises RenderError if the result is neither a text nor token ids.
        """
        made: Any = self._render_fn([message.as_dict() for message in conversation])
        if isinstance(made, str) and made:
            return Rendering(item=made, truncated_tokens=None)
        tokens = None if isinstance(made, str) else _tokens(made)
        if not tokens:
            raise RenderError(
                f"render_fn gave {'nothing' if made is not None and not isinstance(made, int | float) else made!r}; "
                f"wanted the rendered text of the conversation, or its token ids."
            )
        return Rendering(item=tokens, truncated_tokens=None)


def _tokens(values: Any) -> list[int] | None:
    """Return token ids from a list or an array of whole numbers; None if they are not."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in listed):
        return None
    return list(listed)


class Artifact:
    """A local reward-model folder. Only its spec and tokenizer are read, not its weights: enough to render for it."""

    def __init__(self, folder: Path, *, truncate: bool | None) -> None:
        """`truncate` says whether conversations above the limit may be cut; None by the rule of the model.

        Raises ArtifactError if the folder is not a reward model, is damaged, or no longer renders its canaries to the
        tokens in its spec.
        """
        self.folder = folder
        self.spec: RewardSpec = read_spec(folder)
        config = read_object(folder / "config.json", DAMAGED)
        self.digest = digest_in(folder)
        """Digest of the folder; None for those of an early version."""
        self._truncate = self.spec.renderer.truncation not in REFUSING if truncate is None else truncate
        self._lock = threading.Lock()
        """Held while rendering, since two threads may not use a tokenizer at once."""
        with _FIRST:
            tokenizer = load_tokenizer(str(folder))
        self._renderer = Renderer(tokenizer, self.spec.renderer)
        pad = config.get("pad_token_id")
        self._renderer.pad_token_id = pad if isinstance(pad, int) else None
        self.cut = self._require_own_tokens()
        """Names of the canaries that are above the length limit, and were cut to it when the model was saved."""
        if self._truncate:
            self._renderer = self._renderer.that_cuts

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendering | RenderError]:
        """Return the tokens of each conversation as the model was trained on; a RenderError for one that cannot be
        rendered, or that is above the length limit and may not be cut."""
        with self._lock:
            outcomes = render_conversations(conversations, self._renderer)
        return [self._rendering(outcomes[conversation]) for conversation in conversations]

    def _rendering(self, outcome: Rendered | RenderError) -> Rendering | RenderError:
        if isinstance(outcome, Overlong):
            return self._refusal(outcome.num_tokens)
        if isinstance(outcome, RenderError):
            return outcome
        if outcome.full_length > len(outcome.token_ids) and not self._truncate:
            return self._refusal(outcome.full_length)
        return Rendering(
            item=outcome.token_ids.tolist(),
            truncated_tokens=outcome.truncated_tokens,
            truncated_reply_tokens=outcome.truncated_reply_tokens,
        )

    def _refusal(self, num_tokens: int | None) -> RenderError:
        renderer = self._renderer
        how = "" if renderer.refuses else " by the rule of training"
        return RenderError(
            f"it takes {num_tokens} tokens, above the model's limit of {self.spec.renderer.max_length}. Shorten it, or "
            f"let {renderer.what_is_cut} be cut{how}: truncate=True."
        )

    def require_length(self, token_ids: Sequence[int]) -> None:
        """Raise RenderError if tokens are above the model's limit."""
        if len(token_ids) > (limit := self.spec.renderer.max_length):
            raise RenderError(f"it has {len(token_ids)} tokens, above the model's limit of {limit}. Shorten it.")

    def _require_own_tokens(self) -> frozenset[str]:
        """Return the names of the canaries that the length limit cuts.

        Raises ArtifactError unless all canaries are rendered to the tokens in the spec.
        """
        cut = set()
        for canary in self.spec.canaries:
            messages = to_messages(canary.messages)
            try:
                rendered = self._renderer.render(messages[:-1], messages[-1:])
            except RenderError as error:
                raise ArtifactError(
                    f"{self.folder}: canary {canary.name!r} cannot be rendered: {error} {REMEDY}"
                ) from error
            got = rendered.token_ids.tolist()
            if rendered.full_length > len(got):
                cut.add(canary.name)
            if fault := name_token_fault(canary.token_ids, got, bos_token_id=self.spec.renderer.bos_token_id):
                raise ArtifactError(
                    f"{self.folder}: canary {canary.name!r} now renders to {fault}. The tokenizer differs from the one "
                    f"the model was trained with. {REMEDY}"
                )
        for wrong in faults_of_cuts(self._renderer, self.spec.cut_canaries):
            raise ArtifactError(f"{self.folder}: {wrong} {REMEDY}")
        return frozenset(cut)


def formatting_of(render_fn: RenderFn | None, artifact: Artifact | None) -> Formatting | None:
    """Return the object that renders: the caller's function if given, else the folder; None without either."""
    return artifact if render_fn is None else ByFunction(render_fn)


def require_formatting(formatting: Formatting | None, *, engine: str) -> Formatting:
    """Return `formatting`. Raises ConfigError, which says what to give, if it is None."""
    if formatting is None:
        raise ConfigError(
            f"engine {engine} is sent rendered conversations, and nothing says how to render them. Give "
            f"artifact=FOLDER, the reward-model folder that is served, or render_fn=…, a function from messages to "
            f"token ids; or score tokens (score_token_ids)."
        )
    return formatting
