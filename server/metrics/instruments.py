"""The server's exported metrics: their names, kinds, labels and buckets.

Where the meaning is the same as in vLLM, a metric has vLLM's name (`vllm:...`) and buckets. So vLLM's
dashboards, its autoscalers and the Gateway API's inference extension work unchanged. Names with the prefix
`snapserve:` are for concepts that vLLM does not have, such as fixed slots. A sequence is one choice: a
request with n = 3 has three sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from backends.interface import CodeState
from scheduler.messages import FinishReason
from scheduler.stats import StepKind
from server.batches.batch import BatchStatus
from server.engine.client import HealthStatus

LABELS = ("model_name", "engine")
ENGINE = "0"  # each server has one engine
DRAFT_OUTCOMES = ("shortened", "unchanged", "skipped", "failed")
CACHE_SETTINGS = (
    "policy",
    "num_slots",
    "slot_capacity",
    "num_sink",
    "num_recent",
    "num_kept",
    "num_scratch",
    "max_model_len",
    # Of the store of prompts, under vLLM's names: the endpoint picker of Kubernetes' gateways reads them.
    "block_size",
    "num_gpu_blocks",
)

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_TIME = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_TIME = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TIME = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_RATIO = (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as documented: its exported name and its help text."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class _Maker:
    """Creates a server's instruments, and lists them in `families`.

    `gauge`, `counter` and `histogram` return an instrument bound to the common labels; with the suffix `_by`,
    one for each value of a further label. With the suffix `s` they return an unbound family.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.families: list[Family] = []
        self._registry = registry
        self._common = (model_name, ENGINE)

    def gauges(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        self.families.append(Family(name, "gauge", labels, text))
        return Gauge(name, text, labels, registry=self._registry)

    def counters(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        # The client library appends `_total` to a counter's name.
        self.families.append(Family(f"{name}_total", "counter", labels, text))
        return Counter(name, text, labels, registry=self._registry)

    def histograms(
        self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...]
    ) -> Histogram:
        self.families.append(Family(name, "histogram", labels, text))
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)

    def gauge(self, name: str, text: str) -> Gauge:
        return self.gauges(name, text, LABELS).labels(*self._common)

    def counter(self, name: str, text: str) -> Counter:
        return self.counters(name, text, LABELS).labels(*self._common)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self.histograms(name, text, buckets, LABELS).labels(*self._common)

    def gauge_by(self, label: str, values: Iterable[str], name: str, text: str) -> Mapping[str, Gauge]:
        family = self.gauges(name, text, (*LABELS, label))
        return {value: family.labels(*self._common, value) for value in values}

    def counter_by(self, label: str, values: Iterable[str], name: str, text: str) -> Mapping[str, Counter]:
        family = self.counters(name, text, (*LABELS, label))
        return {value: family.labels(*self._common, value) for value in values}

    def histogram_by(
        self, label: str, values: Iterable[str], name: str, text: str, buckets: Sequence[float]
    ) -> Mapping[str, Histogram]:
        family = self.histograms(name, text, buckets, (*LABELS, label))
        return {value: family.labels(*self._common, value) for value in values}


class Instruments:
    """One server's instruments."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = _Maker(registry, model_name)
        self.families = make.families
        self._count_work(make)
        self._time_sequences(make)
        self._measure_lengths(make)
        self._count_drafts(make)
        self._watch_engine(make)
        self._watch_prefixes(make)
        self._count_entries(make)
        self._count_steps(make)
        self._count_answers(make)
        self._watch_pools(make)
        self._time_http(make)

    def _count_work(self, make: _Maker) -> None:
        self.num_running = make.gauge("vllm:num_requests_running", "Sequences that have a slot.")
        self.cache_config = make.gauges(
            "vllm:cache_config_info",
            "The settings of the first pool, and of the store of prompts, as labels; always 1.",
            (*LABELS, *CACHE_SETTINGS),
        )
        self.num_waiting = make.gauge("vllm:num_requests_waiting", "Sequences that wait for a slot.")
        self.cache_usage = make.gauge("vllm:kv_cache_usage_perc", "Share of the slots in use, from 0 to 1.")
        self.prompt_tokens = make.counter(
            "vllm:prompt_tokens", "Tokens of completely read prompts; the prompt of n choices counts once."
        )
        self.prefix_queries = make.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the store of prompts."
        )
        self.prefix_hits = make.counter(
            "vllm:prefix_cache_hits", "Prompt tokens restored from the store instead of read."
        )
        self.generation_tokens = make.counter(
            "vllm:generation_tokens", "Tokens of answers, as counted in usage."
        )
        endings = ("stop", "length", "abort")
        self.success = make.counter_by(
            "finished_reason", endings, "vllm:request_success", "Sequences that ended, by reason."
        )
        self.rejections = make.counter(
            "vllm:admission_rejections", "Requests refused because the waiting queue was full."
        )

    def _time_sequences(self, make: _Maker) -> None:
        self.ttft = make.histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to a sequence's first token.", _TTFT
        )
        self.itl = make.histogram(
            "vllm:inter_token_latency_seconds", "Between two deliveries of tokens of a sequence.", _TOKEN_TIME
        )
        self.tpot = make.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a sequence's tokens after its first.",
            _TOKEN_TIME,
        )
        self.e2e = make.histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", _REQUEST_TIME
        )
        self.queue_time = make.histogram(
            "vllm:request_queue_time_seconds", "From a request's arrival to a sequence's slot.", _REQUEST_TIME
        )
        self.inference_time = make.histogram(
            "vllm:request_inference_time_seconds", "From a sequence's slot to its end.", _REQUEST_TIME
        )
        self.prefill_time = make.histogram(
            "vllm:request_prefill_time_seconds", "From a sequence's slot to its first token.", _REQUEST_TIME
        )
        self.decode_time = make.histogram(
            "vllm:request_decode_time_seconds", "From a sequence's first token to its end.", _REQUEST_TIME
        )

    def _measure_lengths(self, make: _Maker) -> None:
        self.step_tokens = make.histogram(
            "vllm:iteration_tokens_total", "Prompt and output tokens of one step.", _STEP_TOKENS
        )
        self.request_prompt_tokens = make.histogram(
            "vllm:request_prompt_tokens", "Prompt length in tokens, once for each request.", _TOKENS
        )
        self.request_generation_tokens = make.histogram(
            "vllm:request_generation_tokens", "Answer length in tokens, once for each sequence.", _TOKENS
        )
        self.request_max_tokens = make.histogram(
            "vllm:request_params_max_tokens", "The max_tokens of requests.", _TOKENS
        )
        self.request_n = make.histogram("vllm:request_params_n", "The n of requests.", (1, 2, 5, 10, 20))

    def _count_drafts(self, make: _Maker) -> None:
        self.drafted = make.counter_by(
            "outcome",
            DRAFT_OUTCOMES,
            "snapserve:speculative_prefill_requests",
            "Requests whose prompt was long enough for a draft, by what came of it.",
        )
        self.removed_tokens = make.counter(
            "snapserve:speculative_prefill_removed_tokens",
            "Tokens of prompts that were left out on a draft's advice.",
        )
        self.draft_tokens = make.counter(
            "snapserve:draft_prompt_tokens", "Tokens of prompts that drafts read, in the drafts' tokens."
        )

    def _watch_engine(self, make: _Maker) -> None:
        states = [status.value for status in HealthStatus]
        self.health = make.gauge_by(
            "state", states, "snapserve:health", "1 for the state that the engine is in, 0 for the others."
        )
        self.decode_code = make.gauge_by(
            "state",
            [state.value for state in CodeState],
            "snapserve:decode_code",
            "1 for the state of decode's code, 0 for the others: plain (none is to be compiled), building, "
            "compiled, kernels (there is no compiler, and the package's kernels are used), failed.",
        )
        self.unfinished = make.gauge(
            "snapserve:sequences_unfinished", "Sequences submitted to the engine that have not ended."
        )
        self.slots_in_use = make.gauge("snapserve:slots_in_use", "Slots that hold a sequence, of all pools.")
        self.slots_total = make.gauge("snapserve:slots_total", "Number of slots, of all pools.")
        self.slot_capacity = make.gauge("snapserve:slot_capacity", "Entries in a slot of the first pool.")
        self.scratch_in_use = make.gauge(
            "snapserve:scratch_in_use", "Scratches in use by a long prompt that is being read."
        )
        self.scratch_total = make.gauge("snapserve:scratch_total", "Number of scratches.")
        self.simulated = make.gauge(
            "snapserve:simulated", "1 if all times are those of a simulated machine, else 0."
        )
        self.unread_prompt_tokens = make.gauge(
            "snapserve:unread_prompt_tokens", "Unread tokens of the prompts that are being read."
        )

    def _watch_prefixes(self, make: _Maker) -> None:
        self.prefix_bytes = make.gauge("snapserve:prefix_cache_bytes", "Bytes of stored prompts.")
        self.prefix_capacity = make.gauge(
            "snapserve:prefix_cache_capacity_bytes", "Bytes that the store of prompts can hold."
        )
        self.prefix_evictions = make.counter(
            "snapserve:prefix_cache_evicted_bytes", "Bytes of stored prompts evicted to store others."
        )
        self.archive_bytes = make.gauge(
            "snapserve:prefix_cache_disk_bytes", "Bytes of stored prompts in files, of all servers."
        )
        self.archive_loads = make.counter(
            "snapserve:prefix_cache_disk_loaded_bytes", "Bytes of stored prompts loaded from files."
        )
        self.archive_saves = make.counter(
            "snapserve:prefix_cache_disk_saved_bytes", "Bytes of stored prompts written to files."
        )
        self.archive_is_saving = make.gauge(
            "snapserve:prefix_cache_disk_saving",
            "1 if prompts are written to files, else 0.",
        )
        self.restore_time = make.counter(
            "snapserve:prefix_cache_restore_seconds", "Time of restoring stored prompts."
        )

    def _count_entries(self, make: _Maker) -> None:
        self.entries_kept = make.counter(
            "snapserve:cache_entries_kept", "Entries in the slots of sequences when they ended."
        )
        self.entries_evicted = make.counter(
            "snapserve:cache_entries_evicted", "Tokens evicted from the slots of sequences when they ended."
        )
        self.ring_wraps = make.counter(
            "snapserve:ring_wraps", "Times that a slot's ring began to overwrite its oldest entries."
        )
        self.compression = make.histogram(
            "snapserve:compression_ratio", "Tokens written per entry kept, once for each sequence.", _RATIO
        )

    def _count_steps(self, make: _Maker) -> None:
        self.steps = make.counter_by(
            "kind", StepKind, "snapserve:engine_steps", "Device steps launched, by kind."
        )
        self.failed_steps = make.counter(
            "snapserve:failed_steps", "Device steps that failed; their sequences try them again once, alone."
        )
        self.step_time = make.histogram_by(
            "kind", StepKind, "snapserve:step_time_seconds", "Time of one launch, by kind.", _STEP_TIME
        )
        self.spec_drafts = make.counter(
            "vllm:spec_decode_num_drafts", "Drafts of next tokens that a decode step verified."
        )
        self.spec_draft_tokens = make.counter("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.")
        self.spec_accepted_tokens = make.counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens of these drafts that were also drawn."
        )
        self.tokens_discarded = make.counter(
            "snapserve:tokens_discarded",
            "Tokens generated after an answer's end; no other metric counts them.",
        )

    def _count_answers(self, make: _Maker) -> None:
        outcomes = [reason.value for reason in FinishReason]
        self.requests = make.counter_by(
            "outcome",
            outcomes,
            "snapserve:requests",
            "Sequences that ended, including refused and failed ones.",
        )
        self.rate_limited = make.counter_by(
            "limit",
            ("requests", "tokens"),
            "snapserve:rate_limited_requests",
            "Requests refused by a rate limit, by limit.",
        )
        self.refused_connections = make.counter(
            "snapserve:refused_connections", "Connections beyond the limit of their number."
        )
        self.ignored_parameters = make.counter(
            "snapserve:ignored_parameters", "Parameters of requests that changed nothing, as unknown ones."
        )
        self.available_memory = make.gauge(
            "snapserve:memory_available_bytes",
            "Memory that the process may still take, within its control group's limit; NaN if unknown.",
        )
        self.stored_responses = make.gauge(
            "snapserve:stored_responses", "Stored responses; those of all replicas where these share them."
        )
        self.stored_response_bytes = make.gauge(
            "snapserve:stored_response_bytes", "Bytes of JSON of the stored responses."
        )
        self.state_errors = make.counter(
            "snapserve:shared_state_errors",
            "Times that the state of --state-url could not be used; a Redis is then left alone for 5 s.",
        )
        statuses = [status.value for status in BatchStatus]
        self.batches = make.gauge_by(
            "state",
            statuses,
            "snapserve:batches",
            "Stored batches in each state.",
        )
        self.batch_stall = make.gauge(
            "snapserve:batch_stalled_seconds",
            "Time since an unfinished batch had an answer or a new state, of the batch where it is longest.",
        )
        self.batch_lines = make.counter_by(
            "outcome",
            ("completed", "failed"),
            "snapserve:batch_lines",
            "Answered lines of batches, by outcome.",
        )
        self.disk_errors = make.counter(
            "snapserve:batch_disk_errors",
            "Writes of batches that failed, as on a full disk, and are retried.",
        )

    def _watch_pools(self, make: _Maker) -> None:
        by_pool = (*LABELS, "pool")
        self.pool_slots_in_use = make.gauges(
            "snapserve:pool_slots_in_use", "Slots of one pool that hold a sequence.", by_pool
        )
        self.pool_slots_total = make.gauges("snapserve:pool_slots_total", "Slots of one pool.", by_pool)
        self.pool_slot_capacity = make.gauges(
            "snapserve:pool_slot_capacity", "Entries in a slot of one pool.", by_pool
        )
        self.pool_slot_bytes = make.gauges(
            "snapserve:pool_slot_bytes", "Memory of one slot of one pool; 0 without a real model.", by_pool
        )
        self.pool_waiting = make.gauges(
            "snapserve:pool_sequences_waiting", "Sequences that wait for a slot of one pool.", by_pool
        )
        self.pool_sequences = make.counters(
            "snapserve:pool_sequences", "Sequences of one pool that ended in any way.", by_pool
        )
        self.pool_kept = make.counters(
            "snapserve:pool_cache_entries_kept", "As snapserve:cache_entries_kept, of one pool.", by_pool
        )
        self.pool_evicted = make.counters(
            "snapserve:pool_cache_entries_evicted",
            "As snapserve:cache_entries_evicted, of one pool.",
            by_pool,
        )
        self.pool_quantized = make.counters(
            "snapserve:pool_cache_entries_quantized",
            "Of the entries kept of one pool, those in 4 bits (policy sparse).",
            by_pool,
        )

    def _time_http(self, make: _Maker) -> None:
        self.http_requests = make.counters(
            "http_requests", "HTTP requests answered.", ("method", "handler", "status")
        )
        self.http_duration = make.histograms(
            "http_request_duration_seconds",
            "From an HTTP request's headers to its response's end.",
            _TTFT,
            ("method", "handler"),
        )
