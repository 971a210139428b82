"""Many clients at once on few slots, a third of whom hang up: nobody notices the others, and the books balance."""

import asyncio
import random
import time
from collections.abc import Callable

import httpx
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from examples.demo_model.corpus import make_case
from tests.e2e.process import Server

NUM_CLIENTS = 64
NUM_TOKENS = 96


async def test_a_crowd_gets_the_answers_of_the_lonely(
    small_slot_server: Server, count_tokens: Callable[[str], int]
) -> None:
    # From prompts that fit beside the ring to prompts that must be selected from; the answers make some rings wrap.
    prompts = [
        make_case(1000 + i, (100, 500, 900, 1500)[i % 4], count_tokens).prompt for i in range(NUM_CLIENTS)
    ]
    hangs_up = {i: random.Random(i).randrange(0, 12) for i in range(0, NUM_CLIENTS, 3)}
    async with AsyncOpenAI(
        base_url=f"{small_slot_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        expected = {
            i: await _answer(client, prompt, None) for i, prompt in enumerate(prompts) if i not in hangs_up
        }
        before = small_slot_server.metrics()
        answers = await asyncio.gather(
            *(_answer(client, prompt, hangs_up.get(i)) for i, prompt in enumerate(prompts))
        )
    await asyncio.to_thread(_wait_until_idle, small_slot_server)
    after = small_slot_server.metrics()

    assert {i: answer for i, answer in enumerate(answers) if i not in hangs_up} == expected
    ended = {
        reason: after.get(name, 0) - before.get(name, 0)
        for reason in ("stop", "length", "abort")
        for name in (f"vllm:request_success_total{{{reason}}}",)
    }
    assert sum(ended.values()) == NUM_CLIENTS
    assert ended["length"] >= NUM_CLIENTS - len(hangs_up)
    assert ended["abort"] > 0
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert (NUM_CLIENTS - len(hangs_up)) * NUM_TOKENS <= made < NUM_CLIENTS * NUM_TOKENS


async def _open_stream(client: AsyncOpenAI, prompt: str) -> AsyncStream[ChatCompletionChunk]:
    return await client.chat.completions.create(
        model="snapserve-demo",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )


async def _answer(client: AsyncOpenAI, prompt: str, hang_up_after: int | None) -> str:
    """Return the streamed answer, or what had come of it when the client hung up: after so many chunks, at 0 most likely in the queue."""
    stream = await _open_stream(client, prompt)
    text, num_chunks = "", 0
    async with stream:
        if hang_up_after == 0:
            return text
        async for chunk in stream:
            num_chunks += 1
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if num_chunks == hang_up_after:
                break
    return text


def _wait_until_idle(server: Server) -> None:
    """Wait until the server holds no request, no slot and no scratch, and fail if it never does."""
    for _ in range(200):
        metrics = server.metrics()
        held = {
            name: metrics[name]
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "snapserve:slots_in_use")
        }
        if not any(held.values()):
            assert httpx.get(f"{server.url}/ready").status_code == 200
            return
        time.sleep(0.05)
    raise AssertionError(f"still held after 10 s: {held}")
