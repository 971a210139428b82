"""Turns between tenants: which one is admitted next, and what one leaves to the others.

`TokenCounters` decide who is admitted next. The algorithm is algorithm 2 of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024). Tokens read and generated for a tenant are added to its counter,
and the tenant with the lowest counter goes first. A tenant that comes back to the queue is lifted to the
lowest counter of the waiting tenants, so an absent tenant saves up no claims. The algorithm is
work-conserving. Between tenants that always have a waiting request, the counters differ by at most the cost
of a full batch.

`DeviceTurns` decide what admitted sequences of several tenants leave to each other. The rules are our own.

A tenant is an opaque string.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

INPUT_WEIGHT = 1  # the paper's; reading a token is cheaper than generating one
OUTPUT_WEIGHT = 2
MAX_ABSENT = 4096  # counters kept of tenants that have nothing in the queue
PRESENCE = 60.0  # seconds for which a tenant counts as present after its last sequence has ended
MAX_SAVED = 0.25  # seconds of device time that a present tenant may save up between its sequences


def weighted(num_input: int, num_output: int) -> int:
    return INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output


class TokenCounters:
    """The counters, in weighted tokens.

    `join` and `leave`, once a sequence, keep the set of waiting tenants.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._absent: OrderedDict[str, None] = OrderedDict()  # in the order in which they left the queue

    def __getitem__(self, tenant: str) -> int:
        return self._counts[tenant]

    def join(self, tenant: str) -> None:
        """Note that a sequence of this tenant starts to wait."""
        if tenant not in self._num_waiting:
            self._counts[tenant] = max(self._counts[tenant], self._floor())
            self._absent.pop(tenant, None)
        self._num_waiting[tenant] += 1

    def others(self, tenant: str) -> list[int]:
        """Return the counters of the other tenants that wait."""
        return [self._counts[other] for other in self._num_waiting if other != tenant]

    def leave(self, tenant: str) -> None:
        """Note that a sequence of this tenant no longer waits."""
        self._num_waiting[tenant] -= 1
        if self._num_waiting[tenant] == 0:
            del self._num_waiting[tenant]
            self._absent[tenant] = None
            self._forget_oldest()

    def charge(self, tenant: str, *, num_input: int = 0, num_output: int = 0) -> None:
        """Add the tokens read and generated for a tenant.

        A negative number refunds a charge for work that was not done.
        """
        self.add(tenant, weighted(num_input, num_output))

    def add(self, tenant: str, num_weighted: int) -> None:
        """Add weighted tokens, also those that another replica has served the tenant.

        Those of a tenant that is not known here are left out: it begins at the others' counters.
        """
        if tenant in self._num_waiting or tenant in self._absent:
            self._counts[tenant] += num_weighted

    def _floor(self) -> int:
        """Return the lowest counter of the waiting tenants; without any, that of the last one that waited."""
        if self._num_waiting:
            return min(self._counts[tenant] for tenant in self._num_waiting)
        return self._counts[next(reversed(self._absent))] if self._absent else 0

    def _forget_oldest(self) -> None:
        if len(self._absent) > MAX_ABSENT:
            tenant, _ = self._absent.popitem(last=False)
            del self._counts[tenant]


class DeviceTurns:
    """Which tenants are present, and how many seconds of device time each has had.

    A tenant is present from the admission of a sequence until `PRESENCE` seconds after its last one has
    ended. A tenant that becomes live is lifted to the lowest time of the live tenants, or without any to that
    of the tenant that left last, but for `MAX_SAVED` if it is present. So a tenant that pauses between its
    requests hardly waits for a flood; one that was absent saves up nothing; and none owes for a time alone.
    Background sequences do not count.
    """

    def __init__(self) -> None:
        self._num_live: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}  # of the present tenants
        self._left: OrderedDict[str, float] = OrderedDict()  # when the last sequence ended, the oldest first

    def enter(self, tenant: str, now: float) -> None:
        """Note that a sequence of this tenant was admitted."""
        if tenant not in self._num_live:
            last = self._seconds[next(reversed(self._left))] if self._left else 0.0
            floor = min((self._seconds[live] for live in self._num_live), default=last)
            self._forget_absent(now)
            self._seconds[tenant] = max(self._seconds.get(tenant, floor), floor - MAX_SAVED)
            self._left.pop(tenant, None)
        self._num_live[tenant] += 1

    def leave(self, tenant: str, now: float) -> None:
        """Note that an admitted sequence of this tenant has ended."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant] == 0:
            del self._num_live[tenant]
            self._left[tenant] = now

    def charge(self, tenants: Collection[str], seconds: float) -> None:
        """Divide the time of a step equally between its sequences, whose tenants are `tenants`."""
        for tenant in tenants:
            self._seconds[tenant] += seconds / len(tenants)

    def has_others(self, tenant: str, now: float) -> bool:
        """Return whether another tenant is present."""
        self._forget_absent(now)
        return len(self._seconds) > (tenant in self._seconds)

    def expects_other(self, reader: str, now: float) -> bool:
        """Return whether a present tenant that has no sequence now had less time than `reader`.

        The prompts of `reader` would wait for its next request, so a long step of them would delay it.
        """
        self._forget_absent(now)
        seconds = self._seconds.get(reader, math.inf)  # in the background, none is counted
        return any(self._seconds[absent] < seconds for absent in self._left)

    def yields(self, reader: str, others: Iterable[str]) -> bool:
        """Return whether the prompts of `reader` wait while `others` read prompts or decode.

        They wait for a tenant that has fewer sequences and had less time. So a flood slows another tenant's
        few requests little, and no prompt waits for good: their time is charged.
        """
        return any(
            self._num_live[other] < self._num_live[reader] and self._seconds[other] < self._seconds[reader]
            for other in others
        )

    def _forget_absent(self, now: float) -> None:
        while self._left and next(iter(self._left.values())) <= now - PRESENCE:
            absent, _ = self._left.popitem(last=False)
            del self._seconds[absent]
