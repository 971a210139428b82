"""A served model with recurrent states: concurrent requests join, leave and abort without mixing states."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.oracle import continue_greedily, random_prompt
from tests.e2e.process import Server, serve
from tests.paths import DEMO_MODEL

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LFM2 with the demo model's tokenizer."""
    path = save_checkpoint("lfm2", tmp_path_factory.mktemp("hybrid"))
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--model", str(checkpoint), "--policy", "full", "--dtype", "float32", "--num-slots", "3")
    with serve(*options, log=tmp_path_factory.mktemp("hybrid") / "log") as server:
        yield server


@pytest.mark.long
def test_answers_are_those_of_transformers(checkpoint: Path, server: Server) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 150, 20, 235, 60, 9)]

    async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await client.post("/v1/completions", json=body)
        ids: list[int] = response.raise_for_status().json()["choices"][0]["token_ids"]
        return ids

    async def leave(client: httpx.AsyncClient) -> None:
        """Leave a stream in the middle of its answer."""
        body = {"prompt": random_prompt(40, seed=1), "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return

    async def all_at_once() -> list[list[int]]:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=120) as client,
            asyncio.TaskGroup() as group,
        ):
            answers = [group.create_task(complete(client, prompt)) for prompt in prompts]
            for _ in range(2):
                group.create_task(leave(client))
        return [answer.result() for answer in answers]

    model = load_oracle(checkpoint)
    expected = [continue_greedily(model, prompt, NUM_TOKENS).tokens for prompt in prompts]
    assert asyncio.run(all_at_once()) == expected
