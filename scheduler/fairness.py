"""Which tenant is admitted next: a virtual token counter for each.

The algorithm is algorithm 2 of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Tokens
read and generated for a tenant are added to its counter, and the tenant with the lowest counter goes first. A
tenant that comes back to the queue is lifted to the lowest counter of the waiting tenants, so an absent
tenant saves up no claims. The algorithm is work-conserving. Between tenants that always have a waiting
request, the counters differ by at most the cost of a full batch.

A tenant is an opaque string.
"""

from collections import Counter, OrderedDict

INPUT_WEIGHT = 1  # the paper's; reading a token is cheaper than generating one
OUTPUT_WEIGHT = 2
MAX_ABSENT = 4096  # counters kept of tenants that have nothing in the queue


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
        if tenant in self._num_waiting or tenant in self._absent:
            self._counts[tenant] += INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output

    def _floor(self) -> int:
        """Return the lowest counter of the waiting tenants; without any, that of the last one that waited."""
        if self._num_waiting:
            return min(self._counts[tenant] for tenant in self._num_waiting)
        return self._counts[next(reversed(self._absent))] if self._absent else 0

    def _forget_oldest(self) -> None:
        if len(self._absent) > MAX_ABSENT:
            tenant, _ = self._absent.popitem(last=False)
            del self._counts[tenant]
