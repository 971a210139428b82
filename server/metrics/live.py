"""The live view: what the slots, the queue and the rates are now, as samples for any number of viewers.

One sampler serves all viewers, and runs only while there are any. It reads the snapshots that the metrics are
made of, so the engine does nothing for it except to list its held slots with each step. Samples hold numbers
and names of pools, and no text or id of a request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from backends.interface import SlotPoolSpec
from scheduler.stats import SchedulerStats, SlotUse
from server.engine.client import EngineClient, HealthStatus
from server.http.json_response import ascii_json
from server.metrics.metrics import Totals

INTERVAL: Final = 0.25  # seconds between samples
_SAMPLES_PER_POINT: Final = 4  # of the curves
_MAX_POINTS: Final = 300  # five minutes
_ENDED: Final = (HealthStatus.DRAINING, HealthStatus.DEAD)


class LiveView:
    """The samples of one engine. `events` may be called by several viewers at once."""

    def __init__(self, client: EngineClient, totals: Callable[[], Totals]) -> None:
        self._client = client
        self._totals = totals
        self._points: deque[dict[str, Any]] = deque(maxlen=_MAX_POINTS)
        self._num_viewers = 0
        self._sampler: asyncio.Task[None] | None = None
        self._latest: bytes | None = None  # the events of the last sample; None: there are no more
        self._sampled = asyncio.Event()  # replaced at each sample

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events until the engine drains or dies.

        A viewer that reads slowly misses samples. Raises `UnavailableError` while the model is being loaded.
        """
        first = [_event("pools", **self._pools()), _event("points", points=list(self._points))]
        self._enter()
        try:
            yield b"".join(first)
            while await self._sampled.wait() and self._latest is not None:
                yield self._latest
        finally:
            self._leave()

    def _enter(self) -> None:
        self._num_viewers += 1
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._sample())

    def _leave(self) -> None:
        self._num_viewers -= 1
        if self._num_viewers == 0 and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None

    async def _sample(self) -> None:
        self._client.watch_slots(is_watched=True)
        try:
            before, start, num_samples = self._totals(), self._client.now(), 0
            while self._client.health().status not in _ENDED:
                await asyncio.sleep(INTERVAL)
                num_samples += 1
                events = [_event("sample", **self._state())]
                if num_samples % _SAMPLES_PER_POINT == 0:
                    totals, now = self._totals(), self._client.now()
                    self._points.append(_point(before, totals, now - start) | self._queue())
                    before, start = totals, now
                    events.append(_event("points", points=[self._points[-1]]))
                self._publish(b"".join(events))
        finally:
            self._client.watch_slots(is_watched=False)
            # A sampler that was cancelled has no viewers; those of its successor wait already.
            if self._sampler is asyncio.current_task():
                self._sampler = None
                self._publish(None)

    def _publish(self, events: bytes | None) -> None:
        self._latest = events
        self._sampled.set()
        self._sampled = asyncio.Event()

    def _pools(self) -> dict[str, Any]:
        spec = self._client.spec
        return {
            "max_model_len": spec.max_model_len,
            "pools": [
                {
                    "name": pool.name,
                    "policy": pool.policy.name.value,
                    "num_slots": pool.num_slots,
                    "capacity": pool.policy.layout.capacity,
                    "num_sink": pool.policy.layout.num_sink,
                    "num_recent": pool.policy.layout.num_recent,
                    "num_kept": pool.policy.layout.num_kept,
                }
                for pool in spec.pools
            ],
            "store_bytes": spec.prefixes.num_blocks * spec.prefixes.block_bytes if spec.prefixes else 0,
        }

    def _queue(self) -> dict[str, int]:
        stats = self._client.stats()
        return {"running": stats.num_running if stats else 0, "waiting": stats.num_waiting if stats else 0}

    def _state(self) -> dict[str, Any]:
        spec, stats = self._client.spec, self._client.stats()
        if stats is None:
            return {"state": self._client.health().status.value, "slots": []}
        return {
            "state": self._client.health().status.value,
            "unread_prompt_tokens": stats.num_unread_prompt_tokens,
            "pools": [{"waiting": pool.num_waiting, "in_use": pool.num_slots_in_use} for pool in stats.pools],
            "store": _store(stats, spec.prefixes.block_bytes if spec.prefixes else 0),
            # A draft's pools have no slots.
            "slots": [
                drawing(use, spec.pools[use.pool]) for use in stats.slots if use.pool < len(spec.pools)
            ],
        } | self._queue()


def drawing(use: SlotUse, pool: SlotPoolSpec) -> dict[str, Any]:
    """Return what to draw of a held slot, in entries of the average layer.

    `ring` are the first entry, the number of entries and of live ones, and the entry of the newest token.
    `lent_to_kept` are the first and the number of the ring's entries that hold more of the prompt's best
    tokens, and `lent_to_ring` is how many entries behind the ring's own it has been lent.
    """
    place = pool.policy.place(use.num_prefill_tokens)
    sink, num_recent = place.layout.num_sink, place.layout.num_recent
    # A long prompt is in a scratch until it has been read to its end.
    is_in_slot = use.is_decoding or use.num_prefill_tokens <= pool.max_direct_tokens
    num_tokens = use.num_computed_tokens if is_in_slot else 0
    num_candidates = min(max(num_tokens - sink, 0), place.window_start - sink)
    num_in_ring = min(max(num_tokens - place.window_start, 0), place.ring_size)
    num_written = max(num_tokens - use.num_prefill_tokens, 0)  # by decode
    num_lent = max(place.num_lent - num_written, 0) if use.is_decoding else 0
    return {
        "pool": use.pool,
        "slot": use.slot,
        "state": "decode" if use.is_decoding else "prefill",
        "prompt": use.num_prompt_tokens,
        "computed": use.num_computed_tokens,
        "output": use.num_output_tokens,
        "live": use.num_live if use.is_decoding else 0,
        "sinks": min(num_tokens, sink),
        "ring": [sink, place.ring_size, num_in_ring, place.entry(num_tokens - 1) if num_in_ring else sink],
        "wraps": place.num_ring_wraps(num_tokens),
        "kept": [place.kept_start, min(num_candidates, place.num_kept_used)],
        "lent_to_kept": [place.entry(place.window_start + place.num_lent - num_lent), num_lent],
        "lent_to_ring": max(place.ring_size - num_recent, 0),
    }


def _store(stats: SchedulerStats, block_bytes: int) -> dict[str, int]:
    prefixes = stats.prefixes
    return {
        "bytes": prefixes.num_blocks * block_bytes,
        "queried_tokens": prefixes.num_queried_tokens,
        "hit_tokens": prefixes.num_hit_tokens,
    }


def _point(before: Totals, after: Totals, seconds: float) -> dict[str, Any]:
    """Return the rates between two totals; None where nothing happened to measure."""
    num_first = after.first_tokens - before.first_tokens
    num_output = after.output_tokens - before.output_tokens
    num_later = num_output - num_first
    first_time = after.first_token_time - before.first_token_time
    later_time = after.later_token_time - before.later_token_time
    elapsed = max(seconds, 1e-9)  # a simulated clock may stand still
    return {
        "tokens_per_second": round(num_output / elapsed, 2),
        "prompt_tokens_per_second": round((after.prompt_tokens - before.prompt_tokens) / elapsed, 2),
        "ttft": round(first_time / num_first, 5) if num_first else None,
        "time_per_token": round(later_time / num_later, 6) if num_later > 0 else None,
        "rejections": int(after.rejections - before.rejections),
    }


def _event(kind: str, **members: object) -> bytes:
    return b"data: " + ascii_json({"type": kind, **members}) + b"\n\n"
