"""OpenTelemetry traces: one server span a request, with what the semantic conventions for generative AI say of it.

Below it stand a queue, a prefill and a decode span for each sequence, from the times that the engine told. This module is imported only
where traces are on; it needs the extra `otel`.
"""

import time
from collections.abc import Callable
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.messages import Timing
from server.http.observers import SentResponse
from server.http.record import RequestRecord
from server.version import server_version

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def provider_for(endpoint: str | None) -> TracerProvider:
    """Return what sends spans to an OTLP/HTTP endpoint (None: as the OTEL_… variables say). Shut it down at the end."""
    exporter = (
        OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
    )
    own = Resource({"service.name": "snapserve", "service.version": server_version()})
    provider = TracerProvider(
        resource=own.merge(Resource.create()) if _is_named() else Resource.create().merge(own)
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _is_named() -> bool:
    return not str(Resource.create().attributes["service.name"]).startswith("unknown_service")


class Tracing:
    """Middleware that traces requests to the routes that generate. `now` is the engine's clock."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, now: Callable[[], float]) -> None:
        self._app, self._now = app, now
        self._tracer = provider.get_tracer("snapserve", server_version())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(scope.get("path", ""))
        if operation is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(operation, propagate.extract(carrier), trace.SpanKind.SERVER)
        response = SentResponse(scope, send, self._now)
        try:
            await self._app(scope, receive, response)
        finally:
            record = RequestRecord.of(scope)
            record.when_done(lambda: self._end(span, operation, scope["path"], response.status, record))

    def _end(self, span: trace.Span, operation: str, path: str, status: int, record: RequestRecord) -> None:
        span.set_attributes(
            {"http.request.method": "POST", "url.path": path, "http.response.status_code": status}
        )
        self._describe(span, operation, record)
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    def _describe(self, span: trace.Span, operation: str, record: RequestRecord) -> None:
        asked = {
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.temperature": record.temperature,
        }
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "snapserve",
                "snapserve.request_id": record.request_id,
            }
        )
        span.set_attributes({name: value for name, value in asked.items() if value is not None})
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_output_tokens,
            }
        )
        if not record.finals:
            return
        span.set_attribute("gen_ai.response.finish_reasons", [final.reason.value for final in record.finals])
        firsts = [
            final.timing.first_token - final.timing.arrival
            for final in record.finals
            if final.timing.first_token is not None
        ]
        if firsts:
            span.set_attribute("gen_ai.server.time_to_first_token", min(firsts))
        for final in record.finals:
            self._trace_sequence(span, final.timing)

    def _trace_sequence(self, span: trace.Span, timing: Timing) -> None:
        """Add the spans of a sequence's life, as far as it came."""
        context = trace.set_span_in_context(span)
        now, wall = self._now(), time.time_ns()
        moments = [timing.arrival, timing.admitted, timing.first_token, timing.finished]
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if start is not None:
                child = self._tracer.start_span(name, context, start_time=wall - round((now - start) * 1e9))
                child.end(wall - round((now - (timing.finished if end is None else end)) * 1e9))
