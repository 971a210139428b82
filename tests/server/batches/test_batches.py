"""`/v1/batches` with the real SDK: lines equal requests, interactive traffic is first, keys are separate."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from scheduler.config import SchedulerConfig
from server.options.settings import RateLimit
from server.text.renderer import Renderer
from tests.server.batches.conftest import KEYS
from tests.server.batches.inputs import CHAT, answers, batches_in, client, jsonl, line
from tests.server.serving import RunningServer, serve, settings, spec

ENDED = ("completed", "failed", "expired", "cancelled")


def begin(sdk: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any = CHAT, **options: Any) -> Batch:
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    raw = sdk.batches.with_raw_response.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )
    return Batch.model_validate_json(raw.content, strict=True)


def wait(sdk: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ENDED:
        batch = Batch.model_validate_json(
            sdk.batches.with_raw_response.retrieve(batch.id).content, strict=True
        )
    return batch


def content(sdk: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    return {} if file_id is None else answers(sdk.files.content(file_id).read())


def test_from_its_creation_to_its_answers(sdk: openai.OpenAI) -> None:
    lines = [line(f"r{n}", seed=n, temperature=1) for n in range(20)] + [
        line("wrong", temperature=7),
        line("odd", top_p=7),
    ]
    batch = begin(sdk, lines, metadata={"for": "a test"})
    assert (batch.object, batch.endpoint, batch.completion_window, batch.metadata) == (
        "batch",
        CHAT,
        "24h",
        {"for": "a test"},
    )
    assert batch.expires_at == batch.created_at + 24 * 3600
    ended = wait(sdk, batch)
    assert (ended.status, ended.model) == ("completed", "demo")
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (
        22,
        20,
        2,
    )
    used = [answer["response"]["body"]["usage"] for answer in content(sdk, ended.output_file_id).values()]
    assert ended.usage is not None
    assert ended.usage.input_tokens == sum(each["prompt_tokens"] for each in used) > 0
    assert ended.usage.output_tokens == sum(each["completion_tokens"] for each in used) == 80
    assert ended.usage.total_tokens == ended.usage.input_tokens + 80
    assert ended.in_progress_at
    assert ended.finalizing_at
    assert ended.completed_at
    right, wrong = content(sdk, ended.output_file_id), content(sdk, ended.error_file_id)
    for each in lines[:20]:
        asked = ChatCompletion.model_validate_json(
            sdk.post("/chat/completions", body=each["body"], cast_to=httpx.Response).content
        )
        given = ChatCompletion.model_validate_json(
            json.dumps(right[each["custom_id"]]["response"]["body"]), strict=True
        )
        assert (given.choices, given.usage) == (asked.choices, asked.usage)
    assert {name: answer["response"]["body"]["error"]["param"] for name, answer in wrong.items()} == {
        "wrong": "temperature",
        "odd": "top_p",
    }
    output = sdk.files.retrieve(str(ended.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        sdk.batches.create(input_file_id=output.id, endpoint=CHAT, completion_window="24h")


def test_responses_are_made_in_batches_too(sdk: openai.OpenAI) -> None:
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 4, "ignore_eos": True}
    batch = begin(
        sdk, [{"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}], "/v1/responses"
    )
    [answer] = content(sdk, wait(sdk, batch).output_file_id).values()
    assert sdk.responses.retrieve(answer["response"]["body"]["id"]).status == "incomplete"


async def test_the_asynchronous_client(keeping: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{keeping.url}/v1", api_key=KEYS[1], max_retries=0) as sdk:
        body = {"model": "demo", "prompt": "Anna keeps", "max_tokens": 3}
        lines = [
            {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(5)
        ]
        file = await sdk.files.create(
            file=("in", jsonl(lines)),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        options: Any = {"output_expires_after": {"anchor": "created_at", "seconds": 7200}}
        batch = await sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", **options
        )
        while batch.status not in ENDED:
            batch = await sdk.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert len(answers((await sdk.files.content(str(batch.output_file_id))).read())) == 5
        output = await sdk.files.retrieve(str(batch.output_file_id))
        assert output.expires_at == output.created_at + 7200
        assert batch.id in [each.id async for each in sdk.batches.list()]


def test_embeddings(sdk: openai.OpenAI) -> None:
    lines = [
        {"custom_id": f"e{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["Anna", f"{n}"]}}
        for n in range(5)
    ]
    ended = wait(sdk, begin(sdk, lines, "/v1/embeddings"))
    right = content(sdk, ended.output_file_id)
    asked = sdk.embeddings.create(model="demo", input=["Anna", "3"], encoding_format="float")
    assert [each["embedding"] for each in right["e3"]["response"]["body"]["data"]] == [
        each.embedding for each in asked.data
    ]
    assert ended.usage is not None
    assert (
        ended.usage.input_tokens
        == sum(answer["response"]["body"]["usage"]["prompt_tokens"] for answer in right.values())
        > 0
    )


def test_responses(sdk: openai.OpenAI) -> None:
    body = {"input": "Who keeps the lamp?", "max_output_tokens": 16, "seed": 5, "ignore_eos": True}
    lines = [
        {"custom_id": f"p{n}", "method": "POST", "url": "/v1/responses", "body": body | {"seed": n}}
        for n in range(3)
    ]
    ended = wait(sdk, begin(sdk, lines, "/v1/responses"))
    right = content(sdk, ended.output_file_id)
    for number in range(3):
        asked = sdk.responses.create(
            input="Who keeps the lamp?", max_output_tokens=16, extra_body={"seed": number, "ignore_eos": True}
        )
        given = Response.model_validate_json(json.dumps(right[f"p{number}"]["response"]["body"]), strict=True)
        assert given.output_text == asked.output_text
    assert ended.usage is not None
    assert ended.usage.output_tokens == 48


def test_a_wrong_input_fails_the_batch_with_the_numbers_of_its_lines(sdk: openai.OpenAI) -> None:
    batch = wait(
        sdk, begin(sdk, [line("a"), line("a"), line("b") | {"method": "GET"}, line("c", model="other")])
    )
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_method"),
        (4, "mismatched_model"),
    ]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    sdk.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/health"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {str(n): "y" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_refusal_names_its_parameter(sdk: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    file = sdk.files.create(file=("in", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.batches.create(
            **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | options
        )
    assert refused.value.param == param


def test_an_input_that_is_not_there(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    for call in (sdk.batches.retrieve, sdk.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_x")


def test_a_key_sees_nothing_of_anothers(client_of: Callable[[str], openai.OpenAI]) -> None:
    mine, other = client_of(KEYS[0]), client_of(KEYS[1])
    batch = wait(mine, begin(mine, [line("a")]))
    assert batch.id not in [each.id for each in other.batches.list()]
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        other.files.content(str(batch.output_file_id))
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_pages(client_of: Callable[[str], openai.OpenAI]) -> None:
    sdk = client_of(KEYS[2])
    assert sdk.batches.list().data == []
    ids = [wait(sdk, begin(sdk, [line("a")])).id for _ in range(3)]
    assert [batch.id for batch in sdk.batches.list(limit=2)] == ids[::-1]
    assert [batch.id for batch in sdk.batches.list(limit=2, after=ids[1]).data] == ids[:1]
    with pytest.raises(openai.BadRequestError):
        sdk.batches.list(limit=101)


def chat(url: str, **options: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": True} | options
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def test_interactive_requests_are_neither_refused_nor_held_up_by_batches(
    renderer: Renderer, tmp_path: Path
) -> None:
    """Two slots and no queue: two requests are admitted beside batches, and a third is refused."""
    config = SchedulerConfig(max_num_waiting=0, max_background_slots=1)
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, None, spec(num_slots=2), config=config, is_open=False, batches=batches) as server,
        client(server) as sdk,
        ThreadPoolExecutor() as pool,
    ):
        batch = begin(sdk, [line(f"r{n}", n=2, temperature=1) for n in range(4)])
        assert server.gate.arrived.acquire(timeout=30)
        asking = []
        for number in (1, 2):
            asking.append(pool.submit(chat, server.url))
            server.observed.wait_until(lambda expected=number + 1: server.observed.num_reserved == expected)  # type: ignore[misc]
        assert chat(server.url).status_code == 429
        server.gate.open()
        assert [each.result().status_code for each in asking] == [200, 200]
        ended = wait(sdk, batch)
        assert ended.request_counts is not None
        assert (ended.status, ended.request_counts.completed) == ("completed", 4)
        assert {
            len(each["response"]["body"]["choices"]) for each in content(sdk, ended.output_file_id).values()
        } == {2}


def test_cancelling_frees_the_slots(renderer: Renderer, tmp_path: Path) -> None:
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, is_open=False, batches=batches) as server,
        client(server) as sdk,
    ):
        batch = begin(sdk, [line(f"r{n}") for n in range(20)])
        assert server.gate.arrived.acquire(timeout=30)
        with pytest.raises(openai.ConflictError):
            sdk.files.delete(batch.input_file_id)
        cancelling = Batch.model_validate_json(
            sdk.batches.with_raw_response.cancel(batch.id).content, strict=True
        )
        assert cancelling.status in ("cancelling", "cancelled")
        cancelled = wait(sdk, cancelling)
        assert cancelled.cancelling_at
        assert cancelled.cancelled_at
        assert (cancelled.output_file_id, cancelled.error_file_id) == (None, None)
        server.gate.open()
        server.observed.wait_until(
            lambda: (step := server.observed.last_step) is not None and step.stats.num_slots_in_use == 0
        )
        with pytest.raises(openai.ConflictError) as refused:
            sdk.batches.cancel(batch.id)
        assert refused.value.code == "batch_not_cancellable"
        assert sdk.files.delete(batch.input_file_id).deleted
        assert (
            httpx.post(f"{server.url}/v1/batches/{batch.id}/cancel").status_code == 409
        )  # without a content type


def test_metrics_count_batches_and_lines(renderer: Renderer, tmp_path: Path) -> None:
    with batches_in(tmp_path) as batches, serve(renderer, batches=batches) as server:
        with client(server) as sdk:
            wait(sdk, begin(sdk, [line("a"), line("b"), line("c", temperature=-1)]))
            wait(sdk, begin(sdk, []))
        metrics = httpx.get(f"{server.url}/metrics").text
    for sample in (
        'batches{engine="0",model_name="demo",state="completed"} 1.0',
        'batches{engine="0",model_name="demo",state="failed"} 1.0',
        'batch_stalled_seconds{engine="0",model_name="demo"} 0.0',
    ):
        assert f"snapserve:{sample}" in metrics
    for outcome, number in (("completed", 2), ("failed", 1)):
        assert (
            f'snapserve:batch_lines_total{{engine="0",model_name="demo",outcome="{outcome}"}} {number}.0'
            in metrics
        )


def test_lines_count_against_their_keys_limits(renderer: Renderer, tmp_path: Path) -> None:
    limited = settings(rate_limit=RateLimit(requests=5, tokens=1000))
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, limited, batches=batches) as server,
        client(server) as sdk,
    ):
        start = time.monotonic()
        # Four lines and the request below are all of this minute. What generates nothing does not count.
        batch = begin(sdk, [*(line(f"r{n}") for n in range(3)), line("large", max_tokens=1010)])
        ended = wait(sdk, batch)
        assert (ended.status, ended.request_counts and ended.request_counts.completed) == ("completed", 3)
        # A line that no minute has room for is refused, and does not wait for ever.
        refused = content(sdk, ended.error_file_id)["large"]["response"]
        assert (refused["status_code"], refused["body"]["error"]["code"]) == (429, "rate_limit_exceeded")
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
        num_refilled = (time.monotonic() - start) * 5 / 60
        assert int(answer.headers["x-ratelimit-remaining-requests"]) <= num_refilled
