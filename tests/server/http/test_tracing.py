"""Spans of requests, as the SDK's own exporter gets them."""

import subprocess
import sys

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backends.clock import WallClock
from server.http.tracing import Tracing
from server.text.renderer import Renderer
from tests.server.serving import MODEL, serve

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_of(
    renderer: Renderer, path: str, body: dict[str, object], headers: dict[str, str] | None = None
) -> list[ReadableSpan]:
    """Return the spans of one request, the server's last."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serve(renderer, wrap=lambda app: Tracing(app, provider, WallClock().now)) as server:
        httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=30)
        server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
        if "background" in body:
            while len(exporter.get_finished_spans()) < 4:
                httpx.get(f"{server.url}/health")
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_parts(renderer: Renderer, stream: bool) -> None:
    body = {
        "model": MODEL,
        "prompt": "Anna keeps",
        "max_tokens": 6,
        "temperature": 0.5,
        "ignore_eos": True,
        "n": 2,
        "stream": stream,
    }
    *parts, span = spans_of(renderer, "/v1/completions", body, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert span.attributes is not None
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "http.response.status_code": 200,
    }
    assert {name: span.attributes[name] for name in expected} == expected
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert [part.name for part in parts] == ["queue", "prefill", "decode"] * 2
    for part in parts:
        assert part.parent is not None
        assert part.parent.span_id == span.context.span_id
        assert (part.start_time or 0) <= (part.end_time or 0)


def test_the_span_of_a_response_in_the_background_ends_with_its_work(renderer: Renderer) -> None:
    *parts, span = spans_of(
        renderer, "/v1/responses", {"input": "Hello", "max_output_tokens": 40, "background": True}
    )
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 40
    assert isinstance(num_read := span.attributes["gen_ai.usage.input_tokens"], int)
    assert num_read > 0
    assert span.attributes["http.response.status_code"] == 200
    assert (parts[-1].end_time or 0) <= (span.end_time or 0)


def test_a_refused_request_is_a_span_too(renderer: Renderer) -> None:
    (span,) = spans_of(renderer, "/v1/chat/completions", {"messages": []})
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 400


def test_other_routes_are_not_traced(renderer: Renderer) -> None:
    assert spans_of(renderer, "/tokenize", {"prompt": "Anna"}) == []


def test_without_traces_the_sdk_is_not_imported() -> None:
    code = (
        "import sys, server.process, server.serve; "
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
