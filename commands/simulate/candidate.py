"""A deployment that may carry a load: its times by arithmetic, and its replay by the real scheduler."""

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backends.sn40l.step.cost_model import DeploymentCost, compression_of
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.placement import DoesNotFitError
from backends.sn40l.step.prefill import Chunk, prefill_seconds
from backends.sn40l.step.speculation import Speculation, token_seconds
from backends.timed import CostModel, SimulatedStore
from cache.policy import CachePolicy
from commands.shared.table import percentile
from commands.simulate.arrivals import HASH_TOKENS, Arrival
from commands.simulate.drafting import Drafting
from commands.simulate.load import Load, by_model
from commands.simulate.options import PREFILL_CHUNK
from commands.simulate.prefill_nodes import Blocks
from commands.simulate.replay import Replay, ReplayRecord, replay_config, replay_spec
from commands.simulate.switching import Switching

GENERATIONS = 8  # requests of a replay over those under way at once: it must outlast its beginning
MOST_REQUESTS = 2000
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
            for index, share, own in by_model(load, names)
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
        return max(1, min(held, self.policy.capacity))

    def shape(self, load: Load, num_slots: int) -> DecodeShape:
        """Return slots as memory is charged for them."""
        return DecodeShape.of(self.policy, num_slots, self.resident(load) if self.is_paged else None)

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
        shape = DecodeShape.of(self.policy, self.num_slots, None if pads else self.resident(load))
        return token_seconds(self.deployment, shape, self.speculation)

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
        return min(max(len(load.arrivals), math.ceil(GENERATIONS * rate * alone)), MOST_REQUESTS)

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
        blocks = Blocks(self.store, num_nodes) if self.store is not None else None
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
            held = DecodeShape.of(self.policy, 1, min(size, self.policy.capacity))
            end += held.sequence_bytes(self.deployment.model) / links
            changed = replace(arrival, time=end, num_prompt_tokens=size, hash_ids=())
            found.append(replace(changed, seconds_elsewhere=end - arrival.time))
        return sorted(found, key=lambda arrival: arrival.time), total_restored


def fits(candidate: Candidate, load: Load) -> bool:
    """Return whether the slots fit. Activations of a verification are larger than those of a step."""
    shape = candidate.shape(load, candidate.num_slots)
    try:
        for one in candidate.deployments:
            token_seconds(one, shape, candidate.speculation)
    except DoesNotFitError:
        return False
    return True
