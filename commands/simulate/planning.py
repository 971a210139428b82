"""The greatest load that a deployment carries within its limits, found by replays of the real scheduler.

A replay at one rate says whether the limits hold. Bisection finds the greatest rate. The arrivals are the
same at every rate, closer together. A bound from the sums of step times is the upper end: prefill and decode
share the machine, so a request takes at least its prompt's seconds and its share of each decode step.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from backends.sn40l.description.hardware import MachineFile
from backends.sn40l.step.deployment import Deployment
from backends.sn40l.step.placement import max_batch
from backends.sn40l.step.ranges import value_range
from cache.policy import CachePolicy
from commands.shared.table import percentile
from commands.simulate.arrivals import Arrival
from commands.simulate.candidate import GENERATIONS, MOST_REQUESTS, Candidate, Limits, fits
from commands.simulate.load import Load
from commands.simulate.replay import ReplayRecord

_ROUNDS = 7  # of bisection: a rate is known within 2 % of its bound
_GROWTH = 0.03  # most of the requests between two quarters of a replay that may join the queue
_NEARLY = 0.98  # share of the greatest expected rate that fewer slots may have
_MOST = 0.95  # share of the bound: at full use a queue grows without end


@dataclass(frozen=True, slots=True)
class Carried:
    """The greatest load of a candidate, and its replay. `bound_low` and `bound_high` are those of the bound.

    They are of one unpublished number of the machine at a time, at the ends of its range.
    """

    candidate: Candidate
    rate: float  # requests a second
    bound: float
    bound_low: float
    bound_high: float
    record: ReplayRecord
    goodput: float  # requests a second that meet every limit
    num_prefill_nodes: int
    price: float  # dollars an hour, of all nodes; 0: not known
    power: float  # watts

    @property
    def users(self) -> float:
        """Requests under way at once, by Little's law."""
        return self.rate * statistics.fmean(self.record.end_to_end)

    @property
    def token_rate(self) -> float:
        """Output tokens a second."""
        return self.rate * self.record.num_output_tokens / len(self.record.end_times)

    @property
    def num_sockets(self) -> int:
        return self.candidate.deployment.num_all_sockets * (1 + self.num_prefill_nodes)

    @property
    def tpot(self) -> float:
        """Seconds a token of the median request."""
        return percentile(self.record.time_per_output_token, 50) or 0.0

    @property
    def dollars_per_million(self) -> float | None:
        return self.price / 3600 / self.token_rate * 1e6 if self.price else None

    @property
    def kilowatt_hours_per_million(self) -> float | None:
        return self.power / 3.6e6 / self.token_rate * 1e6 if self.power else None


def candidates(
    deployment: Deployment, policy: CachePolicy, load: Load, limits: Limits, options: Candidate
) -> Iterator[Candidate]:
    """Yield the candidate with the fewest slots that are expected to carry about the most, if any fits.

    Where a step takes the time of all slots, those that stay empty only slow it. `options` has the other
    choices.
    """
    base = replace(options.on(deployment), policy=policy, num_slots=1)
    slot = base.shape(load, 1)
    most = min(max_batch(one, slot) for one in base.deployments)
    counts = {2**power for power in range(most.bit_length()) if 2**power <= most} | (
        {most} if most else set()
    )
    sized = [replace(base, num_slots=count) for count in sorted(counts)]
    rates = [_expected(candidate, load, limits) for candidate in sized]
    best = max(rates, default=0.0)
    if best > 0:
        yield next(one for one, rate in zip(sized, rates, strict=True) if rate >= _NEARLY * best)


def _expected(candidate: Candidate, load: Load, limits: Limits) -> float:
    return candidate.expected(load, limits) if fits(candidate, load) else 0.0


def carry(candidate: Candidate, load: Load, limits: Limits, machine_file: MachineFile) -> Carried | None:
    """Return the greatest load within the limits, or None if even the lightest one breaks them."""
    bound = candidate.bound(load, limits)
    if bound <= 0:
        return None
    low, high = 0.0, 2 * _MOST * bound  # so that the first rate is the greatest
    count = candidate.num_requests(load, bound)
    found: ReplayRecord | None = None
    for _ in range(_ROUNDS):
        rate = (low + high) / 2
        record, count = _settled(candidate, load, limits, rate, count)
        if record is not None:
            low, found = rate, record
            high = min(high, _MOST * bound)
            if low >= high:
                break
        else:
            high = rate
    if found is None:
        return None
    machine = candidate.deployment.machine
    num_prefill = candidate.num_prefill_nodes(load, low)
    sockets = candidate.deployment.num_all_sockets * (1 + num_prefill)
    free = replace(limits, max_ttft=None, max_tpot=None)
    spread = value_range(
        candidate.deployment,
        machine_file.changes(),
        lambda changed: candidate.on(changed).bound(load, free),
    )
    return Carried(
        candidate,
        low,
        bound,
        min(bound, spread.low),
        max(bound, spread.high),
        found,
        low * limits.share_met(found),
        num_prefill,
        sockets * machine.price,
        sockets * machine.power,
    )


def carry_most(candidate: Candidate, load: Load, limits: Limits, machine_file: MachineFile) -> Carried | None:
    """Return what the fewest slots carry that carry nearly the most.

    The numbers of slots are the candidate's own, its halves and its doubles. Fewer slots may carry nearly as
    much, or meet limits that more do not. Too many may carry less: all of them slow a step, and prompts that
    are read between the steps of more sequences.
    """
    tried: list[Carried] = []

    def is_carried(num_slots: int) -> bool:
        """Return whether these slots carry nearly the most of those that were tried."""
        found = carry(replace(candidate, num_slots=num_slots), load, limits, machine_file)
        if found is not None:
            tried.append(found)
        return found is not None and found.rate >= _NEARLY * max(one.rate for one in tried)

    count = candidate.num_slots
    while (is_carried(count) or not tried) and count > 1:
        count //= 2
    count = 2 * candidate.num_slots
    while tried and fits(replace(candidate, num_slots=count), load):
        most = max(one.rate for one in tried)
        if not is_carried(count) or tried[-1].rate <= most:
            break
        count *= 2
    most = max((one.rate for one in tried), default=0.0)
    return min(
        (one for one in tried if one.rate >= _NEARLY * most),
        key=lambda one: one.candidate.num_slots,
        default=None,
    )


def lighter(one: Carried, load: Load, limits: Limits, rate: float) -> Carried:
    """Return the same candidate at a lower rate, with no more prefill nodes than that needs.

    It stays as it is if its replay at that rate breaks the limits.
    """
    candidate = one.candidate
    record, _ = _settled(candidate, load, limits, rate, candidate.num_requests(load, rate))
    if record is None:
        return one
    num_prefill = candidate.num_prefill_nodes(load, rate)
    saved = (1 + num_prefill) / (1 + one.num_prefill_nodes)
    return replace(
        one,
        rate=rate,
        record=record,
        goodput=rate * limits.share_met(record),
        num_prefill_nodes=num_prefill,
        price=one.price * saved,
        power=one.power * saved,
    )


def _settled(
    candidate: Candidate, load: Load, limits: Limits, rate: float, num_requests: int
) -> tuple[ReplayRecord | None, int]:
    """Return a replay that came to rest within the limits, if there is one, and its number of requests.

    A queue that grows slowly does not show in a short replay. So a replay is repeated with more requests
    until there are enough for those that were under way at once. A burst among the last arrivals looks like a
    queue that grows. So only quarters of the same arrivals, one or several rounds each, are enough to say so.
    """
    rounds = 4 * len(load.arrivals)
    while True:
        arrivals = load.at(rate, num_requests)
        record = candidate.play(arrivals, load, rate)
        if record.num_refused or not limits.are_met(record):
            return None, num_requests
        is_sustained = _is_sustained(record, arrivals)
        needed = math.ceil(GENERATIONS * rate * statistics.fmean(record.end_to_end))
        if is_sustained and num_requests >= min(needed, MOST_REQUESTS):
            return record, num_requests
        if not is_sustained and (num_requests % rounds == 0 or num_requests >= MOST_REQUESTS):
            return None, num_requests
        more = max(needed, 2 * num_requests) if is_sustained else num_requests
        num_requests = min(rounds * math.ceil(more / rounds), max(MOST_REQUESTS, num_requests))


def pareto(carried: Sequence[Carried]) -> list[Carried]:
    """Return those that no other one exceeds in both tokens/s for a user and tokens/s for a socket."""

    def merits(one: Carried) -> tuple[float, float]:
        return 1 / max(one.tpot, 1e-12), one.token_rate / one.num_sockets

    def is_beaten(one: Carried) -> bool:
        mine = merits(one)
        others = (merits(other) for other in carried)
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)

    return [one for one in carried if not is_beaten(one)]


def _is_sustained(record: ReplayRecord, arrivals: Sequence[Arrival]) -> bool:
    """Return whether no more requests are under way at the end than before."""
    quarter = arrivals[-1].time / 4
    before, after = (_mean_under_way(record, part * quarter, (part + 1) * quarter) for part in (1, 3))
    # The numbers of the two quarters differ by chance, too.
    return after - before <= _GROWTH * len(arrivals) / 2 + math.sqrt(max(1.0, before))


def _mean_under_way(record: ReplayRecord, start: float, end: float) -> float:
    """Return how many requests were under way on average between two times."""
    under_way = sum(
        max(0.0, min(ended, end) - max(ended - whole, start))
        for ended, whole in zip(record.end_times, record.end_to_end, strict=True)
    )
    return under_way / (end - start)
