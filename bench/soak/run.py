"""A soak from start to result: clients until the time is up, samples of memory, and the checks at the end.

Where several replicas serve, one at a time is killed at random and started again. A killed process takes its
counts with it, so the processes that live at the end are checked against the requests that were sent to them.
"""

import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import httpx

from bench.soak.client import Client
from bench.soak.ledger import Check, Ledger, metrics_of
from bench.soak.replicas import Replica
from bench.soak.target import Target
from bench.soak.traffic import next_request

SAMPLE_INTERVAL: Final = 1.0  # seconds between two samples of the server's memory
PROGRESS_INTERVAL: Final = 10.0  # seconds between two lines of progress
NUM_BATCHES: Final = 3  # at a time, where replicas serve
SETTLING_TIME: Final = 60.0  # most seconds for the servers to end cancelled requests, and batches
QUIET_SHARE: Final = 0.25  # of the time, at its end, in which no replica is killed
WARM_SHARE: Final = 0.25  # of the time, in which memory may grow as caches and stored responses fill
MAX_GROWTH: Final = 0.05  # of the resident memory, from then on to the end
MAX_GROWTH_BYTES: Final = 32 * 1024 * 1024  # the limit is the larger of both


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a soak. The clients share the keys evenly. `limits` are requests a minute by key."""

    keys: Sequence[str]
    limits: Mapping[str, int]
    seconds: float
    num_clients: int
    share_cancelled: float
    seed: int
    kill_interval: float = 0.0  # seconds, the mean


class Soak:
    """One run, over one server or several replicas."""

    def __init__(self, plan: Plan, targets: Sequence[Target]) -> None:
        self._plan = plan
        self._targets = targets
        self._replicas = [target for target in targets if isinstance(target, Replica)]
        # A batch's lines may run at any replica.
        self._lines = Ledger() if self._replicas else targets[0].ledger
        self._samples: list[dict[str, Any]] = []
        self._last_start = 0.0  # of a replica, in seconds from the soak's start

    async def run(self) -> dict[str, Any]:
        """Return the result for JSON, in which `holds` is whether all checks hold."""
        headers = {"Authorization": f"Bearer {self._plan.keys[0]}"} if self._plan.keys else {}
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=60) as observer:
            self._observer = observer
            before = [await self._scrape(target) for target in self._targets]
            if self._replicas:
                before = [{} for _ in before]  # they may be other processes at the end
            self._start = time.monotonic()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                tasks = [
                    group.create_task(self._run_client(index)) for index in range(self._plan.num_clients)
                ]
                tasks.append(group.create_task(self._run_batches()))
                if self._replicas:
                    tasks.append(group.create_task(self._kill_replicas()))
                await asyncio.wait(tasks)
                watching.cancel()
            return self._result(before, await self._settled(before))

    async def _scrape(self, target: Target) -> dict[str, float]:
        answer = await self._observer.get(f"{target.base_url}/metrics")
        return metrics_of(answer.raise_for_status().text)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start

    def _client(self, index: int) -> tuple[Client, random.Random]:
        plan = self._plan
        rng = random.Random(f"{plan.seed} {index}")
        key = plan.keys[index % len(plan.keys)] if plan.keys else ""
        return Client(self._targets, self._lines, key, rng, plan.share_cancelled), rng

    async def _run_client(self, index: int) -> None:
        client, rng = self._client(index)
        try:
            while self._now < self._plan.seconds:
                await client.send(next_request(rng))
                await asyncio.sleep(rng.random() * 0.2)
        finally:
            await client.close()

    async def _run_batches(self) -> None:
        client, _ = self._client(0)

        async def run() -> None:
            while self._now < self._plan.seconds * 0.9:  # the last one shall end with the others
                await client.run_batch()

        try:
            await client.pass_over_batches()
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_BATCHES if self._replicas else 1):
                    group.create_task(run())
            await client.end_batches(SETTLING_TIME)
        finally:
            await client.close()

    async def _kill_replicas(self) -> None:
        """Kill one replica at a time. In the last quarter all live, so that memory can be compared."""
        rng = random.Random(f"{self._plan.seed} kills")
        while True:
            await asyncio.sleep(self._plan.kill_interval * rng.uniform(0.5, 1.5))
            if self._now > (1 - QUIET_SHARE) * self._plan.seconds:
                return
            replica = rng.choice(self._replicas)
            await replica.kill_and_restart()
            self._last_start = self._now
            self._print(f"{replica.name} was killed, and was ready after {replica.seconds_to_ready:.1f} s")

    async def _watch(self) -> None:
        next_progress = 0.0
        while True:
            memory = {}
            for target in self._targets:
                try:
                    memory[target.name] = (await self._scrape(target)).get("memory", 0.0)
                except httpx.HTTPError:  # it was killed
                    memory[target.name] = 0.0
            ledger = self._total()
            self._samples.append({"seconds": round(self._now, 1), "sent": ledger.num_sent, "memory": memory})
            if self._now >= next_progress:
                next_progress += PROGRESS_INTERVAL
                counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(ledger.outcomes.items()))
                sizes = " and ".join(f"{size / 2**20:.0f}" for size in memory.values())
                batches = f"{ledger.num_batches.total()} batches"
                self._print(f"{ledger.num_sent} sent, {counts}; {batches}; {sizes} MiB")
            await asyncio.sleep(SAMPLE_INTERVAL)

    def _print(self, line: str) -> None:
        print(f"soak {self._now:.0f}/{self._plan.seconds:.0f} s: {line}", file=sys.stderr, flush=True)

    async def _settled(self, before: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        """Return the servers' counts once all checks hold, or after `SETTLING_TIME`."""
        end = time.monotonic() + SETTLING_TIME
        while True:
            after = [await self._scrape(target) for target in self._targets]
            if time.monotonic() > end or all(check.holds for check in self._checks(before, after)):
                return after
            await asyncio.sleep(0.2)

    def _total(self) -> Ledger:
        """Return what clients saw of all processes of all servers."""
        total = Ledger()
        for target in self._targets:
            for ledger in (*target.earlier, target.ledger):
                total.add(ledger)
        if self._replicas:
            total.add(self._lines)
        return total

    def _checks(
        self, before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
    ) -> list[Check]:
        total = self._total()
        checks = [total.sum_check(), *total.fault_checks()]
        for target, first, last in zip(self._targets, before, after, strict=True):
            if not self._replicas:
                checks += target.ledger.line_checks(first, last)
                checks += target.ledger.checks(first, last)
                continue
            # Of the lines it is only known how many this process has answered, and that of the lines without
            # an answer each may have run here.
            num_lines = sum(last.get(f"lines:{kind}", 0.0) for kind in ("completed", "failed"))
            num_sequences = int(num_lines) + self._lines.num_uncertain_sequences
            checks += [
                replace(check, name=f"{target.name}: {check.name}")
                for check in target.ledger.checks(first, last, num_sequences)
            ]
        for key, limit in self._plan.limits.items():
            most = limit * (1 + self._now / 60)
            checks.append(Check(f"answers of {key}, by its limit", total.answered_by_key[key], 0, most))
        return checks

    def _memory_checks(self) -> list[Check]:
        """Compare memory from the last start of a replica on, or from the soak's."""
        return [
            replace(check, name=f"{target.name}: {check.name}" if self._replicas else check.name)
            for target in self._targets
            for check in memory_checks(
                [
                    (sample["seconds"] - self._last_start, sample["memory"][target.name])
                    for sample in self._samples
                    if sample["seconds"] >= self._last_start
                ],
                self._plan.seconds - self._last_start,
            )
        ]

    def _result(
        self, before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
    ) -> dict[str, Any]:
        ledger = self._total()
        plan = self._plan
        checks = [*self._checks(before, after), *self._memory_checks()]
        return {
            "holds": all(check.holds for check in checks),
            "seconds": self._now,
            "num_clients": plan.num_clients,
            "num_keys": len(plan.keys),
            "share_cancelled": plan.share_cancelled,
            "seed": plan.seed,
            "num_servers": len(self._targets),
            "num_kills": sum(len(target.earlier) for target in self._targets),
            "machine": {
                "processor": platform.machine(),
                "num_cores": os.cpu_count(),
                "load_at_end": os.getloadavg()[0],
            },
            "sent": ledger.num_sent,
            "outcomes": dict(ledger.outcomes),
            "by_kind": {kind: dict(outcomes) for kind, outcomes in sorted(ledger.by_kind.items())},
            "statuses": {str(status): count for status, count in sorted(ledger.statuses.items())},
            "batches": dict(ledger.num_batches),
            "batch_lines": dict(ledger.num_lines),
            # Of a replica, those since it was last started.
            "servers": {
                target.name: {
                    name: value - (0 if name in _LEVELS else first.get(name, 0))
                    for name, value in sorted(last.items())
                }
                for target, first, last in zip(self._targets, before, after, strict=True)
            },
            "checks": [
                asdict(check) | {"most": min(check.most, 1e300), "holds": check.holds} for check in checks
            ],
            "samples": self._samples,
        }


_LEVELS: Final = ("memory", "files")


def memory_checks(samples: Sequence[tuple[float, float]], seconds: float) -> list[Check]:
    """Check that the median memory hardly grew between the fifth after warm-up and the last fifth."""
    early = [memory for moment, memory in samples if WARM_SHARE <= moment / seconds < WARM_SHARE + 0.2]
    late = [memory for moment, memory in samples if moment / seconds >= 0.8]
    if not early or not late or not late[-1]:
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
