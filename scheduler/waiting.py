"""The order in which sequences are admitted. Knows nothing of slots, scratches or time."""

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from scheduler.fairness import INPUT_WEIGHT, TokenCounters
from scheduler.messages import Add
from scheduler.request import Request

Line: TypeAlias = tuple[int, bool]  # pool, needs a scratch
Level: TypeAlias = tuple[
    bool, int | str
]  # background, priority or tenant; within a level: first come, first served


DRAFT_DISCOUNT = 10  # a draft's tokens count a tenth: it is a small model


class QueueOrder(enum.StrEnum):
    FAIR = "fair"  # first the tenant with the fewest tokens so far; first come, first served within a tenant
    FCFS = "fcfs"
    PRIORITY = "priority"  # lower values first; first come, first served within a priority


class WaitingQueue:
    """Sequences that wait to be admitted, in two lines a pool: with and without need of a scratch.

    `first` looks at one sequence a level. `remove` looks at no other sequence. So both stay fast in a long
    queue.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._lines: dict[Line, dict[Level, OrderedDict[tuple[int, int], Request]]] = {}  # by `_order`
        self._num_waiting: Counter[int] = Counter()  # by pool
        # Background requests have their own counters, so that their tokens cost a tenant no turn in the
        # foreground.
        self._counters = {False: TokenCounters(), True: TokenCounters()}

    def __len__(self) -> int:
        return self._num_waiting.total()

    def num_waiting(self, pool: int) -> int:
        """Return how many sequences wait for a pool."""
        return self._num_waiting[pool]

    def push(self, request: Request) -> None:
        """Put a sequence into its level, by its arrival order."""
        levels = self._lines.setdefault(_line(request), {})
        level = levels.setdefault(self._level(request), OrderedDict())
        key = _order(request)
        comes_late = bool(level) and key < next(reversed(level))  # it takes the turn of an earlier request
        level[key] = request
        if comes_late:
            levels[self._level(request)] = OrderedDict(sorted(level.items()))
        self._num_waiting[request.add.pool] += 1
        self._counters[request.add.is_background].join(request.add.tenant)

    def remove(self, request: Request) -> None:
        """Take a sequence out, at any position."""
        levels = self._lines[_line(request)]
        level = self._level(request)
        del levels[level][_order(request)]
        if not levels[level]:
            del levels[level]
        self._num_waiting[request.add.pool] -= 1
        self._counters[request.add.is_background].leave(request.add.tenant)

    def charge(self, add: Add, *, num_input: int = 0, num_output: int = 0) -> None:
        """Charge a request's tenant for tokens read and generated. A negative number is a refund."""
        num_input = _num_discounted(add, num_input)
        self._counters[add.is_background].charge(add.tenant, num_input=num_input, num_output=num_output)

    def charge_elsewhere(self, num_weighted: Mapping[str, int]) -> None:
        """Charge tenants for weighted tokens that other replicas have served."""
        for tenant, amount in num_weighted.items():
            self._counters[False].add(tenant, amount)

    def first(self, has_room: Callable[[Request], bool]) -> Request | None:
        """Return the sequence to admit next: the first in order among the levels' heads that have room."""
        heads = [next(iter(level.values())) for levels in self._lines.values() for level in levels.values()]
        return next(filter(has_room, sorted(heads, key=self._rank)), None)

    def leaves_turn(self, add: Add) -> bool:
        """Return whether no other tenant waits, or one whose counter the admission of `add` would pass."""
        cost = INPUT_WEIGHT * _num_discounted(add, len(add.prompt_token_ids))
        others = self._counters[False].others(add.tenant)
        return not others or min(others) <= self._counters[False][add.tenant] + cost

    def _level(self, request: Request) -> Level:
        is_fair = self._order is QueueOrder.FAIR
        return request.add.is_background, request.add.tenant if is_fair else self._priority(request)

    def _rank(self, request: Request) -> tuple[bool, int, int]:
        """Return the sort key of a level's first sequence: the lowest is admitted first."""
        add = request.add
        num_charged = self._counters[add.is_background][add.tenant]
        is_fair = self._order is QueueOrder.FAIR
        return add.is_background, num_charged if is_fair else self._priority(request), request.arrival_order

    def _priority(self, request: Request) -> int:
        return request.add.priority if self._order is QueueOrder.PRIORITY else 0


def _num_discounted(add: Add, num_tokens: int) -> int:
    return num_tokens if add.importance is None else int(num_tokens / DRAFT_DISCOUNT)


def _order(request: Request) -> tuple[int, int]:
    return request.arrival_order, request.choice


def _line(request: Request) -> Line:
    return request.add.pool, request.needs_scratch
