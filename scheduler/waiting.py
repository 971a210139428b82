"""The order in which sequences are admitted. Knows nothing of slots, scratches or time."""

import enum
from collections import Counter, OrderedDict
from typing import TypeAlias

from scheduler.fairness import TokenCounters
from scheduler.messages import Add
from scheduler.request import Request

Level: TypeAlias = tuple[
    bool, int | str
]  # background; priority or tenant: those of one level go as they came


class QueueOrder(enum.StrEnum):
    FAIR = "fair"  # the tenant goes first that was given least; first come, first served within each, and so with one tenant
    FCFS = "fcfs"
    PRIORITY = "priority"  # lower values first, and first come, first served among equals


class WaitingQueue:
    """Sequences that wait to be admitted, in two lines a pool: those that need a scratch besides their slot, and those that do not.

    The head of each line is found by looking at one sequence a level, and anything is removed without looking at the others.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._lines: dict[
            tuple[int, bool], dict[Level, OrderedDict[int, Request]]
        ] = {}  # pool, needs a scratch → level → arrival
        self._num_waiting: Counter[int] = Counter()  # by pool
        self._counters = {
            False: TokenCounters(),
            True: TokenCounters(),
        }  # of the background apart: it takes nobody's turn

    def __len__(self) -> int:
        return self._num_waiting.total()

    def num_waiting(self, pool: int) -> int:
        """Return how many wait for a pool."""
        return self._num_waiting[pool]

    def push(self, request: Request) -> None:
        """Put a sequence behind those that go before it."""
        levels = self._lines.setdefault(_line(request), {})
        levels.setdefault(self._level(request), OrderedDict())[request.arrival_order] = request
        self._num_waiting[request.add.pool] += 1
        self._counters[request.add.is_background].join(request.add.tenant)

    def remove(self, request: Request) -> None:
        """Take a sequence out, wherever it stands."""
        levels = self._lines[_line(request)]
        level = self._level(request)
        del levels[level][request.arrival_order]
        if not levels[level]:
            del levels[level]
        self._num_waiting[request.add.pool] -= 1
        self._counters[request.add.is_background].leave(request.add.tenant)

    def charge(self, add: Add, *, num_input: int = 0, num_output: int = 0) -> None:
        """Tell what was read and made for a request, so that other tenants go before its own; negative: what was charged and not done."""
        self._counters[add.is_background].charge(add.tenant, num_input=num_input, num_output=num_output)

    def heads(self) -> list[Request]:
        """Return the first of each line, the one that goes before the others first."""
        firsts = [
            [next(iter(level.values())) for level in levels.values()]
            for levels in self._lines.values()
            if levels
        ]
        return sorted((min(requests, key=self._rank) for requests in firsts), key=self._rank)

    def _level(self, request: Request) -> Level:
        return (
            request.add.is_background,
            request.add.tenant if self._order is QueueOrder.FAIR else self._priority(request),
        )

    def _rank(self, request: Request) -> tuple[bool, int, int]:
        """Return what the first of a level stands by: the lowest goes first."""
        add = request.add
        served = self._counters[add.is_background][add.tenant]
        return (
            add.is_background,
            served if self._order is QueueOrder.FAIR else self._priority(request),
            request.arrival_order,
        )

    def _priority(self, request: Request) -> int:
        return request.add.priority if self._order is QueueOrder.PRIORITY else 0


def _line(request: Request) -> tuple[int, bool]:
    return request.add.pool, request.needs_scratch
