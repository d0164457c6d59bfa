"""OpenTelemetry spans, where that is installed: one for each scoring request, without its texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rewardlab.core.errors import ConfigError


class Span:
    """The span of a request, or nothing."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def note(self, facts: Mapping[str, str | int]) -> None:
        """Attach the facts that the log line of the request has."""
        if self._span is not None:
            self._span.set_attributes({f"rewardlab.{name}": value for name, value in facts.items()})


class Spans:
    """Begins spans, as children of the caller's if it sends a traceparent."""

    def __init__(self, provider: Any | None) -> None:
        """`provider` is a TracerProvider; None for no spans."""
        self._tracer = None if provider is None else provider.get_tracer("rewardlab")

    @contextmanager
    def request(self, route: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """Yield a span for a request to this route. An error marks it by the error's kind alone, since messages may
        quote texts."""
        if self._tracer is None:
            yield Span()
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(dict(headers))
        with self._tracer.start_as_current_span(
            f"POST {route}",
            context=caller,
            kind=SpanKind.SERVER,
            attributes={"http.route": route},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield Span(span)
            except BaseException as error:
                span.set_attribute("http.response.status_code", getattr(error, "status", 500))
                span.set_status(StatusCode.ERROR, getattr(error, "kind", type(error).__name__))
                raise


def spans_from_environment() -> Spans:
    """Return spans that go where OpenTelemetry's environment variables say (OTLP over HTTP).

    If the process has set a provider already, that one is used. Raises ConfigError if packages are missing.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise ConfigError('--otel: OpenTelemetry is not installed. pip install "rewardlab[telemetry]"') from None
    present = trace.get_tracer_provider()
    if isinstance(present, TracerProvider):
        return Spans(present)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found, unused-ignore]
            OTLPSpanExporter,
        )
    except ImportError:
        raise ConfigError(
            "--otel: nothing is there that sends spans on. pip install opentelemetry-exporter-otlp-proto-http"
        ) from None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "rewardlab"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)
