"""The load in headers of answers, for a gateway."""

import json

import httpx
import pytest
from starlette.responses import PlainTextResponse

from server.http.load_report import FORMAT_HEADER, HEADER, LoadReport

LOAD = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


@pytest.mark.parametrize(
    ("wanted", "report"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"),
        ("json", f"JSON {json.dumps({'named_metrics': LOAD})}"),
        ("BIN", None),
        (None, None),
    ],
)
async def test_a_request_may_want_the_load(wanted: str | None, report: str | None) -> None:
    transport = httpx.ASGITransport(LoadReport(PlainTextResponse("hello"), lambda: LOAD))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        answer = await http.get("/", headers={} if wanted is None else {FORMAT_HEADER: wanted})
    assert answer.text == "hello"
    assert answer.headers.get(HEADER) == report
