"""What is exported, against what the clients of a real engine saw."""

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from backends.fake import fake_spec
from backends.interface import ArchiveStats, BackendError, CodeState, PrefixSpec
from cache.policy import snapstream
from cache.scorer import WindowScorer
from scheduler.admission import admit
from scheduler.messages import EngineOutput, Final, FinishReason
from scheduler.stats import PoolStats, PrefixStats, SchedulerStats, StepRecord
from server.engine.client import QueueFullError
from server.metrics.instruments import LABELS
from server.metrics.metrics import Metrics, table
from tests.server.engines import Gate, add_of, generate, running

DOCS = Path(__file__).parents[3] / "docs"
SPEC = fake_spec(
    num_slots=4, policy=snapstream(2, 8, 8, WindowScorer(observation_window=4)), max_model_len=512
)


class Samples:
    """An exposition, by name and the labels beyond those that all have."""

    def __init__(self, metrics: Metrics) -> None:
        self.families = list(text_string_to_metric_families(metrics.render().decode()))
        self._values = {
            (
                sample.name,
                frozenset((k, v) for k, v in sample.labels.items() if k not in LABELS),
            ): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]


async def test_counts_agree_with_what_clients_saw() -> None:
    metrics = Metrics("tiny")
    adds = [add_of(range(1, 4 + 9 * i), 5 + 3 * i, num_choices=1 + i % 3) for i in range(6)]
    async with running(metrics, spec=SPEC, max_num_waiting=16, max_decode_steps=4) as engine:

        async def client(number: int) -> list[Final]:
            async with aclosing(generate(engine, adds[number])) as outputs:
                return [output.final async for output in outputs if output.final is not None]

        finals = [final for finals in await asyncio.gather(*map(client, range(6))) for final in finals]
        with pytest.raises(QueueFullError):
            engine.reserve(21)
        late = generate(engine, add_of(max_tokens=300))
        await anext(late)
        await late.aclose()
    samples = Samples(metrics)
    assert samples("vllm:prompt_tokens_total") >= sum(len(add.prompt_token_ids) for add in adds)
    assert (
        samples("vllm:request_success_total", finished_reason="length")
        == len(finals)
        == sum(add.num_choices for add in adds)
    )
    assert samples("vllm:request_success_total", finished_reason="abort") == 1
    assert samples("snapserve:requests_total", outcome="abort") == 1
    assert samples("vllm:request_generation_tokens_sum") == sum(final.num_output_tokens for final in finals)
    assert samples("vllm:generation_tokens_total") >= samples("vllm:request_generation_tokens_sum")
    assert samples("vllm:admission_rejections_total") == 1
    assert samples("vllm:e2e_request_latency_seconds_count") == len(finals)
    assert samples("vllm:request_params_n_count") == len(adds) + 1
    assert samples("vllm:request_params_n_sum") == sum(add.num_choices for add in adds) + 1
    assert samples("snapserve:slots_total") == 4
    assert (
        samples("snapserve:slots_in_use")
        == samples("vllm:num_requests_running")
        == samples("vllm:num_requests_waiting")
        == 0
    )
    caches = [final.cache for final in finals if final.cache is not None]
    assert samples("snapserve:ring_wraps_total") >= sum(cache.num_ring_wraps for cache in caches) > 0
    assert samples("snapserve:cache_entries_evicted_total") >= sum(cache.num_evicted for cache in caches) > 0
    assert samples("snapserve:engine_steps_total", kind="prefill") >= len(adds) / 4
    assert (
        samples("snapserve:step_time_seconds_count", kind="decode")
        == samples("snapserve:engine_steps_total", kind="decode")
        > 0
    )


async def test_a_load_of_nothing_but_plain_requests_is_counted_to_the_token() -> None:
    metrics = Metrics("tiny")
    async with running(metrics, spec=SPEC) as engine:
        for num_tokens in (4, 8):
            async for _ in generate(engine, add_of(range(1, 11), num_tokens)):
                pass
        has_ended = asyncio.Event()

        def receive(output: EngineOutput) -> None:
            if output.tokens:
                engine.finish(output.request_id, 0, 1)
            if output.final is not None:
                has_ended.set()

        engine.submit(admit(add_of(range(1, 11), 12), engine.spec), receive)
        await has_ended.wait()
    samples = Samples(metrics)
    assert samples("vllm:prompt_tokens_total") == 30
    assert samples("vllm:generation_tokens_total") == 4 + 8 + 1
    assert samples("vllm:request_success_total", finished_reason="stop") == 1
    assert samples("vllm:time_to_first_token_seconds_count") == 3
    assert samples("vllm:inter_token_latency_seconds_count") >= 3 + 7
    assert samples("vllm:request_time_per_output_token_seconds_count") == 2  # one answer has no second token
    assert samples("snapserve:compression_ratio_count") == 3


async def test_failed_steps_are_counted() -> None:
    metrics = Metrics("tiny")
    async with running(metrics, spec=SPEC, faults={1: BackendError("a fault")}) as engine:
        async for _ in generate(engine, add_of(range(1, 11), 8)):
            pass
    assert Samples(metrics)("snapserve:failed_steps_total") == 1
    assert Samples(metrics)("snapserve:requests_total", outcome="length") == 1


def test_available_memory_is_read_at_every_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("tiny")
    assert Samples(metrics)("snapserve:memory_available_bytes") > 0
    monkeypatch.setattr("server.metrics.metrics.available_bytes", lambda: None)
    assert math.isnan(Samples(metrics)("snapserve:memory_available_bytes"))


async def test_health_and_unfinished_sequences_are_read_at_every_scrape() -> None:
    metrics, gate = Metrics("tiny"), Gate(is_open=False)
    assert Samples(metrics)("snapserve:sequences_unfinished") == 0
    async with running(metrics, gate=gate, spec=SPEC) as engine:
        metrics.watch(engine)
        codes = {state: Samples(metrics)("snapserve:decode_code", state=state.value) for state in CodeState}
        assert codes == dict.fromkeys(CodeState, 0.0) | {CodeState.PLAIN: 1.0}
        outputs = generate(engine, add_of(num_choices=3))
        reading = asyncio.ensure_future(anext(outputs))
        await gate.wait_for_step()  # the engine is stuck in its first step and has reported nothing yet
        samples = Samples(metrics)
        assert samples("snapserve:sequences_unfinished") == 3
        assert samples("snapserve:slots_in_use") == 0
        assert samples("snapserve:health", state="ready") == 1
        gate.open()
        await reading
        async for _ in outputs:
            pass
        assert Samples(metrics)("snapserve:sequences_unfinished") == 0
    samples = Samples(metrics)
    assert samples("snapserve:health", state="dead") == 1
    assert samples("snapserve:health", state="ready") == 0


def test_cache_settings_are_labels() -> None:
    metrics = Metrics("tiny")
    metrics.loaded(replace(SPEC, prefixes=PrefixSpec(40, 16, 1000)))
    settings = {
        "policy": "snapstream",
        "num_slots": "4",
        "slot_capacity": "18",
        "num_sink": "2",
        "num_recent": "8",
        "num_kept": "8",
        "num_scratch": "2",
        "max_model_len": "512",
        "block_size": "16",
        "num_gpu_blocks": "40",
    }
    assert Samples(metrics)("vllm:cache_config_info", **settings) == 1
    assert Samples(metrics)("snapserve:slot_capacity") == 18


def test_a_replica_is_named_in_every_metric_and_none_is_lost() -> None:
    plain, named = Metrics("tiny"), Metrics("tiny", "pod-7")
    families = [list(text_string_to_metric_families(each.render().decode())) for each in (plain, named)]
    without, samples = ([sample for family in each for sample in family.samples] for each in families)
    assert {sample.labels.get("replica") for sample in samples} == {"pod-7"}
    assert len(samples) == len(without) > 100
    assert named.load() == {"kv_cache_usage_perc": 0, "num_requests_waiting": 0}


def test_every_outcome_is_there_from_the_start() -> None:
    samples = Samples(Metrics("tiny"))
    assert all(samples("snapserve:requests_total", outcome=reason.value) == 0 for reason in FinishReason)


def test_files_of_prompts_are_counted_in_bytes() -> None:
    metrics = Metrics("tiny")
    metrics.loaded(replace(SPEC, prefixes=PrefixSpec(num_blocks=10, block_tokens=128, block_bytes=1000)))
    for archive in (ArchiveStats(3, 4, 7, is_saving=True), ArchiveStats(5, 4, 2)):
        prefixes = PrefixStats(archive=archive)
        stats = SchedulerStats(0, 0, 0, 0, 0, 0, (PoolStats(0, 0),), prefixes)
        metrics.stepped(StepRecord(None, stats))
    samples = Samples(metrics)
    assert samples("snapserve:prefix_cache_disk_loaded_bytes_total") == 5000
    assert samples("snapserve:prefix_cache_disk_saved_bytes_total") == 4000
    assert samples("snapserve:prefix_cache_disk_bytes") == 2000
    assert samples("snapserve:prefix_cache_disk_saving") == 0


def test_servers_do_not_share_counts() -> None:
    one, other = Metrics("one"), Metrics("other")
    one.generated(5)
    assert Samples(one)("vllm:generation_tokens_total") == 5
    assert Samples(other)("vllm:generation_tokens_total") == 0


def test_the_documented_metrics_are_the_exported_ones() -> None:
    assert table() in (DOCS / "reference" / "metrics.md").read_text(), (
        "put what `python -m server.metrics.metrics` prints into the file"
    )
    metrics = Metrics("tiny")
    metrics.loaded(SPEC)
    metrics.answered("GET", "/health", 200, 0.1)
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in Samples(metrics).families
        if not family.name.endswith("_created") and not family.name.startswith("process_")  # Prometheus' own
    }
    documented = {line.split("`")[1] for line in table().splitlines() if line.startswith("| `")}
    assert exported == documented
