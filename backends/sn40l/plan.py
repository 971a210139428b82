"""Capacity planning: the speed and memory of deployments, and the cheapest one that meets a service level."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from backends.sn40l.cost_model import compression_of
from backends.sn40l.decode import decode_placement, decode_step
from backends.sn40l.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.kernels import bottleneck
from backends.sn40l.placement import Placement, fitting, max_batch
from backends.sn40l.prefill import Chunk, prefill_step
from cache.policy import CachePolicy


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Limits in seconds, and the least tokens a second of the whole node; None: any."""

    max_ttft: float | None = None
    max_tpot: float | None = None
    min_rate: float | None = None

    def is_met(self, option: "PlanOption") -> bool:
        return (
            (self.max_ttft is None or option.ttft <= self.max_ttft)
            and (self.max_tpot is None or option.tpot <= self.max_tpot)
            and (self.min_rate is None or option.rate >= self.min_rate)
        )


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One deployment with its speed.

    `ttft` is that of a prompt of `context` tokens read alone. `rate` does not account for the time of
    prefill.
    """

    deployment: Deployment
    policy: CachePolicy
    context: int
    num_slots: int
    ttft: float
    tpot: float
    placement: Placement
    bottleneck: str

    @property
    def rate(self) -> float:
        """Tokens a second of all slots together."""
        return self.num_slots / self.tpot


def evaluate(deployment: Deployment, policy: CachePolicy, context: int, num_slots: int) -> PlanOption:
    """Return the option of this deployment with `num_slots` slots. Raises DoesNotFitError."""
    shape = DecodeShape(num_slots, policy.layout.capacity)
    step = decode_step(deployment, shape)
    compression = compression_of(policy) if context > policy.max_direct_tokens else None
    # Prefill has no loop over layers: its kernels are long, and their gaps cost little.
    prefill = prefill_step(
        replace(deployment, execution=Execution.FUSED), Chunk(context, compression=compression)
    )
    placement = decode_placement(deployment, shape)
    return PlanOption(
        deployment,
        policy,
        context,
        num_slots,
        prefill.seconds,
        step.seconds,
        placement,
        bottleneck(step, deployment.machine),
    )


def socket_counts(max_sockets: int) -> tuple[int, ...]:
    """Return the powers of two up to a machine's sockets."""
    return tuple(2**power for power in range(max_sockets.bit_length()))


def options(deployment: Deployment, policy: CachePolicy, context: int) -> Iterator[PlanOption]:
    """Yield the deployment with 1, 2, 4 … slots, up to the most that fit; nothing if not even one does."""
    most = max_batch(deployment, policy.layout.capacity)
    num_slots = 1
    while num_slots <= most:
        yield evaluate(deployment, policy, context, num_slots)
        num_slots *= 2


def plan(
    deployment: Deployment, num_sockets: Iterable[int], policies: Iterable[CachePolicy], context: int
) -> tuple[PlanOption, ...]:
    """Return every way that fits, cheapest first: fewest sockets, then most tokens a second.

    Every power of two of slots is tried. `deployment` has the other values. Raises DoesNotFitError if none
    fits.
    """
    policies = tuple(policies)
    sized = [replace(deployment, num_sockets=count) for count in sorted(num_sockets)]
    found = [option for policy in policies for one in sized for option in options(one, policy, context)]
    if not found:
        fitting(
            sized[-1], DecodeShape(1, min(policy.layout.capacity for policy in policies))
        )  # says what is missing
    return tuple(sorted(found, key=lambda option: (option.deployment.num_sockets, -option.rate)))
