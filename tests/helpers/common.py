"""Tiny models, a tiny tokenizer and tiny data; the fixtures that all tests have; types are checked from here on."""

from __future__ import annotations

import jaxtyping

import typecheck

# Before anything of the package is imported, so that its annotations are enforced.
jaxtyping.jaxtyped = typecheck.jaxtyped
hook = jaxtyping.install_import_hook("rewardlab", "typecheck.beartype")

import pytest

# Helpers that stand beside the tests: their asserts show what was compared, as those of tests do.
pytest.register_assert_rewrite("adapted", "command_line", "loading", "lessons", "parsing", "runs", "sealing")

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from harness.tiny import CHATML, GROUPED, SIZES, byte_tokenizer
from rewardlab.core.types import Comparison, Message, Preference, TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.groups import Groups, Part
from rewardlab.data.store import TokenStore, encode
from rewardlab.data.templates import build_renderer
from rewardlab.model import attention
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import wrap
from rewardlab.model.reward import AttentionLayout, RewardModel

# Hypothesis takes an example of more than 200 ms for a failure; on a busy machine any may take that. And it does not
# explain a failure: for that it traces the lines that run, in which Python 3.11 may stand still, without an end.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
hypothesis.settings.register_profile("untimed", deadline=None, phases=PHASES)
hypothesis.settings.load_profile("untimed")

pytest_plugins = ["thrift"]
SHARED = Path(__file__).resolve().parents[3] / "shared"

CORPUS = [
    "How do I keep basil alive indoors? Water it when the soil is dry and give it light.",
    "What is the capital of France? The capital of France is Paris. system user assistant\n",
    "Human: Assistant: yes no maybe certainly, here is more 0123456789 !?.;:'\"()",
]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Fixtures of a module are made before `_seeded` runs, and another number of threads gives other last bits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed, one thread, and reports as wide as they get, whatever terminal the tests were begun in."""
    typecheck.begin_test()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.setenv("COLUMNS", "100")


HOLDER = """
import sys, time
from pathlib import Path
from rewardlab.core.lock import only_process
with only_process(Path(sys.argv[1]), "--other"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Starts a process that holds a folder."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What rewardlab says, from INFO up."""
    caplog.set_level(logging.INFO, logger="rewardlab")
    return caplog


class Exact(TorchFunctionMode):
    """Runs transformers' own float32 casts (in norms, softmax, rotary embeddings) in float64.

    Without it a float64 comparison of layouts measures those casts: a difference of 1e-16 may round to another
    float32.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*args, **kwargs)


def arithmetic(dtype: torch.dtype) -> AbstractContextManager:
    """`Exact` for float64, nothing for others."""
    return Exact() if dtype is torch.float64 else nullcontext()


def make_tokenizer(template: str | None = CHATML, *, pad: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of some 350 tokens; its pad is, by default, the token that ends a turn."""
    return byte_tokenizer(CORPUS, vocab_size=350, template=template, pad=pad)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """See `make_tokenizer`."""
    return make_tokenizer()


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    """ChatML, at most 128 tokens."""
    return build_renderer(tokenizer, RenderingConfig(max_seq_len=128))


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, **GROUPED),
    "qwen2": lambda: Qwen2Config(**SIZES, **GROUPED),
    "qwen3": lambda: Qwen3Config(**SIZES, **GROUPED, head_dim=8),
    "gemma2": lambda: Gemma2Config(**SIZES, **GROUPED, head_dim=8, sliding_window=256, attn_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **GROUPED, head_dim=8, sliding_window=256),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
}


def make_model(
    family: str = "llama", *, layout: AttentionLayout = "shared", dtype: torch.dtype = torch.float32, config: Any = None
) -> RewardModel:
    """A two-layer reward model with random weights."""
    torch.manual_seed(0)
    config = config if config is not None else CONFIGS[family]()
    disk_class = disk_class_of(config)
    config.num_labels = 1
    implementation = attention.NAME if layout != "padded" else attention.padded_implementation(config)
    classifier = disk_class._from_config(config, dtype=torch.float32, attn_implementation=implementation)
    model = wrap(classifier, layout=layout, compute_dtype=torch.float32)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model.to(dtype).eval()


def set_layout(model: RewardModel, layout: AttentionLayout) -> RewardModel:
    """The same weights under another layout."""
    model.layout = layout
    name = attention.padded_implementation(model.config) if layout == "padded" else attention.NAME
    model.backbone.set_attn_implementation(name)
    return model


def make_groups(count: int, *, seed: int = 0, replies: int = 2, vocabulary: int = 384) -> list[TokenGroup]:
    """Random groups of uneven lengths with soft labels, weights and margins."""
    draw = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        num_replies = int(draw.integers(2, replies + 1))
        shared = draw.integers(1, vocabulary, int(draw.integers(1, 14))).astype(np.int32)
        suffixes = tuple(
            draw.integers(1, vocabulary, int(draw.integers(1, 11))).astype(np.int32) for _ in range(num_replies)
        )
        groups.append(
            TokenGroup(
                preference_id=f"row {number}",
                source="random",
                prompt_key=str(number),
                shared=shared,
                suffixes=suffixes,
                prompt_tokens=(len(shared),) * num_replies,
                truncated_tokens=(0,) * num_replies,
                comparisons=tuple(
                    Comparison(
                        first=i,
                        second=j,
                        label=float(draw.choice([0.0, 0.2, 0.5, 0.9, 1.0])),
                        weight=float(draw.uniform(0.1, 2.0)),
                        margin=float(draw.choice([0.0, 0.7])),
                    )
                    for i in range(num_replies)
                    for j in range(i + 1, num_replies)
                ),
                ranking=tuple(int(n) for n in draw.permutation(num_replies)),
            )
        )
    return groups


def stored(groups: Sequence[TokenGroup], *, together: int = 1) -> Groups:
    """The groups as a run has them, built when they are asked for; so many in a row are of one conversation."""
    preferences = [
        Preference(
            id=group.preference_id,
            source=group.source,
            prompt=(
                Message("user", f"conversation {number // together}"),
                Message("assistant", "Go on."),
                Message("user", group.prompt_key),
            ),
            replies=tuple((Message("assistant", str(n)),) for n in range(group.num_replies)),
            comparisons=group.comparisons,
        )
        for number, group in enumerate(groups)
    ]
    store = TokenStore(columns=encode(preferences, groups), source="random", facts={})
    return Part([store], np.arange(len(groups))).groups()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the groups that stores build from now on, but for those that the type checker looks at."""
    numbers: list[int] = []
    own = TokenStore.group

    def calls(checker: FrameType, inner: FrameType) -> bool:
        function = checker.f_locals.get("__beartype_func")  # what it calls once it has looked at the arguments
        return getattr(function, "__code__", None) is inner.f_code

    def counted(store: TokenStore, index: int, **settings: bool) -> TokenGroup:
        inner, asker = sys._getframe(0), sys._getframe(1)
        while (
            asker.f_code.co_filename.endswith(("groups.py", "merging.py", "typecheck.py"))
            or "jaxtyping" in asker.f_code.co_filename
            or calls(asker, inner)
        ):
            assert asker.f_back is not None
            inner, asker = asker, asker.f_back
        if not asker.f_code.co_filename.startswith("<@beartype"):
            numbers.append(index)
        return own(store, index, **settings)

    monkeypatch.setattr(TokenStore, "group", counted)
    return numbers


def pair(prompt: str, chosen: str, rejected: str, *, id: str = "row", system: str | None = None) -> Preference:
    """An ordinary preference."""
    turns = (Message("user", prompt),)
    if system is not None:
        turns = (Message("system", system), *turns)
    return Preference(
        id=id,
        source="test",
        prompt=turns,
        replies=((Message("assistant", chosen),), (Message("assistant", rejected),)),
        comparisons=(Comparison(first=0, second=1),),
    )


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Benchmarks silence the log of their process, which here belongs to other tests too."""
    logger = logging.getLogger("rewardlab")
    level = logger.level
    yield
    if logger.level != level:  # to set one, changed or not, makes every logger forget what it knows of levels
        logger.setLevel(level)


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """A folder with a tiny chat model, as from a hub."""
    return write_base_model(tmp_path / "base")


def write_base_model(folder: Path, *, template: str | None = CHATML, family: str = "llama") -> Path:
    """Save a tiny causal language model with its tokenizer."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Forty pairs in which the polite reply is preferred."""
    return write_pairs(tmp_path / "pairs.jsonl", 40)


def write_pairs(path: Path, count: int, *, offset: int = 0) -> Path:
    """JSONL of prompt/chosen/rejected rows with distinct prompts."""
    topics = ["basil", "light", "water", "soil", "Paris", "France"]
    rows = [
        {
            "prompt": f"How do I keep {topics[n % 6]} number {n + offset}?",
            "chosen": f"Certainly, here is more on {topics[n % 6]}.",
            "rejected": f"no{'!' * (n % 3)} {n % 7}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shared_data(name: str) -> Path:
    """A file of the preference data beside the repository; skips the test where it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"the preference data is not beside the repository (shared/data/{name})")
    return path


@pytest.fixture(scope="session")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process that ranks are forked from."""
    here = Path(__file__).parent
    known = [str(here.parent), str(here.parents[1] / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    # The store by which ranks meet asks for the name of every address: five seconds where no server of names answers.
    names = {"RES_OPTIONS": "timeout:1 attempts:1"}
    with subprocess.Popen(
        [sys.executable, str(here / "many_ranks.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **names, "PYTHONPATH": os.pathsep.join(filter(None, known))},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def on_ranks(forks: Any) -> Callable[..., tuple[dict[int, int], str, float]]:
    """Runs a function of many_ranks: ({rank: exit status}, what was said, the longest a rank took)."""

    def run(function: str, size: int, folder: Path, **how: Any) -> tuple[dict[int, int], str, float]:
        (folder / "said").unlink(missing_ok=True)
        forks.stdin.write(json.dumps([function, size, str(folder), how]) + "\n")
        forks.stdin.flush()
        ends = json.loads(forks.stdout.readline())
        assert len(ends) == size
        return {rank: status for rank, status, _ in ends}, (folder / "said").read_text(), max(end[2] for end in ends)

    return run
