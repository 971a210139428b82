"""The greatest load that a deployment carries within its limits, found by replays of the real scheduler.

A replay at one rate says whether the limits hold. Bisection finds the greatest rate. The arrivals are the
same at every rate, closer together. A bound from the sums of step times is the upper end: prefill and decode
share the machine, so a request takes at least its prompt's seconds and its share of each decode step.
"""

import heapq
import itertools
import math
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from backends.sn40l.description.hardware import MachineFile
from backends.sn40l.step.cost_model import DeploymentCost, compression_of
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.placement import DoesNotFitError, max_batch
from backends.sn40l.step.prefill import Chunk, prefill_seconds
from backends.sn40l.step.ranges import value_range
from backends.sn40l.step.speculation import Speculation, token_seconds
from backends.timed import CostModel, SimulatedStore
from cache.policy import CachePolicy
from commands.shared.table import percentile
from commands.simulate.arrivals import HASH_TOKENS, Arrival
from commands.simulate.drafting import Drafting
from commands.simulate.options import PREFILL_CHUNK
from commands.simulate.replay import Replay, ReplayRecord, replay_config, replay_spec
from commands.simulate.switching import Switching, check_model

_ROUNDS = 7  # of bisection: a rate is known within 2 % of its bound
_GENERATIONS = 8  # requests of a replay over those under way at once: it must outlast its beginning
_MOST_REQUESTS = 2000
_GROWTH = 0.03  # most of the requests between two quarters of a replay that may join the queue
_NEARLY = 0.98  # share of the greatest expected rate that fewer slots may have
_MOST = 0.95  # share of the bound: at full use a queue grows without end
_TYPICAL = 16  # prompts by which a draft's share of the time is counted
_BALANCE = 0.8  # load of prefill nodes, which queues keep below 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds at a percentile; None: any."""

    max_ttft: float | None = None
    max_tpot: float | None = None
    max_e2e: float | None = None
    percent: float = 90.0

    def are_met(self, record: ReplayRecord) -> bool:
        measured = (
            (self.max_ttft, record.time_to_first_token),
            (self.max_tpot, record.time_per_output_token),
            (self.max_e2e, record.end_to_end),
        )
        return all(
            limit is None or (percentile(values, self.percent) or 0.0) <= limit for limit, values in measured
        )

    def share_met(self, record: ReplayRecord) -> float:
        """Return the share of the requests that meet every limit."""
        ttft, tpot, e2e = (
            limit if limit is not None else math.inf for limit in (self.max_ttft, self.max_tpot, self.max_e2e)
        )
        met = sum(
            first <= ttft and each <= tpot and whole <= e2e for first, each, whole in record.by_request()
        )
        return met / max(1, len(record.end_times) + record.num_refused)


@dataclass(frozen=True, eq=False)
class Load:
    """Arrivals of a mean rate of one a second, the longest sequence, and the mean lengths in tokens.

    `mean_restored` of a prompt's tokens begin earlier prompts, too.
    """

    arrivals: tuple[Arrival, ...]
    max_model_len: int
    mean_restored: int = 0

    def at(self, rate: float, num_requests: int) -> list[Arrival]:
        """Return the first arrivals at this rate, and the same again after the last one.

        Those of another round share no prompts with the ones before.
        """
        size = len(self.arrivals)
        num_hashes = 1 + max((max(one.hash_ids, default=0) for one in self.arrivals), default=0)
        rounds = (divmod(index, size) for index in range(num_requests))
        return [
            replace(
                self.arrivals[index],
                time=(self.arrivals[index].time + number * size) / rate,
                hash_ids=tuple(hash_id + number * num_hashes for hash_id in self.arrivals[index].hash_ids),
            )
            for number, index in rounds
        ]

    @cached_property
    def mean_prompt(self) -> int:
        return max(1, round(statistics.fmean(arrival.num_prompt_tokens for arrival in self.arrivals)))

    @cached_property
    def typical_prompts(self) -> list[int]:
        """Lengths of prompts from short to long, each of which stands for about as many requests."""
        lengths = sorted(arrival.num_prompt_tokens for arrival in self.arrivals)
        count = min(_TYPICAL, len(lengths))
        return [lengths[(2 * index + 1) * len(lengths) // (2 * count)] for index in range(count)]

    @cached_property
    def mean_output(self) -> float:
        return statistics.fmean(arrival.num_output_tokens for arrival in self.arrivals)


def load_of(arrivals: Sequence[Arrival], max_model_len: int) -> Load:
    """Return the load of these arrivals. Their times are scaled. Raises ValueError for fewer than two."""
    span = arrivals[-1].time - arrivals[0].time if len(arrivals) > 1 else 0.0
    if span <= 0:
        raise ValueError("a load needs at least two requests at different times")
    scale = (len(arrivals) - 1) / span
    start = arrivals[0].time
    scaled = tuple(replace(one, time=(one.time - start) * scale) for one in arrivals)
    return Load(scaled, max_model_len, mean_restored(arrivals))


@lru_cache(maxsize=4)
def _by_model(load: Load, names: tuple[str, ...]) -> list[tuple[int, float, Load]]:
    """Return each model's number, its share of the requests, and the load of those that may be its own.

    Models without requests are left out. Raises TraceError for a model that is not among these.
    """
    for arrival in load.arrivals:
        check_model(arrival, names)
    found = []
    for index, name in enumerate(names):
        own = tuple(one for one in load.arrivals if one.model in ("", name))
        if own:
            share = sum(1.0 if one.model else 1 / len(names) for one in own) / len(load.arrivals)
            found.append((index, share, replace(load, arrivals=own)))
    return found


def mean_restored(arrivals: Sequence[Arrival]) -> int:
    """Return how many of a prompt's tokens begin earlier prompts on average, if none is ever forgotten."""
    seen: set[int] = set()
    num_restored = 0
    for one in arrivals:
        num_known = sum(1 for _ in itertools.takewhile(seen.__contains__, one.block_ids))
        num_restored += min(num_known * HASH_TOKENS, one.num_prompt_tokens - 1)
        seen.update(one.block_ids)
    return num_restored // len(arrivals)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment that may carry a load.

    With `is_paged`, memory is charged for the tokens that sequences hold, not for their slots. With
    `is_split`, other nodes of the same kind read the prompts. With a `store`, prompts that begin like earlier
    ones are copied from there. With `drafting`, a draft shortens long prompts, where they are read. With
    `switching`, several models take turns, and seconds are means over their requests.
    """

    deployment: Deployment
    policy: CachePolicy
    num_slots: int
    is_paged: bool = False
    is_split: bool = False
    max_inter_token_latency: float = 0.2
    prefill_chunk: int = PREFILL_CHUNK
    store: SimulatedStore | None = None
    drafting: Drafting | None = None
    speculation: Speculation | None = None
    switching: Switching | None = None

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """Those of all models."""
        return (self.deployment,) if self.switching is None else self.switching.deployments

    def on(self, deployment: Deployment) -> "Candidate":
        """Return the same choices on another deployment of the model."""
        switching = None if self.switching is None else self.switching.on(deployment)
        drafting = None if self.drafting is None else self.drafting.on(deployment)
        return replace(self, deployment=deployment, switching=switching, drafting=drafting)

    def _alone(self, load: Load) -> list[tuple[float, "Candidate", Load]]:
        """Return each model with its share of the requests and with its own load."""
        if self.switching is None:
            return [(1.0, self, load)]
        names = tuple(one.model.name for one in self.deployments)
        return [
            (share, replace(self, deployment=self.deployments[index], switching=None), own)
            for index, share, own in _by_model(load, names)
        ]

    def num_read(self, num_prompt_tokens: int) -> int:
        """Return how many of a prompt's tokens the model is given."""
        return num_prompt_tokens if self.drafting is None else self.drafting.num_read(num_prompt_tokens)

    def read_seconds(self, num_prompt_tokens: int, num_restored: int = 0) -> float:
        """Return how long a prompt is read, alone and in one step."""
        num_read = self.num_read(num_prompt_tokens)
        start = min(num_restored, num_read - 1)
        chunk = Chunk(num_read - start, start, compression_of(self.policy, num_read))
        seconds = prefill_seconds(replace(self.deployment, execution=Execution.FUSED), chunk)
        if self.drafting is not None and num_read < num_prompt_tokens:
            seconds += self.drafting.seconds(num_prompt_tokens)
        return seconds

    def resident(self, load: Load) -> int:
        """Return the entries that a sequence holds on average."""
        held = self.num_read(load.mean_prompt) + round(load.mean_output / 2)
        return max(1, min(held, self.policy.layout.capacity))

    def prompt_seconds(self, load: Load) -> float:
        """Return how long a prompt is read, on average over the models."""
        return sum(share * one._prompt_seconds(own) for share, one, own in self._alone(load))

    def _prompt_seconds(self, load: Load) -> float:
        if self.drafting is not None:
            return statistics.fmean(map(self.read_seconds, load.typical_prompts))
        if self.store is None:
            return self.read_seconds(load.mean_prompt)
        copying = self.deployment.model.cache_bytes(load.mean_restored) / self.store.bandwidth
        return copying + self.read_seconds(load.mean_prompt, load.mean_restored)

    def step_seconds(self, load: Load) -> float:
        """Return how long a step of all slots takes, on average over the models' tokens."""
        parts = self._alone(load)
        weights = [share * own.mean_output for share, _, own in parts]
        steps = [one._step_seconds(own) for _, one, own in parts]
        return statistics.fmean(steps, weights)

    def _step_seconds(self, load: Load) -> float:
        pads = self.deployment.machine.pads_decode
        entries = self.policy.layout.capacity if pads else self.resident(load)
        return token_seconds(self.deployment, DecodeShape(self.num_slots, entries), self.speculation)

    def request_seconds(self, load: Load) -> float:
        """Return the machine's seconds for a mean request, if all slots decode.

        Switches between models are left out.
        """
        decoding = load.mean_output * self.step_seconds(load) / self.num_slots
        return decoding if self.is_split else self.prompt_seconds(load) + decoding

    def bound(self, load: Load, limits: Limits) -> float:
        """Return the rate in requests a second at which the machine is never idle, at the mean lengths."""
        prompt, step = self.prompt_seconds(load), self.step_seconds(load)
        if limits.max_ttft is not None and prompt > limits.max_ttft:
            return 0.0
        if limits.max_tpot is not None and self.deployment.machine.pads_decode and step > limits.max_tpot:
            return 0.0
        return 1 / self.request_seconds(load)

    def expected(self, load: Load, limits: Limits) -> float:
        """Return a guess of the rate, by which the numbers of slots are compared.

        While prompts are read, no slot decodes: a token takes a step, over the share of time left to decode.
        """
        bound = self.bound(load, limits)
        if limits.max_tpot is None or bound == 0.0 or self.is_split:
            return bound
        left = 1 - self.step_seconds(load) / limits.max_tpot
        return max(0.0, min(bound, left / self.prompt_seconds(load)))

    def num_prefill_nodes(self, load: Load, rate: float) -> int:
        """Return how many other nodes read the prompts of this rate."""
        return math.ceil(rate * self.prompt_seconds(load) / _BALANCE) if self.is_split else 0

    def num_requests(self, load: Load, rate: float) -> int:
        """Return how many requests a replay needs to come to rest."""
        alone = self.prompt_seconds(load) + load.mean_output * self.step_seconds(load)
        return min(max(len(load.arrivals), math.ceil(_GENERATIONS * rate * alone)), _MOST_REQUESTS)

    def play(
        self,
        arrivals: Sequence[Arrival],
        load: Load,
        rate: float = 0.0,
        *,
        collapses: bool = True,
        sample_interval: float = math.inf,
    ) -> ReplayRecord:
        """Return the replay of these arrivals. For `is_split`, their rate decides the number of nodes."""
        resident = self.resident(load) if self.is_paged else None
        store = None if self.is_split else self.store
        prefixes = store.spec if store is not None else None
        spec = replay_spec(self.num_slots, self.policy, load.max_model_len, prefixes, self.prefill_chunk)
        config = replay_config(self.max_inter_token_latency)
        if self.switching is not None:
            return self.switching.play(arrivals, spec, config, resident)
        cost: CostModel = DeploymentCost(
            self.deployment, spec.pools[0], resident_entries=resident, speculation=self.speculation
        )
        drafting = None if self.is_split else self.drafting
        num_restored = 0
        if self.is_split:
            arrivals, num_restored = self._read_elsewhere(arrivals, self.num_prefill_nodes(load, rate))
        if drafting is not None:
            spec = drafting.spec(spec)
            cost = drafting.cost(cost, spec)
        replay = Replay(
            spec,
            cost,
            config,
            collapses=collapses,
            sample_interval=sample_interval,
            skips_prefill=self.is_split,
            store=store,
            drafting=drafting,
        )
        record = replay.run(arrivals)
        record.num_restored_tokens += num_restored
        return record

    def _read_elsewhere(self, arrivals: Sequence[Arrival], num_nodes: int) -> tuple[list[Arrival], int]:
        """Return the arrivals at the decode node, and how many of their tokens were restored.

        Prefill nodes take them first come, first served. They share a store of blocks. What a slot holds of a
        prompt is then sent over the links.
        """
        links = self.deployment.num_all_sockets * self.deployment.machine.link_bandwidth
        blocks = _Blocks(self.store, num_nodes) if self.store is not None else None
        free = [0.0] * num_nodes
        found: list[Arrival] = []
        total_restored = 0
        for arrival in arrivals:
            size = self.num_read(arrival.num_prompt_tokens)
            start = max(arrival.time, heapq.heappop(free))
            # A draft's choice of tokens is no beginning of another prompt.
            if blocks is None or size < arrival.num_prompt_tokens:
                end = start + self.read_seconds(arrival.num_prompt_tokens)
            else:
                num_known, copying = blocks.known(arrival, start)
                num_restored = min(num_known * HASH_TOKENS, size - 1)
                total_restored += num_restored
                end = start + copying + self.read_seconds(arrival.num_prompt_tokens, num_restored)
                blocks.store(arrival, end)
            heapq.heappush(free, end)
            held = min(size, self.policy.layout.capacity)
            end += self.deployment.model.cache_bytes(held) / links
            changed = replace(arrival, time=end, num_prompt_tokens=size, hash_ids=())
            found.append(replace(changed, seconds_elsewhere=end - arrival.time))
        return sorted(found, key=lambda arrival: arrival.time), total_restored


class _Blocks:
    """The blocks that prefill nodes have stored together, the least recently used first."""

    def __init__(self, store: SimulatedStore, num_nodes: int) -> None:
        self._most = num_nodes * store.spec.num_blocks
        self._seconds = store.spec.block_bytes / store.bandwidth  # of copying one
        self._since: OrderedDict[int, float] = OrderedDict()

    def known(self, arrival: Arrival, now: float) -> tuple[int, float]:
        """Return how many first blocks of a prompt are stored, and the seconds of copying all of its blocks.

        Those that are not stored are copied into the store later.
        """
        count = 0
        for block in arrival.block_ids:
            if self._since.get(block, math.inf) > now:
                break
            self._since.move_to_end(block)
            count += 1
        return count, len(arrival.block_ids) * self._seconds

    def store(self, arrival: Arrival, now: float) -> None:
        for block in arrival.block_ids:
            self._since.setdefault(block, now)
        while len(self._since) > self._most:
            self._since.popitem(last=False)


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
    entries = base.resident(load) if base.is_paged else policy.layout.capacity
    most = min(max_batch(one, entries) for one in base.deployments)
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


def fits(candidate: Candidate, load: Load) -> bool:
    """Return whether the slots fit. Activations of a verification are larger than those of a step."""
    entries = candidate.resident(load) if candidate.is_paged else candidate.policy.layout.capacity
    shape = DecodeShape(candidate.num_slots, entries)
    try:
        for one in candidate.deployments:
            token_seconds(one, shape, candidate.speculation)
    except DoesNotFitError:
        return False
    return True


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
        needed = math.ceil(_GENERATIONS * rate * statistics.fmean(record.end_to_end))
        if is_sustained and num_requests >= min(needed, _MOST_REQUESTS):
            return record, num_requests
        if not is_sustained and (num_requests % rounds == 0 or num_requests >= _MOST_REQUESTS):
            return None, num_requests
        more = max(needed, 2 * num_requests) if is_sustained else num_requests
        num_requests = min(rounds * math.ceil(more / rounds), max(_MOST_REQUESTS, num_requests))


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
