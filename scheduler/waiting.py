"""The order in which sequences are admitted. Knows nothing of slots, scratches or time."""

import enum
from collections import OrderedDict
from typing import TypeAlias

from scheduler.request import Request

Level: TypeAlias = tuple[bool, int]  # background, priority: the lowest goes first


class QueueOrder(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"  # lower values first, and first come, first served among equals


class WaitingQueue:
    """Sequences that wait to be admitted, in two lines: those that need a scratch besides their slot, and those that do not.

    The head of each line is found, and anything in a line removed, without looking at the others.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._lines: dict[bool, dict[Level, OrderedDict[int, Request]]] = {False: {}, True: {}}  # needs a scratch → level → arrival
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        """Put a sequence behind those that go before it."""
        levels = self._lines[request.needs_scratch]
        levels.setdefault(self._level(request), OrderedDict())[request.arrival_order] = request
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Take a sequence out, wherever it stands."""
        levels = self._lines[request.needs_scratch]
        level = self._level(request)
        del levels[level][request.arrival_order]
        if not levels[level]:
            del levels[level]
        self._num_waiting -= 1

    def heads(self) -> list[Request]:
        """Return the first of each line, the one that goes before the other first."""
        heads = [next(iter(levels[min(levels)].values())) for levels in self._lines.values() if levels]
        return sorted(heads, key=lambda request: (self._level(request), request.arrival_order))

    def _level(self, request: Request) -> Level:
        return request.add.is_background, request.add.priority if self._order is QueueOrder.PRIORITY else 0
