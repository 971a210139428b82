"""The speed and memory of a deployment step by step: of a decode step, and of a prompt read alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.sn40l.step.cost_model import compression_of
from backends.sn40l.step.decode import decode_placement, decode_seconds, decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.kernels import bottleneck
from backends.sn40l.step.placement import Placement
from backends.sn40l.step.prefill import Chunk, prefill_step
from backends.sn40l.step.ranges import value_range
from cache.policy import CachePolicy


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One deployment with its speed.

    `ttft` is that of a prompt of `context` tokens read alone. `rate` does not account for the time of
    prefill. `tpot_low` and `tpot_high` are with one unpublished number of the machine at an end of its range.
    """

    deployment: Deployment
    policy: CachePolicy
    context: int
    num_slots: int
    ttft: float
    tpot: float
    tpot_low: float
    tpot_high: float
    placement: Placement
    bottleneck: str

    @property
    def rate(self) -> float:
        """Tokens a second of all slots together."""
        return self.num_slots / self.tpot


def evaluate(
    deployment: Deployment,
    policy: CachePolicy,
    context: int,
    num_slots: int,
    changes: Sequence[dict[str, Any]] = (),
) -> PlanOption:
    """Return the option of this deployment with `num_slots` slots; `changes` are those of its machine file.

    Raises DoesNotFitError.
    """
    shape = DecodeShape.of(policy, num_slots)
    step = decode_step(deployment, shape)
    compression = compression_of(policy, context)
    # Prefill has no loop over layers: its kernels are long, and their gaps cost little.
    prefill = prefill_step(
        replace(deployment, execution=Execution.FUSED), Chunk(context, compression=compression)
    )
    placement = decode_placement(deployment, shape)
    spread = value_range(deployment, changes, lambda changed: decode_seconds(changed, shape))
    return PlanOption(
        deployment,
        policy,
        context,
        num_slots,
        prefill.seconds,
        step.seconds,
        spread.low,
        spread.high,
        placement,
        bottleneck(step, deployment.machine),
    )


def socket_counts(max_sockets: int) -> tuple[int, ...]:
    """Return the powers of two up to a machine's sockets."""
    return tuple(2**power for power in range(max_sockets.bit_length()))
