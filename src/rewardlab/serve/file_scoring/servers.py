"""Score the replies in a file with a running server, as `score_file` does with a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rewardlab.client.config import token_in
from rewardlab.core.spec import CUT_MIDDLE, read_spec
from rewardlab.serve.file_scoring.file import DEFAULT, ScoreSettings, require_places, score_with, settled
from rewardlab.serve.file_scoring.remote import RemoteBackend
from rewardlab.serve.file_scoring.results import FileScores

TRUNCATE: Final = {"auto": None, "cut": True, "refuse": False}
"""`--overlong` -> whether a client lets conversations be cut; None by the rule of the model."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that gives scores, and how it is asked."""

    url: str
    backend: Literal["http", "vllm"] = "http"
    """Whether it is our own, or vLLM or SGLang."""
    folder: str = ""
    """Reward-model folder that is served: it renders for vLLM and SGLang, and proves what the server scores with. Empty
    for none."""
    model: str | None = None
    """Name of the model there; None for its default."""
    token_env: str | None = None
    """Environment variable with the token that it wants."""
    concurrency: int = 16
    """Most requests that are under way at a time."""

    def token(self) -> str | None:
        """Return the token. Raises ConfigError if the environment has no such variable."""
        return token_in(self.token_env, flag="--token-env")


def score_remotely(server: Server, source: Path, target: Path, settings: ScoreSettings = DEFAULT) -> FileScores:
    """Write the rows of `source` to `target` with the scores that a server gives them, as `score_file` does.

    Conversations that the server refuses have null and the cause. Raises as `score_file` does; EndpointError if the
    server cannot be reached or does not give the scores of its model's canaries. What was scored before is kept.
    """
    require_places(source, target, overwrite=settings.overwrite)
    renderer = read_spec(Path(server.folder)) if server.folder else None
    # Without a folder the setting stays `auto`, and the client asks the server for the rule of its model.
    settings = settings if renderer is None else settled(settings, [renderer.renderer])
    from rewardlab.client import AsyncRewardClient

    client = AsyncRewardClient(
        server.url,
        model=server.model,
        token=server.token(),
        artifact=server.folder or None,
        max_concurrency=server.concurrency,
        truncate=TRUNCATE[settings.overlong],
    )
    bare = None if renderer is None else renderer.renderer.joins_texts
    backend = RemoteBackend(client, server.backend, model=server.model, bare=bare)
    return score_with(
        backend,
        source,
        target,
        settings,
        affine=None if renderer is None else renderer.affine,
        # Without a folder the rule of the model is not known yet, so a table gets the column in any case.
        may_shorten=renderer is None or renderer.renderer.truncation == CUT_MIDDLE,
    )
