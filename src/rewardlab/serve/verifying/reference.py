"""The reference for a live endpoint: a reward-model folder, its canaries as text, and further decoys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rewardlab.core.errors import RenderError
from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED, Canary, RewardSpec, read_spec
from rewardlab.core.types import Conversation
from rewardlab.data.chat import Renderer, to_messages


@dataclass(frozen=True)
class Reference:
    """A folder whose files are as they were saved."""

    folder: Path
    spec: RewardSpec
    digest: str
    """Digest of the spec, by which a server names its model; empty in folders of an earlier version."""

    @cached_property
    def renderer(self) -> Renderer:
        """The folder's renderer."""
        from rewardlab.artifact.load import open_renderer

        return open_renderer(self.folder, self.spec)

    @cached_property
    def num_cut(self) -> int:
        """The number of canaries that are above the length limit, and were cut to it when the folder was saved."""
        return len(self.spec.canaries) - len(self._whole())

    def of_whole_canaries(self) -> Reference:
        """Return the reference with those canaries alone that the length limit does not cut.

        Another engine that is sent a text or messages does not cut as this project does, and a framework does not
        either. If the limit cuts all, all are kept.
        """
        kept = self._whole()
        return replace(self, spec=replace(self.spec, canaries=kept)) if kept and self.num_cut else self

    def _whole(self) -> list[Canary]:
        lengths = [len(self.renderer.token_ids(conversation)) for conversation in self.conversations()]
        return [
            canary
            for canary, length in zip(self.spec.canaries, lengths, strict=True)
            if length == len(canary.token_ids)
        ]

    def conversations(self) -> list[Conversation]:
        """Return the canaries as messages."""
        return [to_messages(canary.messages) for canary in self.spec.canaries]

    def texts(self) -> list[str]:
        """Return the rendered texts of the canaries, as clients that render for an engine send them."""
        return self.renderer.texts(self.conversations())

    def more_decoys(self) -> list[Canary]:
        """Return the canaries with decoys that the spec does not hold, computed with the model on the CPU in float32.

        `missing_bos` where renderings begin with one, `generation_prompt` where the template has one.
        """
        from rewardlab.artifact.canaries import score_tokens
        from rewardlab.artifact.load import load

        scorer = load(self.folder, device="cpu", check=False)
        ids = [canary.token_ids for canary in self.spec.canaries]
        sequences: dict[str, list[Any]] = {}
        if self.spec.renderer.num_bos:
            sequences["missing_bos"] = [tokens[1:] for tokens in ids]
        prompts = self._prompted()
        if prompts is not None and prompts != ids:
            sequences["generation_prompt"] = prompts
        more = {
            fault: score_tokens(scorer.model, [np.asarray(tokens, np.int32) for tokens in several])
            for fault, several in sequences.items()
        }
        return [
            replace(canary, decoys=canary.decoys | {fault: scores[number] for fault, scores in more.items()})
            for number, canary in enumerate(self.spec.canaries)
        ]

    def _prompted(self) -> list[list[int]] | None:
        """Return the tokens of the canaries followed by the template's generation prompt; None if it has none."""
        try:
            texts = [self.renderer.text(messages, add_generation_prompt=True) for messages in self.conversations()]
        except RenderError:
            return None
        encoded: Sequence[Sequence[int]] = self.renderer.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [list(tokens) for tokens in encoded]


def reference_of(folder: Path) -> Reference:
    """Return a folder to compare with. Raises ArtifactError unless its files are as they were saved."""
    from rewardlab.artifact.load import require_files
    from rewardlab.artifact.seal import KEY

    spec = read_spec(folder)
    require_files(folder, spec)
    # Folders of an earlier version have no digest.
    return Reference(folder, spec, str(read_object(folder / "config.json", DAMAGED).get(KEY) or ""))
