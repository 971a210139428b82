"""Simulated serving: its options, and a whole process under 64 clients."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from backends.clock import PacedClock, VirtualClock
from backends.interface import Importance, PrefillBatch, PrefillRow
from backends.sn40l.backend import SimulationConfig
from backends.timed import FailedStep, SlowSocket, TimedBackend
from cache.policy import PolicyName
from server.options.command_line import OptionError
from server.options.models import DEMO_MODEL
from tests.server.options.test_config import config_of


def test_a_machine_without_a_second_memory_stores_no_prompts() -> None:
    flags = ["--backend", "sn40l", "--inner", "fake", "--sockets", "1", "--num-slots", "1", "--no-looping"]
    cpu = ("--simulate-machine", "cpu", "--simulate-model", str(DEMO_MODEL))
    backend = config_of(*flags, *cpu).backend.load(VirtualClock(), vocab_size=512)
    assert backend.spec.prefixes is None
    configured = config_of(*flags, *cpu, "--prefix-cache-bytes", "1000000000")
    with pytest.raises(ValueError, match=r"^prefix_cache_bytes must be 0"):
        configured.backend.load(VirtualClock(), vocab_size=512)


def test_a_simulated_machine_has_no_slots_in_8_bits() -> None:
    with pytest.raises(OptionError, match=r"^--kv-cache-dtype must be auto with backend sn40l"):
        config_of("--backend", "sn40l", "--kv-cache-dtype", "int8")


@pytest.mark.parametrize("backend", ["sn40l", "fake"])
def test_other_backends_store_no_prompts_in_8_bits(backend: str) -> None:
    with pytest.raises(OptionError, match=rf"^--prefix-cache-dtype must be auto with backend {backend}"):
        config_of("--backend", backend, "--prefix-cache-dtype", "int8")


def test_a_simulated_machine_has_sparse_pools() -> None:
    config = config_of("--backend", "sn40l", "--inner", "fake", "--policy", "sparse")
    with closing(config.backend.load(VirtualClock(), vocab_size=512)) as backend:
        [pool] = backend.spec.pools
        assert backend.spec.simulated
        assert pool.policy.name is PolicyName.SPARSE


def test_a_draft_takes_its_own_simulated_time() -> None:
    flags = "--backend sn40l --inner fake --simulate-model llama-3.1-70b --time-scale virtual"
    config = config_of(*flags.split(), "--speculative-prefill-model", str(DEMO_MODEL))
    assert config.draft is not None
    clock = VirtualClock()
    seconds = []
    for configured in (config.backend, config.draft):
        with closing(configured.load(clock, vocab_size=512)) as backend:
            shape = backend.spec.prefill_shapes[-1]
            prompt = (1,) * shape.num_tokens
            row = PrefillRow("a", prompt, 0, len(prompt), (), scratch=0)
            batch = PrefillBatch((replace(row, importance=Importance()),), shape)
            seconds.append(backend.submit(batch).result().elapsed)
    assert 0 < 5 * seconds[1] < seconds[0]


def test_options_make_a_simulation() -> None:
    flags = "--backend sn40l --inner fake --sockets 8 --simulate-model llama-3.1-70b --no-looping"
    pace = "--time-scale 2.5 --fault slow-socket=2 failed-step=9"
    config = config_of(*flags.split(), *pace.split())
    faults = (SlowSocket(2.0), FailedStep(9))
    expected = SimulationConfig("llama-3.1-70b", num_sockets=8, loops=False, time_scale=2.5, faults=faults)
    assert config.backend.simulation == str(expected)
    assert config.backend.time_scale == 2.5
    assert isinstance(config.backend.make_clock(), PacedClock)
    with closing(config.backend.load(VirtualClock(), vocab_size=512)) as backend:
        assert isinstance(backend, TimedBackend)
        assert backend.spec.vocab_size == 512
    virtual = config_of("--backend", "sn40l", "--time-scale", "virtual").backend
    assert virtual.simulation == str(SimulationConfig(time_scale=None))
    assert isinstance(virtual.make_clock(), VirtualClock)
    assert config_of().backend.simulation is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--time-scale", "0"), "--time-scale must be a number above 0, or virtual"),
        (("--inner", "sn40l"), "--inner must be one of torch, fake"),
        (("--fault", "fire=1"), "--fault must be .*slow-socket=FACTOR"),
        (("--sockets", "0"), "--sockets must be a whole number of at least 1"),
    ],
)
def test_invalid_options_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(*flags)


NUM_TOKENS = 40
SCALE = 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A DeepSeek-R1 of 64 slots on 16 sockets, twenty times as fast."""
    model = "--inner fake --simulate-model deepseek-r1"
    slots = "--num-slots 64 --max-model-len 8192 --policy full"
    flags = f"{model} {slots} --time-scale {SCALE}".split()
    command = [sys.executable, "-m", "server", "serve", "--backend", "sn40l", "--port", "0", *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "simulated: true (deepseek-r1 on 16 sockets of sn40l, 20 times as fast)" in line
        yield next(word for word in line.split() if word.startswith("http://")).rstrip(":")
        process.terminate()


async def test_64_clients_are_served_at_the_simulated_pace(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:

        async def ask(number: int) -> tuple[int, str]:
            prompt = f"client {number}"
            body = {"ignore_eos": True}
            stream = await client.completions.create(
                model="snapserve-demo", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body=body,
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            return chunks[-1].usage.completion_tokens, "".join(
                chunk.choices[0].text for chunk in chunks if chunk.choices
            )

        started = time.monotonic()
        answers = await asyncio.gather(*(ask(number) for number in range(64)))
        seconds = time.monotonic() - started
        assert [num_tokens for num_tokens, _ in answers] == [NUM_TOKENS] * 64
        assert await ask(7) == answers[7]
    step = 0.04  # simulated seconds: a step of 64 slots of 8,192 entries takes a little longer
    assert seconds >= (NUM_TOKENS - 1) * step / SCALE


def test_every_answer_is_marked(url: str) -> None:
    for path, status in (
        ("/v1/models", 200),
        ("/v1/models/snapserve-demo", 200),
        ("/health", 200),
        ("/version", 200),
        ("/nowhere", 404),
    ):
        answer = httpx.get(url + path, timeout=30)
        assert answer.text.count('"simulated"') == 1
        assert (answer.status_code, answer.headers["x-simulated"], answer.json()["simulated"]) == (
            status,
            "true",
            True,
        )
    metrics = httpx.get(url + "/metrics", timeout=30)
    assert metrics.headers["x-simulated"] == "true"
    assert 'snapserve:simulated{engine="0",model_name="snapserve-demo"} 1.0' in metrics.text
    assert "simulated" not in httpx.get(url + "/openapi.json", timeout=30).json()


def test_clients_of_the_sdk_see_the_mark(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(model="snapserve-demo", messages=messages, max_tokens=3)
        assert whole.model_extra is not None
        assert whole.model_extra["simulated"] is True
        chunks = list(
            client.chat.completions.create(
                model="snapserve-demo", messages=messages, max_tokens=3, stream=True
            )
        )
        assert len(chunks) > 1
        assert all(chunk.model_extra == {"simulated": True} for chunk in chunks)
        events = list(
            client.responses.create(model="snapserve-demo", input="Hello", max_output_tokens=3, stream=True)
        )
        assert len(events) > 4
        assert all(
            event.model_extra is not None and event.model_extra["simulated"] is True for event in events
        )
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="Hello")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--simulate-model", "gpt-9"), "--simulate-model must be a model .*there are"),
        (("--simulate-machine", "none.toml"), "--simulate-machine must be a .toml file that can be read"),
        (
            ("--simulate-machine", "h100", "--sockets", "2", "--backend", "sn40l"),
            "--sockets must be from 1 to 1, got 2",
        ),
    ],
)
def test_impossible_simulations_are_refused_before_loading(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(*flags)
