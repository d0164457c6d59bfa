"""Settings of `rewardlab gold sample`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.config import require_between, require_seed
from rewardlab.core.values import Section, require
from rewardlab.data.template_files import parse_arguments
from rewardlab.gold.engine import EngineConfig
from rewardlab.gold.files.parts import Shard
from rewardlab.gold.settings import require_unset

TEMPLATE_ARGUMENTS: Final = "template_arguments"
"""What a chat template is given, among what decides a reply; it is not there where nothing is given."""


@dataclass(frozen=True, kw_only=True)
class DrawConfig(Section):
    """How replies are drawn."""

    num_responses: int = 2
    """Replies to each prompt. A best-of-n curve needs two to four times as many as its largest n."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """The likeliest tokens that together have this probability are drawn from."""
    max_tokens: int = 1024
    """Most tokens of a reply; one that is cut there has `stop`: `length`."""
    template_arguments: tuple[str, ...] = ()
    """What the language model's chat template is given, as `NAME=VALUE` with values of JSON: `enable_thinking=false`
    asks Qwen3 and its like for replies without thoughts. A server gets it as `chat_template_kwargs`."""
    seed: int = 0
    """Decides the seeds: every reply to every prompt has its own, which is written beside it."""

    def __post_init__(self) -> None:
        require_between(self, num_responses=(1, 100_000), temperature=(0.0, 100.0), max_tokens=(1, 1 << 24))
        require(0 < self.top_p <= 1, f"--top-p {self.top_p:g}: must be above 0 and at most 1.")
        require_seed(self.seed)
        parse_arguments(self.template_arguments)

    def decides(self) -> dict[str, Any]:
        """Return the settings that decide a reply, besides its seed."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        given = parse_arguments(self.template_arguments)
        return {**drawn, TEMPLATE_ARGUMENTS: given} if given else drawn


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Section):
    """What draws replies."""

    backend: Literal["local", "http"] = "local"
    """A model in this process, by transformers; or a server with the chat API of OpenAI (`http`), such as vLLM."""
    url: tuple[str, ...] = ()
    """Addresses of servers of the same model, among which prompts are divided; without /v1."""
    served_model_name: str | None = None
    """Name of the model on the server; by default its only one."""
    token_env: str | None = None
    """Environment variable with the token that the server wants."""
    concurrency: int = 64
    """Most requests to a server that are under way at a time."""
    timeout_s: float = 600.0
    """Seconds for a reply with all attempts; a server that hangs is asked again after it."""
    attempts: int = 5
    """Most times that a request is sent."""
    logprobs: bool = True
    """Ask the server for log-probabilities; their sum over a reply is kept, as the model's own before temperature and
    top-p."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of a model in this process; `auto` is that of its files."""
    batch_size: int = 32
    """Replies that a model in this process draws together."""

    def __post_init__(self) -> None:
        require_between(self, concurrency=(1, 65_536), timeout_s=(0.001, 86_400), attempts=(1, 100))
        require_between(self, batch_size=(1, 100_000))
        local = self.backend == "local"
        require(local or bool(self.url), "--backend http: --url is missing: name the server's address.")
        if local:
            require_unset(self, "served_model_name", "token_env", only="--backend http")
        else:
            require_unset(self, "precision", only="--backend local")
        require(not local or not self.url, "--url: only with --backend http.")
        require(len(set(self.url)) == len(self.url), "--url: an address is named twice.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section):
    """Which prompts are replied to, and where the replies go."""

    prompts: str
    """Prompts: a file of texts, messages or rows with `prompt`, `messages` or `instruction`; or any preference data, as
    a file, a folder or a hub name, of which each prompt is taken once."""
    hf_split: str = "train"
    """Split to read from folders and hub names."""
    limit: int | None = None
    """Prompts that are drawn, with the seed; they stay in their order."""
    repeats: Literal["auto", "keep", "once"] = "auto"
    """A prompt that comes again: `keep` replies to it again, `once` does not; `auto` keeps those of files of prompts,
    and takes each prompt of preference data once."""
    system: str | None = None
    """System turn of prompts that have none; `--system ""` gives them an empty one."""
    model: str = ""
    """Folder or hub name of the language model, for `--backend local`."""
    output: Path
    """Rows with `prompt`, `responses` and `samples` as JSON Lines; beside it the same name with .json:
    `[{"response_1": …, "response_2": …}]`. Either may be named."""
    shard: str | None = None
    """Reply to one part of the prompts: `3/16`, or `slurm` for the place of this task in its array."""
    max_error_fraction: float = 0.1
    """The command fails, after the output is written, if a larger share of the replies is missing."""
    overwrite: bool = False
    """Replace an output that was made of something else; replies that are still right are kept."""
    restart: bool = False
    """Discard what an interrupted run left."""
    draw: DrawConfig = DrawConfig()
    sampler: SamplerConfig = SamplerConfig()
    workers: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        self.workers.require_local(self.sampler.backend)
        require(bool(self.prompts), "--prompts is missing: name a file of prompts, or preference data.")
        require_between(self, max_error_fraction=(0, 1))
        if self.limit is not None:
            require_between(self, limit=(1, 1 << 40))
        local = self.sampler.backend == "local"
        require(bool(self.model) or not local, "--model is missing: name the language model that replies.")
        require(not self.model or local, "--model: only with --backend local; a server has its own.")
        if self.shard not in (None, "slurm"):
            Shard.parse(str(self.shard))

    @property
    def items_per_part(self) -> int:
        """Replies that are asked for together: one from a server; in this process, whole prompts that fill a batch."""
        num = self.draw.num_responses
        return 1 if self.sampler.backend == "http" else max(self.sampler.batch_size // num, 1) * num
