"""A soak from start to result: clients until the time is up, samples of memory, and the checks at the end."""

import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import httpx

from bench.soak.client import Client
from bench.soak.ledger import Check, Ledger, metrics_of
from bench.soak.traffic import next_request

SAMPLE_INTERVAL: Final = 1.0  # seconds between two samples of the server's memory
PROGRESS_INTERVAL: Final = 10.0  # seconds between two lines of progress
LINES_PER_BATCH: Final = 20
SETTLING_TIME: Final = 30.0  # most seconds for the server to end cancelled requests
WARM_SHARE: Final = 0.25  # of the time, in which memory may grow as caches and stored responses fill
MAX_GROWTH: Final = 0.05  # of the resident memory, from then on to the end
MAX_GROWTH_BYTES: Final = 32 * 1024 * 1024  # the limit is the larger of both


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a soak. The clients share the keys evenly."""

    base_url: str
    keys: Sequence[str]
    seconds: float
    num_clients: int
    share_cancelled: float
    seed: int


class Soak:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ledger = Ledger()
        self._samples: list[tuple[float, float, int]] = []  # seconds, resident bytes, requests sent

    async def run(self) -> dict[str, Any]:
        """Return the result for JSON, in which `holds` is whether all checks hold."""
        headers = {"Authorization": f"Bearer {self._plan.keys[0]}"} if self._plan.keys else {}
        async with httpx.AsyncClient(
            base_url=self._plan.base_url, headers=headers, trust_env=False, timeout=60
        ) as observer:
            self._observer = observer
            before = await self._scrape()
            self._start = time.monotonic()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                clients = [
                    group.create_task(self._run_client(index)) for index in range(self._plan.num_clients)
                ]
                await asyncio.wait({*clients, group.create_task(self._run_batches())})
                watching.cancel()
            return self._result(before, await self._settled(before))

    async def _scrape(self) -> dict[str, float]:
        return metrics_of((await self._observer.get("/metrics")).raise_for_status().text)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start

    def _client(self, index: int) -> tuple[Client, random.Random]:
        rng = random.Random(f"{self._plan.seed} {index}")
        key = self._plan.keys[index % len(self._plan.keys)] if self._plan.keys else ""
        return Client(self._plan.base_url, key, self._ledger, rng, self._plan.share_cancelled), rng

    async def _run_client(self, index: int) -> None:
        client, rng = self._client(index)
        try:
            while self._now < self._plan.seconds:
                await client.send(next_request(rng))
                await asyncio.sleep(rng.random() * 0.2)
        finally:
            await client.close()

    async def _run_batches(self) -> None:
        client, _ = self._client(self._plan.num_clients)
        try:
            while self._now < self._plan.seconds * 0.9:  # the last one shall end with the others
                await client.run_batch(LINES_PER_BATCH)
        finally:
            await client.close()

    async def _watch(self) -> None:
        next_progress = 0.0
        while True:
            memory = (await self._scrape()).get("memory", 0.0)
            self._samples.append((self._now, memory, self._ledger.num_sent))
            if self._now >= next_progress:
                next_progress += PROGRESS_INTERVAL
                counts = ", ".join(
                    f"{count} {outcome}" for outcome, count in sorted(self._ledger.outcomes.items())
                )
                elapsed = f"{self._now:.0f}/{self._plan.seconds:.0f} s"
                sent = f"{self._ledger.num_sent} sent"
                line = f"soak {elapsed}: {sent}, {counts}, {memory / 2**20:.0f} MiB"
                print(line, file=sys.stderr, flush=True)
            await asyncio.sleep(SAMPLE_INTERVAL)

    async def _settled(self, before: dict[str, float]) -> dict[str, float]:
        """Return the server's counts once all checks hold, or after `SETTLING_TIME`."""
        end = time.monotonic() + SETTLING_TIME
        while True:
            after = await self._scrape()
            if time.monotonic() > end or all(check.holds for check in self._ledger.checks(before, after)):
                return after
            await asyncio.sleep(0.2)

    def _result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        ledger = self._ledger
        plan = self._plan
        checks = [
            *ledger.checks(before, after),
            *memory_checks([(moment, memory) for moment, memory, _ in self._samples], plan.seconds),
        ]
        return {
            "holds": all(check.holds for check in checks),
            "seconds": self._now,
            "num_clients": plan.num_clients,
            "num_keys": len(plan.keys),
            "share_cancelled": plan.share_cancelled,
            "seed": plan.seed,
            "machine": {
                "processor": platform.machine(),
                "num_cores": os.cpu_count(),
                "load_at_end": os.getloadavg()[0],
            },
            "sent": ledger.num_sent,
            "outcomes": dict(ledger.outcomes),
            "by_kind": {kind: dict(outcomes) for kind, outcomes in sorted(ledger.by_kind.items())},
            "statuses": {str(status): count for status, count in sorted(ledger.statuses.items())},
            "batch_lines": dict(ledger.num_lines),
            "server": {
                name: value - (0 if name in _LEVELS else before.get(name, 0))
                for name, value in sorted(after.items())
            },
            "checks": [
                asdict(check) | {"most": min(check.most, 1e300), "holds": check.holds} for check in checks
            ],
            "samples": [
                {"seconds": round(s, 1), "resident_bytes": m, "sent": n} for s, m, n in self._samples
            ],
        }


_LEVELS: Final = ("memory", "files")


def memory_checks(samples: Sequence[tuple[float, float]], seconds: float) -> list[Check]:
    """Check that the median memory hardly grew between the fifth after warm-up and the last fifth."""
    early = [memory for moment, memory in samples if WARM_SHARE <= moment / seconds < WARM_SHARE + 0.2]
    late = [memory for moment, memory in samples if moment / seconds >= 0.8]
    if not early or not late or not samples[-1][1]:
        return []
    level = statistics.median(early)
    return [
        Check(
            "resident memory at the end, bytes",
            statistics.median(late),
            0,
            level + max(MAX_GROWTH * level, MAX_GROWTH_BYTES),
        )
    ]
