"""The server's metrics for Prometheus. Every app has a registry of its own.

Counts travel between workers as `Families`, plain lists that add up, so that one scrape shows all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rewardlab.serve.engine.api import Engine, Scored

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS: Final = (16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
SCORES: Final = (-20, -10, -7, -5, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 20)
GAUGES: Final = ("waiting_requests", "waiting_tokens", "max_waiting_tokens", "cache_tokens", "max_cache_tokens")
COUNTERS: Final = ("batches", "computed_tokens", "cached_tokens", "prompt_tokens", "swaps")
LASTING: Final = frozenset(("counter", "histogram"))
"""Types of metrics whose counts stay in the sum after their worker has ended."""

Samples = list[tuple[str, dict[str, str], float]]
Families = list[tuple[str, str, str, Samples]]
"""Metrics as (name, type, help, samples), each sample as (name, labels, value)."""


class EngineCollector(Collector):
    """The engine's own counts, read at each scrape."""

    def __init__(self, engine: Engine, ready: Callable[[], bool]) -> None:
        self._engine = engine
        self._ready = ready

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the engine is not asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine has done, what waits, and the models it has."""
        stats = self._engine.stats()
        for name in GAUGES:
            yield GaugeMetricFamily(f"rewardlab_{name}", f"EngineStats.{name}", value=getattr(stats, name))
        for name in COUNTERS:
            yield CounterMetricFamily(f"rewardlab_{name}", f"EngineStats.{name}", value=getattr(stats, name))
        yield CounterMetricFamily("rewardlab_busy_seconds", "Seconds in which the model computed", value=stats.busy_s)
        yield GaugeMetricFamily("rewardlab_ready", "Workers that take requests", value=float(self._ready()))
        models = GaugeMetricFamily(
            "rewardlab_model", "Workers that serve this digest", labels=("model", "digest", "dtype")
        )
        for one in self._engine.served():
            models.add_metric((one.name, one.digest, one.dtype), 1.0)
        yield models


class Metrics:
    """The counts of one app."""

    def __init__(self, engine: Engine, ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rewardlab_requests", "Answers by route and code", ("route", "code"), **common)
        self.seconds = Histogram(
            "rewardlab_request_seconds",
            "From the head of a request to its answer",
            ("route",),
            buckets=SECONDS,
            **common,
        )
        self.in_flight = Gauge("rewardlab_in_flight", "Requests that are being answered", **common)
        self.conversations = Histogram(
            "rewardlab_request_conversations", "Conversations of a scored request", buckets=COUNTS, **common
        )
        self.tokens = Histogram(
            "rewardlab_request_tokens", "Tokens of a scored request, each prompt once", buckets=TOKENS, **common
        )
        self.scores = Histogram(
            "rewardlab_score",
            "Raw scores; other outputs are not counted",
            ("model", "digest"),
            buckets=SCORES,
            **common,
        )
        self.registry.register(EngineCollector(engine, ready))
        self._engine = engine
        self._scored: set[tuple[str, str]] = set()
        """Names and digests whose scores are counted."""

    def scored(self, result: Scored, *, raw: bool) -> None:
        """Count an answer with scores."""
        values = [score for group in result.groups for score in group.scores if score is not None]
        self.conversations.observe(sum(len(group.scores) for group in result.groups))
        self.tokens.observe(result.usage.computed_tokens + result.usage.cached_tokens)
        if raw:
            histogram = self.scores.labels(result.model, result.digest)
            self._scored.add((result.model, result.digest))
            for value in values:
                histogram.observe(value)

    def families(self) -> Families:
        """Return all counts as plain lists, and forget the scores of models that are served no longer."""
        served = {(one.name, one.digest) for one in self._engine.served()}
        for gone in self._scored.copy() - served:
            self._scored.discard(gone)
            self.scores.remove(*gone)
        return [
            (
                metric.name,
                metric.type,
                metric.documentation,
                [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
            )
            for metric in self.registry.collect()
        ]


def add_up(all_families: Iterable[Families]) -> Families:
    """Return the sums of counts that have the same name and labels, over workers. Times of creation are left out."""
    heads: dict[str, tuple[str, str]] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in all_families:
        for name, kind, text, samples in families:
            heads.setdefault(name, (kind, text))
            into = sums.setdefault(name, {})
            for sample, labels, value in samples:
                if not sample.endswith("_created"):
                    key = (sample, tuple(sorted(labels.items())))
                    into[key] = into.get(key, 0.0) + value
    return [
        (name, *heads[name], [(sample, dict(labels), value) for (sample, labels), value in found.items()])
        for name, found in sums.items()
    ]


def lasting(families: Families) -> Families:
    """Return the counts that stay in the sum after their worker has ended: no gauges, which describe the present."""
    return [family for family in families if family[1] in LASTING]


def without_others(families: Families, digests: Collection[str]) -> Families:
    """Return counts without those that name another digest."""
    return [
        (name, kind, text, [sample for sample in samples if sample[1].get("digest", "") in ("", *digests)])
        for name, kind, text, samples in families
    ]


class _Given(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, kind, text, samples in self._families:
            metric = Metric(name, text, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
            yield metric


def exposition(families: Sequence[tuple[str, str, str, Samples]]) -> bytes:
    """Return counts as Prometheus reads them (text format 0.0.4)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(list(families)))
    return generate_latest(registry)
