"""Counts the work of a run, and the rates that follow from it. Pure arithmetic, no torch.

FLOPs are those of the model, not of the machine: padding, dummies and activations computed a second time count for
nothing, so a utilisation computed from them falls when any of these grows. A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.terminal import plural

GIB: Final = 2**30

DENSE_PEAK: Final[Mapping[str, Mapping[str, float]]] = {
    # TFLOP/s without sparsity, half precision accumulated in float32, from NVIDIA's data sheets (A100, A10, L4, L40S,
    # A40, H100, H200, T4, V100) and its white papers on the GA102 and AD102 chips (RTX cards). Names are those of the
    # driver, matched as a whole: laptop cards, Ti cards and MIG slices have other peaks, which are measured.
    r"A100[- ](SXM4|PCIE|PCIe)-\d+GB|A100 \d+GB PCIe": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    r"H100 80GB HBM3": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    r"H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51},
    r"H100 NVL": {"bf16": 835, "tf32": 417, "fp32": 60},
    r"H200": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    r"H200 NVL": {"bf16": 835, "tf32": 417, "fp32": 60},
    r"L4": {"bf16": 121, "tf32": 60, "fp32": 30.3},
    r"L40S": {"bf16": 362, "tf32": 183, "fp32": 91.6},
    r"A10": {"bf16": 125, "tf32": 62.5, "fp32": 31.2},
    r"A40": {"bf16": 149.7, "tf32": 74.8, "fp32": 37.4},
    r"RTX A6000": {"bf16": 154.8, "tf32": 77.4, "fp32": 38.7},
    r"GeForce RTX 3090": {"bf16": 71, "tf32": 35.6, "fp32": 35.6},
    r"GeForce RTX 4090": {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6},
    r"Tesla T4": {"fp16": 65, "fp32": 8.1},
    r"Tesla V100-SXM2-\d+GB": {"fp16": 125, "fp32": 15.7},
    r"Tesla V100-PCIE-\d+GB": {"fp16": 112, "fp32": 14},
}

Groups = Iterable[tuple[int, Sequence[int]]]
"""(shared tokens, tokens of each reply), as in PackedBatch."""


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """The most that a device can do in the arithmetic of the run."""

    flops: float
    """FLOP/s."""
    source: str
    """Where the number comes from, in words."""

    def line(self) -> str:
        """Return it as text for the log and the report."""
        return f"{self.flops / 1e12:.3g} TFLOP/s ({self.source})"


def known_peak_flops(device_name: str, arithmetic: str) -> float | None:
    """Return the FLOP/s of a GPU by the driver's name for it; None if the table has none.

    `arithmetic` is `bf16`, `fp16`, `tf32` or `fp32`.
    """
    name = device_name.removeprefix("NVIDIA ").strip()
    for pattern, peaks in DENSE_PEAK.items():
        if re.fullmatch(pattern, name):
            # A GPU that has bf16 is as fast in float16.
            tflops = peaks.get(arithmetic, peaks.get("bf16") if arithmetic == "fp16" else None)
            return None if tflops is None else tflops * 1e12
    return None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What decides how many FLOPs a token takes."""

    frozen_weights: int
    """Frozen weights of the backbone that a token is multiplied with; embeddings are looked up and do not count."""
    trained_weights: int
    """The same for weights that train."""
    head_weights: int
    attention_width: int
    """Number of query heads times the width of a head."""
    full_layers: int
    """Layers in which a token attends to all tokens before it."""
    last_frozen: int = 0
    last_trained: int = 0
    """The part of those weights, in the last layer, that is computed only for tokens whose score is read."""
    windowed_layers: int = 0
    window: int = 0
    """Tokens that a token sees in windowed layers, itself included."""
    idle_weights: int = 0
    """Those of the frozen weights that are below everything that trains, so that no gradient passes through them."""
    idle_full_layers: int = 0
    idle_windowed_layers: int = 0

    def flops(self, groups: Groups) -> int:
        """Return the model FLOPs of forward and backward over groups of conversations.

        For each token, a weight costs 2 FLOPs forward and 2 backward for its input, and 2 more if it trains. A
        query-key pair costs 4 for each unit of attention width forward, and twice that backward. The head is computed
        where scores are read. Below the first layer that trains nothing is computed backward.
        """
        tokens = reads = full = windowed = 0
        for shared, replies in groups:
            tokens += shared + sum(replies)
            reads += len(replies)
            full += attended_pairs(shared, replies)
            if self.windowed_layers:
                windowed += attended_pairs(shared, replies, self.window)
        linear = tokens * (4 * self.frozen_weights + 6 * self.trained_weights) + 6 * reads * self.head_weights
        # In the last layer, tokens whose score is not read do not go through these weights.
        linear -= (tokens - reads) * (4 * self.last_frozen + 6 * self.last_trained)
        # 12 is 4 FLOPs forward and 8 backward; 8 below is the backward part, which idle layers do not have.
        attention = 12 * self.attention_width * (self.full_layers * full + self.windowed_layers * windowed)
        linear -= 2 * tokens * self.idle_weights
        # With everything frozen the last layer is idle too, and its part was subtracted twice.
        if self.idle_weights == self.frozen_weights and not self.trained_weights:
            linear += 2 * (tokens - reads) * self.last_frozen
        idle = 8 * self.attention_width * (self.idle_full_layers * full + self.idle_windowed_layers * windowed)
        return linear + attention - idle


def attended_pairs(shared: int, replies: Sequence[int], window: int | None = None) -> int:
    """Return the query-key pairs of a group whose shared tokens are computed once.

    Each token attends to itself and to what is before it in its conversation, at most `window` tokens.
    """
    window = window or shared + max(replies)
    return _causal(shared, window) + sum(_causal(shared + own, window) - _causal(shared, window) for own in replies)


def _causal(length: int, window: int) -> int:
    """Return the pairs of one row of `length` tokens."""
    whole = min(length, window)
    return whole * (whole + 1) // 2 + (length - whole) * window


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of what was computed; the work of parts adds up to that of the whole."""

    computed_tokens: int = 0
    """All tokens, with padding and dummies."""
    padding_tokens: int = 0
    """Tokens that belong to no conversation."""
    unshared_tokens: int = 0
    """Tokens of the conversations if each had its own copy of the prompt."""
    model_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            computed_tokens=self.computed_tokens + other.computed_tokens,
            padding_tokens=self.padding_tokens + other.padding_tokens,
            unshared_tokens=self.unshared_tokens + other.unshared_tokens,
            model_flops=self.model_flops + other.model_flops,
        )

    def numbers(self) -> list[int]:
        """Return the four counts, to be summed over the ranks."""
        return [self.computed_tokens, self.padding_tokens, self.unshared_tokens, self.model_flops]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Work:
        """Return the work that has these counts: the inverse of `numbers`."""
        computed, padding, unshared, flops = map(round, numbers)
        return cls(computed_tokens=computed, padding_tokens=padding, unshared_tokens=unshared, model_flops=flops)

    @property
    def padding_share(self) -> float:
        """Padding tokens divided by computed tokens; NaN if nothing was computed."""
        return self.padding_tokens / self.computed_tokens if self.computed_tokens else math.nan

    @property
    def sharing_ratio(self) -> float:
        """Unshared tokens divided by computed tokens: 1 without sharing and padding; NaN if nothing was computed."""
        return self.unshared_tokens / self.computed_tokens if self.computed_tokens else math.nan


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Work, and the time it took."""

    work: Work = Work()
    comparisons: int = 0
    seconds: float = 0.0
    """Time in training steps, without evaluating and saving."""
    steps: int = 0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(
            work=self.work + other.work,
            comparisons=self.comparisons + other.comparisons,
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Throughput:
        """Return the throughput that `dataclasses.asdict` turned into `values`."""
        return cls(**{**values, "work": Work(**values["work"])})

    def values(self, peak_flops: PeakFlops | None, peak_memory: int) -> dict[str, float]:
        """Return columns of metrics.csv; `peak_memory` is in bytes. Without `peak_flops` the utilisation is NaN."""
        rate = self.work.model_flops / self.seconds if self.seconds else math.nan
        return {
            "tokens": self.work.computed_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.work.computed_tokens / self.seconds if self.seconds else math.nan,
            "pairs_per_second": self.comparisons / self.seconds if self.seconds else math.nan,
            "padding_share": self.work.padding_share,
            "sharing_ratio": self.work.sharing_ratio,
            "model_tflops_per_second": rate / 1e12,
            "mfu": rate / peak_flops.flops if peak_flops else math.nan,
            "peak_memory_gib": peak_memory / GIB,
        }


LOOKED_UP: Final = "states looked up, no tokens computed"
"""What stands in place of rates of tokens where no step computed any."""


def speed_line(values: Mapping[str, float], *, unit: str) -> str:
    """Return the rates of `Throughput.values` in at most 69 columns and `unit`, what is counted."""
    rate = f"{short(values['pairs_per_second'])} {unit}/s"
    if not values["tokens"]:
        return f"{rate}  {LOOKED_UP}  {short(values['peak_memory_gib'])} GiB"
    share = "" if math.isnan(values["mfu"]) else f"  MFU {100 * values['mfu']:.0f} %"
    ratio = values["sharing_ratio"]
    return (
        f"{short(values['tokens_per_second'])} tok/s  {rate}  "
        f"padding {100 * values['padding_share']:.0f} %  sharing {ratio:.{2 if ratio < 10 else 0}f}x{share}  "
        f"{short(values['peak_memory_gib'])} GiB"
    )


def short(number: float) -> str:
    """Return a number in at most five characters: `0.52`, `4.1`, `812`, `47.1k`, `1235k`."""
    # The limits are where rounding would add a digit: 99.95 becomes 100.0 with one decimal.
    if number >= 99_950:
        return f"{number / 1000:.0f}k"
    if number >= 9_999.5:
        return f"{number / 1000:.1f}k"
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 0.95 else f"{number:.2f}"


def closing_line(total: Throughput, peak_flops: PeakFlops | None, peak_memory: int, *, unit: str) -> str:
    """Return the line of a report about the speed of a whole run in `unit` a second; `peak_memory` is in bytes."""
    if not total.steps:
        return "Speed: no step was trained."
    values = total.values(peak_flops, peak_memory)
    rate = f"{short(values['pairs_per_second'])} {unit}/s"
    if not values["tokens"]:
        return (
            f"Speed: {rate} over {total.steps} {plural(total.steps, 'step')} of "
            f"{values['seconds'] / total.steps:.3f} s, {LOOKED_UP}, peak memory {values['peak_memory_gib']:.2f} GiB."
        )
    of = f" of {peak_flops.line()}" if peak_flops else ""
    share = "" if math.isnan(values["mfu"]) else f" MFU {100 * values['mfu']:.1f} %{of},"
    padding = f"padding {100 * values['padding_share']:.1f} %, sharing {values['sharing_ratio']:.2f}x"
    measured = peak_flops is not None and "measured" in peak_flops.source
    above = measured and round(values["mfu"], 3) > 1  # as it is printed
    doubt = " MFU is above 100 %: something probably slowed the device while its peak was measured." if above else ""
    return (
        f"Speed: {rate}, {short(values['tokens_per_second'])} tokens/s over "
        f"{total.steps} {plural(total.steps, 'step')} of {values['seconds'] / total.steps:.2f} s, "
        f"{padding},{share} peak memory {values['peak_memory_gib']:.2f} GiB.{doubt}"
    )
