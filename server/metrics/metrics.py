"""The server's Prometheus metrics.

The engine's client (`EngineObserver`) and the HTTP middleware notify `Metrics` of events. Each `Metrics` has
a separate registry, since one process may run several servers. `python -m server.metrics.metrics` prints the
table of `docs/reference/metrics.md`.
"""

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric

from backends.host_memory import available_bytes
from backends.interface import ArchiveStats, BackendSpec, CodeState
from scheduler.messages import Add, CacheUse, Final, FinishReason, Timing
from scheduler.stats import PrefixStats, StepRecord
from server.batches.batch import BatchStatus
from server.engine.client import Health, HealthStatus
from server.metrics.instruments import ENGINE, Instruments


class WatchedEngine(Protocol):
    """An engine whose state can be read at any time, even if its thread is stuck or dead."""

    @property
    def num_unfinished(self) -> int: ...

    def health(self) -> Health: ...

    def code(self) -> CodeState | None: ...


class WatchedBatches(Protocol):
    """A store of batches, as metrics see it."""

    def num_by_status(self) -> collections.Counter[BatchStatus]: ...

    def stalled_seconds(self) -> float: ...


class WatchedResponses(Protocol):
    """A store of responses, as metrics see it."""

    @property
    def num_responses(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the start, over all requests. Times are seconds."""

    prompt_tokens: float
    output_tokens: float
    first_tokens: float  # sequences that have got their first token
    first_token_time: float  # of these, from arrival
    later_token_time: float  # of all sequences, between deliveries of tokens
    rejections: float


class Metrics:
    """The metrics of one server, labelled with its model's name."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model_name: str, replica: str | None = None) -> None:
        """With `replica`, every metric has a label of this name."""
        self._model_name = model_name
        self._replica = replica
        self._registry = CollectorRegistry()
        self._instruments = Instruments(self._registry, model_name)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files
        self._instruments.available_memory.set_function(_available_memory)
        self._num_slots = 0
        self._block_bytes = 0
        self._prefixes = PrefixStats()  # after the last step
        self._pools: tuple[str, ...] = ()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        if self._replica is None:
            return generate_latest(self._registry)
        return generate_latest(_Labelled(self._registry, {"replica": self._replica}))

    def totals(self) -> Totals:
        """Return the sums from which rates follow. Much cheaper than `render`."""
        instruments = self._instruments
        return Totals(
            _sample(instruments.prompt_tokens, "_total"),
            _sample(instruments.generation_tokens, "_total"),
            _sample(instruments.ttft, "_count"),
            _sample(instruments.ttft, "_sum"),
            _sample(instruments.itl, "_sum"),
            _sample(instruments.rejections, "_total"),
        )

    def load(self) -> dict[str, float]:
        """Return the load by vLLM's names, for a gateway."""
        instruments = self._instruments
        return {
            "kv_cache_usage_perc": _sample(instruments.cache_usage),
            "num_requests_waiting": _sample(instruments.num_waiting),
        }

    def watch(self, engine: WatchedEngine) -> None:
        """Read this engine's health, code and load at every scrape: a stuck engine emits no more events."""

        def is_in(status: HealthStatus) -> float:
            return float(engine.health().status is status)

        for status in HealthStatus:
            self._instruments.health[status.value].set_function(partial(is_in, status))

        def has_code(state: CodeState) -> float:
            return float(engine.code() is state)

        for state in CodeState:
            self._instruments.decode_code[state.value].set_function(partial(has_code, state))
        self._instruments.unfinished.set_function(lambda: engine.num_unfinished)

    def watch_batches(self, batches: WatchedBatches) -> None:
        """Read the state of all batches at every scrape."""

        def num_in(status: BatchStatus) -> float:
            return float(batches.num_by_status()[status])

        for status in BatchStatus:
            self._instruments.batches[status.value].set_function(partial(num_in, status))
        self._instruments.batch_stall.set_function(batches.stalled_seconds)

    def watch_responses(self, store: WatchedResponses) -> None:
        """Report the size of the store at every scrape."""
        self._instruments.stored_responses.set_function(lambda: store.num_responses)
        self._instruments.stored_response_bytes.set_function(lambda: store.num_bytes)

    # Called by the HTTP middleware and the batch runner

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP response was sent completely. `handler` is its route's path template."""
        self._instruments.http_requests.labels(method, handler, str(status)).inc()
        self._instruments.http_duration.labels(method, handler).observe(seconds)

    def rate_limited(self, kind: str) -> None:
        """The rate limit `kind` rejected a request."""
        self._instruments.rate_limited[kind].inc()

    def lost_state(self) -> None:
        """The state that replicas share could not be reached."""
        self._instruments.state_errors.inc()

    def refused_connection(self) -> None:
        """A connection was beyond the limit."""
        self._instruments.refused_connections.inc()

    def ignored_parameter(self) -> None:
        """A parameter of a request was ignored."""
        self._instruments.ignored_parameters.inc()

    def drafted(self, outcome: str, num_removed: int) -> None:
        """A prompt was to be shortened by a draft, which removed `num_removed` of its tokens."""
        self._instruments.drafted[outcome].inc()
        self._instruments.removed_tokens.inc(num_removed)

    def answered_line(self, *, is_error: bool) -> None:
        """The answer to a line of a batch was written to its journal."""
        self._instruments.batch_lines["failed" if is_error else "completed"].inc()

    def failed_write(self) -> None:
        """A batch could not be written to the disk, and waits."""
        self._instruments.disk_errors.inc()

    # EngineObserver

    def loaded(self, spec: BackendSpec) -> None:
        instruments = self._instruments
        self._pools = tuple(pool.name for pool in spec.pools)
        self._num_slots = sum(pool.num_slots for pool in spec.pools)
        instruments.slots_total.set(self._num_slots)
        for pool in spec.pools:
            labels = (self._model_name, ENGINE, pool.name)
            instruments.pool_slots_total.labels(*labels).set(pool.num_slots)
            instruments.pool_slot_capacity.labels(*labels).set(pool.policy.capacity)
            instruments.pool_slot_bytes.labels(*labels).set(pool.slot_bytes)
            # `labels` creates the series, so that the counters are exported from 0 on.
            for family in (
                instruments.pool_sequences,
                instruments.pool_kept,
                instruments.pool_evicted,
                instruments.pool_quantized,
            ):
                family.labels(*labels)
        instruments.scratch_total.set(spec.scratch.num_scratch)
        instruments.simulated.set(spec.simulated)
        if spec.prefixes is not None:
            self._block_bytes = spec.prefixes.block_bytes
            instruments.prefix_capacity.set(spec.prefixes.num_blocks * spec.prefixes.block_bytes)
        first_pool = spec.pools[0]
        layout = first_pool.policy.layout
        instruments.slot_capacity.set(first_pool.policy.capacity)
        # The values of `CACHE_SETTINGS`, in its order.
        cache_settings = (
            first_pool.policy.name.value,
            first_pool.num_slots,
            first_pool.policy.capacity,
            layout.num_sink,
            layout.num_recent,
            layout.num_kept,
            spec.scratch.num_scratch,
            spec.max_model_len,
            0 if spec.prefixes is None else spec.prefixes.block_tokens,
            0 if spec.prefixes is None else spec.prefixes.num_blocks,
        )
        instruments.cache_config.labels(self._model_name, ENGINE, *cache_settings).set(1)

    def refused(self) -> None:
        self._instruments.rejections.inc()

    def stepped(self, record: StepRecord) -> None:
        stats = record.stats
        instruments = self._instruments
        instruments.num_running.set(stats.num_running)
        instruments.num_waiting.set(stats.num_waiting)
        instruments.slots_in_use.set(stats.num_slots_in_use)
        instruments.cache_usage.set(stats.num_slots_in_use / self._num_slots)
        instruments.scratch_in_use.set(stats.num_scratch_in_use)
        instruments.unread_prompt_tokens.set(stats.num_unread_prompt_tokens)
        for name, pool in zip(self._pools, stats.pools, strict=True):
            instruments.pool_slots_in_use.labels(self._model_name, ENGINE, name).set(pool.num_slots_in_use)
            instruments.pool_waiting.labels(self._model_name, ENGINE, name).set(pool.num_waiting)
        self._observe_prefixes(stats.prefixes)
        if record.has_failed:
            instruments.failed_steps.inc()
        if record.batch is not None:
            instruments.steps[record.batch.kind].inc()
            instruments.step_time[record.batch.kind].observe(record.batch.elapsed)
            instruments.step_tokens.observe(record.batch.num_tokens)
            instruments.restore_time.inc(record.batch.restore_time)
            instruments.spec_drafts.inc(record.batch.num_drafts)
            instruments.spec_draft_tokens.inc(record.batch.num_draft_tokens)
            instruments.spec_accepted_tokens.inc(record.batch.num_accepted_tokens)

    def read_prompt(self, add: Add) -> None:
        read = self._instruments.prompt_tokens if add.importance is None else self._instruments.draft_tokens
        read.inc(len(add.prompt_token_ids))

    def got_tokens(self, _add: Add, /, since_arrival: float, since_last: float | None) -> None:
        if since_last is None:
            self._instruments.ttft.observe(since_arrival)
        else:
            self._instruments.itl.observe(since_last)

    def generated(self, num_tokens: int) -> None:
        self._instruments.generation_tokens.inc(num_tokens)

    def finished(self, add: Add, choice: int, final: Final) -> None:
        if add.importance is not None:
            return  # the request that follows the draft is counted
        instruments = self._instruments
        reason = final.reason
        instruments.requests[reason.value].inc()
        instruments.tokens_discarded.inc(final.num_discarded_tokens)
        if reason.value in instruments.success:
            instruments.success[reason.value].inc()
        if choice == 0:
            self._observe_request(add)
        labels = (self._model_name, ENGINE, self._pools[add.pool])
        instruments.pool_sequences.labels(*labels).inc()
        if final.cache is not None:
            self._observe_cache(final.cache)
            instruments.pool_kept.labels(*labels).inc(final.cache.num_live)
            instruments.pool_evicted.labels(*labels).inc(final.cache.num_evicted)
            instruments.pool_quantized.labels(*labels).inc(final.cache.num_quantized)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            instruments.request_generation_tokens.observe(final.num_output_tokens)
            self._observe_times(final.timing, final.num_output_tokens)

    def _observe_prefixes(self, stats: PrefixStats) -> None:
        instruments = self._instruments
        instruments.prefix_bytes.set(stats.num_blocks * self._block_bytes)
        before = self._prefixes
        instruments.prefix_queries.inc(stats.num_queried_tokens - before.num_queried_tokens)
        instruments.prefix_hits.inc(stats.num_hit_tokens - before.num_hit_tokens)
        num_evicted = stats.num_evicted_blocks - before.num_evicted_blocks
        instruments.prefix_evictions.inc(num_evicted * self._block_bytes)
        if stats.archive is not None:
            archive, old = stats.archive, before.archive or ArchiveStats()
            instruments.archive_bytes.set(archive.num_held * self._block_bytes)
            instruments.archive_loads.inc((archive.num_loaded - old.num_loaded) * self._block_bytes)
            instruments.archive_saves.inc((archive.num_saved - old.num_saved) * self._block_bytes)
            instruments.archive_is_saving.set(archive.is_saving)
        self._prefixes = stats

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
        """Observe the times of each phase that the sequence has reached."""
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


class _Labelled(CollectorRegistry):
    """The metrics of a registry, each with further labels."""

    def __init__(self, inner: CollectorRegistry, labels: dict[str, str]) -> None:
        super().__init__()
        self._inner = inner
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for family in self._inner.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples
            ]
            yield family


def _available_memory() -> float:
    available = available_bytes()
    return math.nan if available is None else available


def _sample(instrument: Counter | Gauge | Histogram, suffix: str = "") -> float:
    """Return the value of an instrument's sample whose name ends with `suffix`."""
    samples = (sample for family in instrument.collect() for sample in family.samples)
    return next(sample.value for sample in samples if sample.name.endswith(suffix))


def table() -> str:
    """Return the metrics' names, kinds, labels and help texts as a Markdown table."""
    families = Instruments(CollectorRegistry(), "").families
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(family.labels)} | {family.text} |"
        for family in families
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(table(), end="")
