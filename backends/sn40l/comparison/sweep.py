"""Tables over batch, context, sockets, policy and execution."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.sn40l.comparison.plan import PlanOption, evaluate
from backends.sn40l.step.deployment import Deployment, Execution
from backends.sn40l.step.placement import DoesNotFitError
from cache.policy_options import PolicyOptions


@dataclass(frozen=True, slots=True)
class SweepAxes:
    """The values to combine."""

    batches: Sequence[int]
    contexts: Sequence[int]
    sockets: Sequence[int]
    policies: Sequence[PolicyOptions]
    executions: Sequence[Execution]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination; `missing` is in bytes a socket of `missing_tier` where it does not fit."""

    batch: int
    context: int
    num_sockets: int
    policy: str
    capacity: int
    execution: Execution
    option: PlanOption | None
    missing: float = 0.0
    missing_tier: str = ""


def sweep(
    deployment: Deployment, axes: SweepAxes, changes: Sequence[dict[str, Any]] = ()
) -> Iterator[SweepRow]:
    """Yield a row for each combination of the axes. All else is that of `deployment`.

    `changes` are those of its machine file.
    """
    for execution, num_sockets, options, context, batch in itertools.product(
        axes.executions, axes.sockets, axes.policies, axes.contexts, axes.batches
    ):
        policy = options.resolve(context)
        sized = replace(deployment, num_sockets=num_sockets, execution=execution)
        option = None
        missing, tier = 0.0, ""
        try:
            option = evaluate(sized, policy, context, batch, changes)
        except DoesNotFitError as error:
            missing, tier = error.missing, error.tier
        yield SweepRow(
            batch,
            context,
            num_sockets,
            policy.name,
            policy.capacity,
            execution,
            option,
            missing,
            tier,
        )
