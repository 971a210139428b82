"""Whose turn it is among tenants: a virtual token counter for each.

The algorithm is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: whatever is read and made for a
tenant is added to its counter, the tenant with the lowest counter goes first, and one that comes back to the queue is lifted to the lowest
of those that wait, so that nobody saves up turns by staying away. It is work-conserving, and between tenants that always have something
waiting, the difference of the counters stays bounded by what a full batch costs. A tenant is an opaque string.
"""

from collections import Counter, OrderedDict

INPUT_WEIGHT = 1  # the paper's; reading a token is cheaper than making one
OUTPUT_WEIGHT = 2
MAX_ABSENT = 4096  # tenants of whom nothing waits and whose counters are remembered


class TokenCounters:
    """The counters, in weighted tokens. Those who wait are told from those who do not by `join` and `leave`, once a sequence."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._absent: OrderedDict[str, None] = OrderedDict()  # the one that left last stands last

    def __getitem__(self, tenant: str) -> int:
        return self._counts[tenant]

    def join(self, tenant: str) -> None:
        """A sequence of this tenant begins to wait."""
        if tenant not in self._num_waiting:
            self._counts[tenant] = max(self._counts[tenant], self._floor())
            self._absent.pop(tenant, None)
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant waits no longer."""
        self._num_waiting[tenant] -= 1
        if self._num_waiting[tenant] == 0:
            del self._num_waiting[tenant]
            self._absent[tenant] = None
            self._forget_one()

    def charge(self, tenant: str, *, num_input: int = 0, num_output: int = 0) -> None:
        """Add what was read and made for a tenant; a negative number takes back what was charged and not done."""
        if tenant in self._num_waiting or tenant in self._absent:
            self._counts[tenant] += INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output

    def _floor(self) -> int:
        """Return the least counter of those who wait, or else that of the one that waited last."""
        if self._num_waiting:
            return min(self._counts[tenant] for tenant in self._num_waiting)
        return self._counts[next(reversed(self._absent))] if self._absent else 0

    def _forget_one(self) -> None:
        if len(self._absent) > MAX_ABSENT:
            tenant, _ = self._absent.popitem(last=False)
            del self._counts[tenant]
