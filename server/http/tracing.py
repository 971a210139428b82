"""OpenTelemetry traces: one server span a request, as the semantic conventions for generative AI define it.

Each sequence has child spans of its time in the queue, in prefill and in decode, from the times that the
engine reports. This module is imported only when traces are on. It needs the extra `otel`.
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
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def provider_for(endpoint: str | None) -> TracerProvider:
    """Return a provider that sends spans to an OTLP/HTTP endpoint. Shut it down at the end.

    Without an endpoint, the OTEL_… environment variables decide.
    """
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return provider


def _resource() -> Resource:
    """Return the environment's resource, with our name and version unless it names the service."""
    ours = Resource({"service.name": "snapserve", "service.version": server_version()})
    environment = Resource.create()
    is_named = not str(environment.attributes["service.name"]).startswith("unknown_service")
    # `merge` prefers its argument. The SDK fills in "unknown_service" where the environment has no name.
    return ours.merge(environment) if is_named else environment.merge(ours)


class Tracing:
    """Middleware that traces requests to the routes that generate. `now` is the engine's clock."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, now: Callable[[], float]) -> None:
        self._app = app
        self._now = now
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
        request = {
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
        span.set_attributes({name: value for name, value in request.items() if value is not None})
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
        """Add the spans of the phases that a sequence reached."""
        context = trace.set_span_in_context(span)
        now = self._now()
        now_ns = time.time_ns()

        def wall_time(moment: float) -> int:
            """Convert a time by the engine's clock to nanoseconds since the epoch."""
            return now_ns - round((now - moment) * 1e9)

        moments = [timing.arrival, timing.admitted, timing.first_token, timing.finished]
        for name, start, end in zip(("queue", "prefill", "decode"), moments[:-1], moments[1:], strict=True):
            if start is not None:
                child = self._tracer.start_span(name, context, start_time=wall_time(start))
                child.end(wall_time(timing.finished if end is None else end))
