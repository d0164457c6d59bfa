"""Scores of many replies by a reward model: in this process, in several, or on one or several servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.gold.settings import require_unset
from rewardlab.model.config import BUDGETS, ComputeConfig, ScoringPrecision


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(Section):
    """How reward models are asked for scores."""

    backend: Literal["local", "http", "vllm", "chat"] = "local"
    """What scores: a folder in this process; our own server (`http`); a vLLM or SGLang server (`vllm`); or, to label, a
    language model as judge behind the chat API of OpenAI (`chat`)."""
    url: tuple[str, ...] = ()
    """Addresses of servers of the same model, among which the rows are divided."""
    served_model_name: str | None = None
    """Name of the model on the server; by default its only one, or its default."""
    token_env: str | None = None
    """Environment variable with the token that the server wants."""
    concurrency: int = 16
    """Most requests to a server that are under way at a time."""
    timeout_s: float = 600.0
    """Seconds for an answer of a server with all attempts; one that hangs is asked again after it."""
    attempts: int = 5
    """Most times that a request to a server is sent."""
    max_length: int = 2048
    """Most tokens of a conversation, where a folder is scored in this process and its own limit is not smaller."""
    overlong: Literal["auto", "cut", "refuse"] = "auto"
    """A conversation above the limit: `cut` by the rule of training, or `refuse` to score it; `auto` refuses if the
    model was trained without such conversations."""
    precision: ScoringPrecision = "fp32"
    """fp32 gives the canonical scores; bf16 and fp16 are faster on hardware that has them."""
    processes: int = 1
    """Processes that score, each with a model of its own: on the CPU, or one a GPU."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; in float32 it moves a score by less than 1e-5. By default 8192, on a GPU 32768."""
    compute: ComputeConfig = ComputeConfig()

    def __post_init__(self) -> None:
        require_between(self, micro_token_budget=BUDGETS, concurrency=(1, 1024), processes=(1, 1024))
        require_between(self, max_length=(8, 1 << 24), timeout_s=(0.001, 86_400), attempts=(1, 100))
        local = self.backend == "local"
        require(local or bool(self.url), f"--backend {self.backend}: --url is missing: name the server's address.")
        if local:
            only = "--backend http, vllm or chat"
            require_unset(self, "served_model_name", "token_env", "timeout_s", "attempts", only=only)
        else:
            # A server computes as it was started.
            require_unset(self, "max_length", "precision", "processes", only="--backend local")
        require(not local or not self.url, "--url: only with --backend http, vllm or chat.")
        require(len(set(self.url)) == len(self.url), "--url: an address is named twice.")


DEFAULT_SCORING: Final = ScoringConfig()
