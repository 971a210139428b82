"""What happens in the server as Prometheus metrics.

`Metrics` is told by the engine's client (`EngineObserver`) and by the HTTP edge; it keeps nothing but the counts. Each has a registry of
its own: there may be several servers in a process. `python -m server.metrics.metrics` prints the table of `docs/reference/metrics.md`.
"""

from collections import Counter
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from backends.interface import BackendSpec
from scheduler.messages import Add, CacheUse, Final, FinishReason, Timing
from scheduler.stats import StepRecord
from server.batches.batch import BatchStatus
from server.engine.client import Health, HealthStatus
from server.metrics.instruments import ENGINE, Instruments


class WatchedEngine(Protocol):
    """An engine that can be asked how it is at any moment, whatever has become of its thread."""

    @property
    def num_unfinished(self) -> int: ...

    def health(self) -> Health: ...


class WatchedBatches(Protocol):
    """Batches that can be counted at any moment."""

    def num_by_status(self) -> Counter[BatchStatus]: ...


class WatchedResponses(Protocol):
    """A store of responses, as metrics see it."""

    @property
    def num_responses(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class Metrics:
    """Counts and times of one server, labelled with its model's name."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._instruments = Instruments(self._registry, model_name)
        ProcessCollector(registry=self._registry)  # memory, processor time and open files
        self._num_slots = 0
        self._pools: tuple[str, ...] = ()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def watch(self, engine: WatchedEngine) -> None:
        """Ask this engine at every scrape: what it tells of itself ends when it is stuck."""

        def is_in(status: HealthStatus) -> float:
            return float(engine.health().status is status)

        for status in HealthStatus:
            self._instruments.health[status.value].set_function(partial(is_in, status))
        self._instruments.unfinished.set_function(lambda: engine.num_unfinished)

    def watch_batches(self, batches: WatchedBatches) -> None:
        """Ask for the batches' states at every scrape."""

        def number_in(status: BatchStatus) -> float:
            return float(batches.num_by_status()[status])

        for status in BatchStatus:
            self._instruments.batches[status.value].set_function(partial(number_in, status))

    def watch_responses(self, store: WatchedResponses) -> None:
        """Report the size of the store at every scrape."""
        self._instruments.stored_responses.set_function(lambda: store.num_responses)
        self._instruments.stored_response_bytes.set_function(lambda: store.num_bytes)

    # The HTTP edge

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP request was answered to its end; `handler` is its route's template."""
        self._instruments.http_requests.labels(method, handler, str(status)).inc()
        self._instruments.http_duration.labels(method, handler).observe(seconds)

    def rate_limited(self, kind: str) -> None:
        """A request was refused by the rate limit of this kind."""
        self._instruments.rate_limited[kind].inc()

    def answered_line(self, *, is_error: bool) -> None:
        """A line of a batch has its answer."""
        self._instruments.batch_lines["failed" if is_error else "completed"].inc()

    # EngineObserver

    def loaded(self, spec: BackendSpec) -> None:
        pool, instruments = spec.pools[0], self._instruments
        self._pools = tuple(pool.name for pool in spec.pools)
        self._num_slots = sum(pool.num_slots for pool in spec.pools)
        instruments.slots_total.set(self._num_slots)
        for each in spec.pools:
            own = (self._model_name, ENGINE, each.name)
            instruments.pool_slots_total.labels(*own).set(each.num_slots)
            instruments.pool_slot_capacity.labels(*own).set(each.policy.layout.capacity)
            for family in (instruments.pool_sequences, instruments.pool_kept, instruments.pool_evicted):
                family.labels(*own)  # counts from 0 on
        self._instruments.scratch_total.set(spec.scratch.num_scratch)
        self._instruments.simulated.set(spec.simulated)
        layout = pool.policy.layout
        self._instruments.slot_capacity.set(layout.capacity)
        sizes = (
            pool.num_slots,
            layout.capacity,
            layout.num_sink,
            layout.num_recent,
            layout.num_kept,
            spec.scratch.num_scratch,
        )
        self._instruments.cache_config.labels(
            self._model_name, ENGINE, pool.policy.name.value, *sizes, spec.max_model_len
        ).set(1)

    def refused(self) -> None:
        self._instruments.rejections.inc()

    def stepped(self, record: StepRecord) -> None:
        stats, instruments = record.stats, self._instruments
        instruments.num_running.set(stats.num_running)
        instruments.num_waiting.set(stats.num_waiting)
        instruments.slots_in_use.set(stats.num_slots_in_use)
        instruments.cache_usage.set(stats.num_slots_in_use / self._num_slots)
        instruments.scratch_in_use.set(stats.num_scratch_in_use)
        instruments.unread_prompt_tokens.set(stats.num_unread_prompt_tokens)
        for name, pool in zip(self._pools, stats.pools, strict=True):
            instruments.pool_slots_in_use.labels(self._model_name, ENGINE, name).set(pool.num_slots_in_use)
            instruments.pool_waiting.labels(self._model_name, ENGINE, name).set(pool.num_waiting)
        if record.batch is not None:
            instruments.steps[record.batch.kind].inc()
            instruments.step_time[record.batch.kind].observe(record.batch.elapsed)
            instruments.step_tokens.observe(record.batch.num_tokens)

    def read_prompt(self, add: Add) -> None:
        self._instruments.prompt_tokens.inc(len(add.prompt_token_ids))

    def got_tokens(self, _add: Add, /, since_arrival: float, since_last: float | None) -> None:
        if since_last is None:
            self._instruments.ttft.observe(since_arrival)
        else:
            self._instruments.itl.observe(since_last)

    def generated(self, num_tokens: int) -> None:
        self._instruments.generation_tokens.inc(num_tokens)

    def finished(self, add: Add, choice: int, final: Final) -> None:
        instruments, reason = self._instruments, final.reason
        instruments.requests[reason.value].inc()
        instruments.tokens_discarded.inc(final.num_discarded_tokens)
        if reason.value in instruments.success:
            instruments.success[reason.value].inc()
        if choice == 0:
            self._observe_request(add)
        own = (self._model_name, ENGINE, self._pools[add.pool])
        instruments.pool_sequences.labels(*own).inc()
        if final.cache is not None:
            self._observe_cache(final.cache)
            instruments.pool_kept.labels(*own).inc(final.cache.num_live)
            instruments.pool_evicted.labels(*own).inc(final.cache.num_evicted)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            instruments.request_generation_tokens.observe(final.num_output_tokens)
            self._observe_times(final.timing, final.num_output_tokens)

    def _observe_request(self, add: Add) -> None:
        self._instruments.request_prompt_tokens.observe(len(add.prompt_token_ids))
        self._instruments.request_max_tokens.observe(add.stop.max_tokens)
        self._instruments.request_n.observe(add.num_choices)

    def _observe_cache(self, cache: CacheUse) -> None:
        self._instruments.entries_kept.inc(cache.num_live)
        self._instruments.entries_evicted.inc(cache.num_evicted)
        self._instruments.ring_wraps.inc(cache.num_ring_wraps)
        self._instruments.compression.observe(cache.compression)

    def _observe_times(self, timing: Timing, num_output_tokens: int) -> None:
        instruments = self._instruments
        instruments.e2e.observe(timing.finished - timing.arrival)
        if timing.admitted is None:
            return
        instruments.queue_time.observe(timing.admitted - timing.arrival)
        instruments.inference_time.observe(timing.finished - timing.admitted)
        if timing.first_token is None:
            return
        decode_time = timing.finished - timing.first_token
        instruments.prefill_time.observe(timing.first_token - timing.admitted)
        instruments.decode_time.observe(decode_time)
        if num_output_tokens > 1:
            instruments.tpot.observe(decode_time / (num_output_tokens - 1))


def table() -> str:
    """Return names, kinds, labels and meanings as a Markdown table."""
    families = Instruments(CollectorRegistry(), "").families
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(family.labels)} | {family.text} |"
        for family in families
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(table(), end="")
