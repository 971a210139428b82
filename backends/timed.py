"""A backend with another machine's time. An inner backend has the tokens, a cost model the seconds.

Faults are optional. On a virtual clock, steps take no real time. On a paced clock, a step takes the seconds
of the cost model, which include the inner backend's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backends.clock import Clock
from backends.interface import (
    Backend,
    BackendError,
    BackendSpec,
    Batch,
    BatchResult,
    CodeState,
    Pending,
    PrefillBatch,
    PrefixSpec,
)


class CostModel(Protocol):
    """The time of a step on the simulated machine."""

    def seconds(self, batch: Batch) -> float: ...


@dataclass(frozen=True, slots=True)
class SimulatedStore:
    """The stored blocks of prompts on the simulated machine, which copies `bandwidth` bytes a second."""

    spec: PrefixSpec
    bandwidth: float

    def restore_time(self, batch: Batch) -> float:
        """Return the seconds of copying a step's restored blocks."""
        rows = batch.rows if isinstance(batch, PrefillBatch) else ()
        return self._copy_time(sum(len(row.restored_blocks) for row in rows))

    def store_time(self, batch: Batch) -> float:
        """Return the seconds of copying the blocks that a step stores."""
        rows = batch.rows if isinstance(batch, PrefillBatch) else ()
        num_blocks = sum(len(row.stored_blocks) for row in rows)
        return self._copy_time(num_blocks + sum(len(store.blocks) for store in batch.slot_stores))

    def _copy_time(self, num_blocks: int) -> float:
        return num_blocks * self.spec.block_bytes / self.bandwidth


class Fault(Protocol):
    """Something that goes wrong with steps, which are counted from 1."""

    def seconds(self, step: int, seconds: float) -> float:
        """Return how long a step takes with this fault. Raises BackendError if it fails."""
        ...


@dataclass(frozen=True, slots=True)
class SlowSocket:
    """One socket runs `factor` times slower, and all others wait for it."""

    factor: float

    def seconds(self, step: int, seconds: float) -> float:  # noqa: ARG002 — every step is slow
        return seconds * self.factor


@dataclass(frozen=True, slots=True)
class StalledLink:
    """Every `every`-th step waits for a link for `stall` seconds."""

    every: int
    stall: float

    def seconds(self, step: int, seconds: float) -> float:
        return seconds + (self.stall if step % self.every == 0 else 0.0)


@dataclass(frozen=True, slots=True)
class FailedStep:
    """Every `every`-th step fails, and those that follow it: `times` in a row.

    A sequence fails only with its second try.
    """

    every: int
    times: int = 1

    def seconds(self, step: int, seconds: float) -> float:
        if step >= self.every and step % self.every < self.times:
            raise BackendError(f"simulated fault: step {step} failed")
        return seconds


def parse_fault(text: str) -> Fault:
    """Parse `slow-socket=FACTOR`, `stalled-link=EVERY:SECONDS` or `failed-step=EVERY[:TIMES]`.

    Raises ValueError.
    """
    name, _, value = text.partition("=")
    try:
        match name:
            case "slow-socket" if float(value) >= 1:
                return SlowSocket(float(value))
            case "stalled-link":
                every, _, stall = value.partition(":")
                if int(every) > 0 and float(stall) >= 0:
                    return StalledLink(int(every), float(stall))
            case "failed-step":
                every, _, times = value.partition(":")
                if int(every) > 0 and int(times or 1) > 0:
                    return FailedStep(int(every), int(times or 1))
    except ValueError:
        pass
    raise ValueError(
        f"fault {text!r} is none of slow-socket=FACTOR, stalled-link=EVERY:SECONDS and "
        "failed-step=EVERY[:TIMES]"
    )


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """A step under way, to end at `end` of the clock."""

    inner: Pending
    clock: Clock
    start: float
    end: float
    restore_time: float

    def result(self) -> BatchResult:
        result = self.inner.result()
        self.clock.elapse(max(0.0, self.end - self.clock.now()))
        return replace(result, elapsed=self.end - self.start, restore_time=self.restore_time)


@dataclass(frozen=True, slots=True)
class _FailedStep:
    error: BackendError

    def result(self) -> BatchResult:
        raise self.error


class TimedBackend:
    """`inner` with the time of `cost_model` on `clock`.

    A step starts when it is submitted, or when the previous one ends. `inner` must have room for the blocks
    of `store`; without one, no prompts are stored.
    """

    def __init__(
        self,
        inner: Backend,
        cost_model: CostModel,
        clock: Clock,
        faults: Sequence[Fault] = (),
        store: SimulatedStore | None = None,
    ) -> None:
        self._inner = inner
        self._cost_model = cost_model
        self._clock = clock
        self._faults = tuple(faults)
        self._store = store
        self._spec = replace(inner.spec, simulated=True, prefixes=store.spec if store is not None else None)
        self._num_steps = 0
        self._busy_until = clock.now()

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def prefix_archive(self) -> None:
        """No cost model has a disk."""

    @property
    def code(self) -> CodeState:
        return self._inner.code

    def warmup(self) -> None:
        self._inner.warmup()

    def use_idle_time(self) -> bool:
        return self._inner.use_idle_time()

    def close(self) -> None:
        self._inner.close()

    def submit(self, batch: Batch) -> Pending:
        self._num_steps += 1
        restore_time = self._store.restore_time(batch) if self._store is not None else 0.0
        store_time = self._store.store_time(batch) if self._store is not None else 0.0
        seconds = restore_time + self._cost_model.seconds(batch) + store_time
        try:
            for fault in self._faults:
                seconds = fault.seconds(self._num_steps, seconds)
        except BackendError as error:
            return _FailedStep(error)
        start = max(self._clock.now(), self._busy_until)
        self._busy_until = start + seconds
        return _TimedStep(self._inner.submit(batch), self._clock, start, self._busy_until, restore_time)
