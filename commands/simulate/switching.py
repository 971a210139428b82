"""Several models that take turns on one machine: HBM holds the weights of one, DDR those of all.

This is how a composition of experts is served (arXiv 2405.07518). A turn lasts until no request of its model
is left. If others wait, it takes no new ones after its longest time. What is under way then ends first, so no
slot is held over a switch.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from backends.clock import VirtualClock
from backends.interface import BackendSpec
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.deployment import Deployment
from backends.sn40l.step.placement import DoesNotFitError, switch_seconds
from commands.simulate.arrivals import Arrival, TraceError
from commands.simulate.replay import Replay, ReplayRecord
from scheduler.config import SchedulerConfig


def check_model(arrival: Arrival, names: Sequence[str]) -> None:
    """Raise `TraceError` if the arrival names a model that is not among these."""
    if arrival.model and arrival.model not in names:
        raise TraceError(f"model must be one of {', '.join(names)}, got {arrival.model!r}")


@dataclass(frozen=True, slots=True)
class Switching:
    """Deployments on the same sockets, the first of which is loaded, and the seconds of a longest turn.

    Arrivals that do not name a model have any, all equally likely, by `seed`. Raises DoesNotFitError if DDR
    cannot hold the weights of all.
    """

    deployments: tuple[Deployment, ...]
    longest_turn: float
    seed: int

    def __post_init__(self) -> None:
        first = self.deployments[0]
        needed = sum(one.model.weight_bytes for one in self.deployments) / first.num_all_sockets
        if needed > first.machine.ddr_capacity:
            raise DoesNotFitError(
                "DDR", needed, first.machine.ddr_capacity, f"weights of {len(self.deployments)} models"
            )

    def on(self, deployment: Deployment) -> "Switching":
        """Return the same models on the sockets and the machine of `deployment`."""
        moved = (replace(deployment, model=one.model) for one in self.deployments)
        return replace(self, deployments=tuple(moved))

    def play(
        self,
        arrivals: Iterable[Arrival],
        spec: BackendSpec,
        config: SchedulerConfig,
        resident_entries: int | None = None,
    ) -> ReplayRecord:
        """Return the replay of these arrivals. Each model has the slots of `spec` while it has its turn."""
        clock, record = VirtualClock(), ReplayRecord()
        replays = [
            Replay(
                spec,
                DeploymentCost(one, spec.pools[0], resident_entries=resident_entries),
                config,
                sample_interval=math.inf,
                clock=clock,
                record=record,
            )
            for one in self.deployments
        ]
        costs = [switch_seconds(one) for one in self.deployments]
        _Turns(replays, costs, self.longest_turn, clock, record).run(self._numbered(arrivals))
        return record

    def _numbered(self, arrivals: Iterable[Arrival]) -> Iterator[tuple[int, Arrival]]:
        """Yield each arrival with the number of its model."""
        names = [one.model.name for one in self.deployments]
        rng = random.Random(self.seed)
        for arrival in arrivals:
            check_model(arrival, names)
            number = rng.randrange(len(names))
            yield names.index(arrival.model) if arrival.model else number, arrival


class _Turns:
    """Whose turn it is, and who waits. Only the model that has its turn is given requests."""

    def __init__(
        self,
        replays: Sequence[Replay],
        switch_seconds: Sequence[float],
        longest_turn: float,
        clock: VirtualClock,
        record: ReplayRecord,
    ) -> None:
        self._replays = replays
        self._switch_seconds = switch_seconds
        self._longest_turn = longest_turn
        self._clock = clock
        self._record = record
        self._queues: list[deque[tuple[int, Arrival]]] = [deque() for _ in replays]
        self._current = 0
        self._turn_start = 0.0

    def run(self, arrivals: Iterable[tuple[int, Arrival]]) -> None:
        numbered = enumerate(arrivals)
        upcoming = next(numbered, None)
        while upcoming is not None or any(self._queues) or self._replay.has_work:
            if upcoming is not None and not any(self._queues) and not self._replay.has_work:
                self._clock.elapse(max(0.0, upcoming[1][1].time - self._clock.now()))
            while upcoming is not None and upcoming[1][1].time <= self._clock.now():
                index, (model, arrival) = upcoming
                self._queues[model].append((index, arrival))
                upcoming = next(numbered, None)
            self._feed()
            if self._replay.has_work:
                self._replay.step(upcoming[1][1].time if upcoming is not None else math.inf)
            elif any(self._queues):
                self._switch()
        self._record.seconds = self._clock.now()

    @property
    def _replay(self) -> Replay:
        return self._replays[self._current]

    def _feed(self) -> None:
        """Give the model that has its turn its requests, as many as get a slot."""
        queue = self._queues[self._current]
        others_wait = any(other for other in self._queues if other is not queue)
        if others_wait and self._clock.now() >= self._turn_start + self._longest_turn:
            return
        while queue and self._replay.has_room:
            self._replay.add(*queue.popleft())

    def _switch(self) -> None:
        """Load the next model that has requests. After a lonely turn that may be the same one."""
        count = len(self._queues)
        following = (self._current + 1 + offset for offset in range(count))
        chosen = next(number % count for number in following if self._queues[number % count])
        if chosen != self._current:
            seconds = self._switch_seconds[chosen]
            self._clock.elapse(seconds)
            self._record.num_switches += 1
            self._record.switch_seconds += seconds
        self._current = chosen
        self._turn_start = self._clock.now()
