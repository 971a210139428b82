"""Many clients at once on few slots, a third of which disconnect: other answers and all counts stay right."""

import asyncio
import random
import time
from collections.abc import Callable

import httpx
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from examples.demo_model.corpus import make_case
from tests.e2e.process import Server

LENGTHS = (
    100,
    500,
    900,
    1500,
)  # tokens: prompts that fit beside the ring, and prompts that must be selected from
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "snapserve:slots_in_use")


# Both answer lengths make the rings of the longer prompts wrap.
@pytest.mark.parametrize(
    ("num_clients", "num_tokens"), [(24, 32), pytest.param(48, 48, marks=pytest.mark.long)]
)
async def test_concurrent_answers_equal_sequential(
    small_slot_server: Server, count_tokens: Callable[[str], int], num_clients: int, num_tokens: int
) -> None:
    prompts = [
        make_case(1000 + i, LENGTHS[i % len(LENGTHS)], count_tokens).prompt for i in range(num_clients)
    ]
    # After this number of chunks. A chunk may have four tokens.
    disconnects = {i: random.Random(i).randrange(num_tokens // 8) for i in range(0, num_clients, 3)}
    async with AsyncOpenAI(
        base_url=f"{small_slot_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        expected = {
            i: await _answer(client, prompt, num_tokens)
            for i, prompt in enumerate(prompts)
            if i not in disconnects
        }
        before = small_slot_server.metrics()
        answers = await asyncio.gather(
            *(_answer(client, prompt, num_tokens, disconnects.get(i)) for i, prompt in enumerate(prompts))
        )
    await asyncio.to_thread(_wait_until_idle, small_slot_server)
    after = small_slot_server.metrics()

    assert {i: answer for i, answer in enumerate(answers) if i not in disconnects} == expected
    ended = {
        reason: after.get(name, 0) - before.get(name, 0)
        for reason in ("stop", "length", "abort")
        for name in (f"vllm:request_success_total{{{reason}}}",)
    }
    assert sum(ended.values()) == num_clients
    assert ended["length"] >= num_clients - len(disconnects)
    assert ended["abort"] > 0
    num_generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert (num_clients - len(disconnects)) * num_tokens <= num_generated < num_clients * num_tokens


async def _open_stream(client: AsyncOpenAI, prompt: str, num_tokens: int) -> AsyncStream[ChatCompletionChunk]:
    return await client.chat.completions.create(
        model="snapserve-demo",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


async def _answer(
    client: AsyncOpenAI, prompt: str, num_tokens: int, disconnect_after: int | None = None
) -> str:
    """Return the streamed answer, or its part before the client disconnects.

    `disconnect_after` counts chunks. After 0 the request is most likely still in the queue.
    """
    stream = await _open_stream(client, prompt, num_tokens)
    text = ""
    num_chunks = 0
    async with stream:
        if disconnect_after == 0:
            return text
        async for chunk in stream:
            num_chunks += 1
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if num_chunks == disconnect_after:
                break
    return text


def _wait_until_idle(server: Server) -> None:
    """Wait until the server holds no request and no slot. Raises AssertionError after 10 s."""
    for _ in range(200):
        metrics = server.metrics()
        held = {name: metrics[name] for name in HELD if metrics[name]}
        if not held:
            assert httpx.get(f"{server.url}/ready").status_code == 200
            return
        time.sleep(0.05)
    raise AssertionError(f"still held after 10 s: {held}")
