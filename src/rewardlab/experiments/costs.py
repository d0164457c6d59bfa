"""What one run takes: tokens, floating-point operations and memory, estimated from settings and a sample of the data.

Rough by nature: characters stand for tokens, and the number of weights is read from the name of a model or its
config.json. `status` tells what runs really take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.files import sha256_text
from rewardlab.data.config import SelectionConfig, TrainingDataConfig
from rewardlab.data.dataset_names import all_named
from rewardlab.data.readers import read_source
from rewardlab.data.rows import is_absent
from rewardlab.data.step_order import steps_per_epoch
from rewardlab.experiments.lengths import config_of, length_of
from rewardlab.experiments.plan import Plan, Run
from rewardlab.model.config import DEFAULT_BUDGET
from rewardlab.model.hub import at_revision
from rewardlab.training.cost.activations import bytes_a_token

CHARACTERS_A_TOKEN: Final = 4.0
"""Characters of a token of English text, about."""
SAMPLE: Final = 200
"""Rows whose lengths are looked at."""
MOST_ROWS: Final = 1_000_000
"""Rows that are counted."""
DEFAULT_PAIR: Final = 2 * 300
"""Tokens of a comparison where no data can be looked at."""
SIZE: Final = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)
"""`3B`, `135m` in the name of a model."""
FULL_FLOPS: Final = 6.0
"""Floating-point operations a weight and token: forward 2, backward 4."""
ADAPTER_FLOPS: Final = 4.0
"""The same where the weights are frozen: the backward pass computes no gradients of weights."""
FORWARD_FLOPS: Final = 2.0
FULL_BYTES: Final = 16.0
"""Bytes a weight that trains: float32 weight, gradient and two moments."""
FROZEN_BYTES: Final = 2.0
"""Bytes a frozen weight in bf16."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run of an arm takes, about."""

    steps: int | None
    tokens: float | None
    """Tokens computed in training; what rows of a prompt share is computed once for those that come together."""
    weights: float | None
    """Weights of the model."""
    flops: float | None
    gib: float | None
    """Memory of weights, gradients and optimiser."""
    activations_gib: float | None = None
    """Memory that a micro-batch keeps for its backward pass, on top of `gib`; None where the model is not at hand."""
    hours: float | None = None
    """Hours of training alone, on devices whose speed the plan states; None without it."""
    note: str = ""
    """What could not be looked at."""


def cost_of(run: Run, *, tflops: float | None = None) -> Cost:
    """Return what a run takes, about; its hours on devices that reach `tflops`."""
    if run.program:
        return Cost(steps=None, tokens=None, weights=None, flops=None, gib=None, note="another program")
    settings = run.settings
    rows, pair, note = _looked_at(settings)
    steps = settings.get("steps")
    if steps is None and rows is not None:
        trained = rows - round(rows * _held_out(settings))
        steps = max(1, round(float(settings["epochs"]) * steps_per_epoch(trained, int(settings["batch_size"]))))
    tokens = None if steps is None else steps * float(settings["batch_size"]) * pair
    weights = weights_of(str(settings["model"]))
    if settings.get("cache_states"):
        # Each conversation is computed once, whatever the number of steps.
        tokens = None if rows is None else rows * pair
    each = FORWARD_FLOPS if settings.get("train_head_only") else ADAPTER_FLOPS if settings.get("lora") else FULL_FLOPS
    frozen = settings.get("lora") or settings.get("train_head_only")
    flops = None if tokens is None or weights is None else each * weights * tokens
    return Cost(
        steps=steps,
        tokens=tokens,
        weights=weights,
        flops=flops,
        hours=None if flops is None or not tflops else flops / (tflops * 1e12) / 3600,
        gib=None if weights is None else weights * (FROZEN_BYTES if frozen else FULL_BYTES) / 2**30,
        activations_gib=_activations_gib(settings, pair),
        note=note,
    )


def _activations_gib(settings: Mapping[str, Any], pair: float) -> float | None:
    """Return what a micro-batch keeps, about; `pair` are the tokens of a comparison."""
    if settings.get("train_head_only"):
        return 0.0
    config, budget = config_of(str(settings["model"])), settings["micro_token_budget"] or DEFAULT_BUDGET
    if config is None or budget == "auto":
        return None
    checkpointing = "full" if settings["activation_checkpointing"] == "full" else "none"
    rank = int(settings["lora_rank"]) if settings.get("lora") else 0
    try:
        each = bytes_a_token(SimpleNamespace(**config), lora_rank=rank, checkpointing=checkpointing)
    except (AttributeError, TypeError, ZeroDivisionError):
        return None
    wide = 2.0 if settings["precision"] == "fp32" else 1.0
    return wide * each * min(float(budget), float(settings["batch_size"]) * pair) / 2**30


def weights_of(model: str) -> float | None:
    """Return the number of weights by config.json in the folder of a model, else by its name; None if neither says."""
    path = Path(model) / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            inner, words = int(config["intermediate_size"]), int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # Attention (4 square matrices) and a gated MLP in each layer, and the embeddings.
        return float(layers * (4 * width * width + 3 * width * inner) + words * width)
    repository, _ = at_revision(model) or (model, None)
    found = SIZE.findall(repository.rsplit("/", 1)[-1])
    return float(found[-1][0]) * (1e9 if found[-1][1].lower() == "b" else 1e6) if found else None


def sizes_of_test(plan: Plan, runs: Any) -> tuple[int, int, str]:
    """Return (prompts, comparisons, where these numbers are from) of the test data; 0 where they are not known."""
    if plan.assume.test_comparisons is not None:
        count = int(plan.assume.test_comparisons)
        return int(plan.assume.test_prompts or count), count, "as the plan says"
    first = min((run for run in runs if _has_test(run)), key=lambda run: bool(run.program), default=None)
    if first is None:
        return 0, 0, "no run reads test data"
    limit = first.settings.get("eval_limit")
    try:
        keys = list(islice(prompts_of(first.settings, "test"), 100_000 if limit is None else int(limit)))
    except (RewardlabError, OSError) as error:
        return 0, 0, f"the test data cannot be looked at here ({str(error)[:120]})"
    return len(set(keys)), len(keys), "counted, a row as one comparison"


def _has_test(run: Run) -> bool:
    """Return whether a run reads test data that are known. A program may have its own, which the plan does not name."""
    return run.reads_test and (
        not run.program or bool(run.settings.get("test_dataset") or run.settings.get("test_split"))
    )


def _looked_at(settings: Mapping[str, Any]) -> tuple[int | None, float, str]:
    """Return (rows of the training data, tokens computed for a comparison, what could not be looked at)."""
    together = _Together(int(settings.get("rows_per_prompt") or 1))
    try:
        lengths, count = [], 0
        for row in islice(_rows(settings, "train"), MOST_ROWS):
            count += 1
            if count <= SAMPLE:
                lengths.append(_characters(row))
            together.add(row)
    except (RewardlabError, OSError) as error:
        limit = settings.get("limit")
        return limit and int(limit), float(DEFAULT_PAIR), f"its data cannot be looked at here ({str(error)[:80]})"
    if settings.get("limit"):
        count = min(count, int(settings["limit"]))
    most = 2.0 * length_of(settings)
    mean = sum(min(length / CHARACTERS_A_TOKEN, most) for length in lengths) / max(len(lengths), 1)
    return count, mean * together.share(), ""


class _Together:
    """Which part of its text is computed where up to `most` rows of a prompt come together in a step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[int, tuple[int, set[int]]] = {}
        """Prompt -> (rows of its last bundle, their values); hashes, since there may be a million."""
        self._all = self._computed = 0

    def add(self, row: Mapping[str, Any]) -> None:
        if self._most == 1:
            return
        texts = {hash(text): len(text) for text in (json.dumps(value, default=str) for value in row.values())}
        prompt = hash(json.dumps(row.get("prompt"), default=str))
        size, seen = self._open.get(prompt, (0, set()))
        if is_absent(row.get("prompt")) or size == self._most:
            size, seen = 0, set()
        self._all += sum(texts.values())
        self._computed += sum(length for text, length in texts.items() if text not in seen)
        # Added in place: a bundle may be thousands of rows, and a copy for each would be as long as all before it.
        seen.update(texts)
        self._open[prompt] = (size + 1, seen)

    def share(self) -> float:
        """Return the part; 1 where each row is drawn by itself."""
        return self._computed / self._all if self._all else 1.0


def _held_out(settings: Mapping[str, Any]) -> float:
    """Return the share of the training data that chooses the checkpoint instead, where no other data do."""
    named = settings.get("eval_dataset") or settings.get("eval_split")
    return 0.0 if named else float(settings.get("eval_fraction") or 0.0)


def prompts_of(settings: Mapping[str, Any], purpose: str) -> Iterator[str]:
    """Yield a hash of the prompt of each row that a run reads for a purpose: `train`, `eval` or `test`.

    Raises DataError for data that are not on this machine, or cannot be read.
    """
    for row in _rows(settings, purpose):
        yield sha256_text(json.dumps(row.get("prompt", row.get("chosen", row)), default=str))


def own_prompts(settings: Mapping[str, Any], purpose: str) -> Iterator[str]:
    """Yield a hash of the prompt of each row that has one of its own, as a text or as messages, as in `prompts_of`."""
    for row in _rows(settings, purpose):
        if is_absent(prompt := row.get("prompt")):
            continue
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
            prompt = prompt[0].get("content", prompt)
        yield sha256_text(json.dumps(prompt, default=str))


def _rows(settings: Mapping[str, Any], purpose: str) -> Iterator[Mapping[str, Any]]:
    config = TrainingDataConfig(
        dataset=tuple(settings.get("dataset") or ()),
        test_dataset=tuple(settings.get("test_dataset") or ()),
        test_split=settings.get("test_split"),
        hf_split=settings.get("hf_split", "train"),
        selection=SelectionConfig(
            eval_dataset=tuple(settings.get("eval_dataset") or ()), eval_split=settings.get("eval_split")
        ),
    )
    for named in all_named(config):
        if named.purpose == purpose:
            sources = named.sources()
            if unseen := [source.name for source in sources if source.is_on_hub]:
                raise DataError(f"{unseen[0]} is not on this machine")
            for source in sources:
                yield from (row for _, row in read_source(source))


def _characters(row: Mapping[str, Any]) -> int:
    return sum(len(json.dumps(value, default=str)) for value in row.values())
