"""`sweep`: the speed of steps of many deployments.

`backends.sn40l` computes; this module prints.
"""

from dataclasses import asdict
from typing import Any

from backends.sn40l.comparison.plan import PlanOption, socket_counts
from backends.sn40l.comparison.sweep import SweepAxes, SweepRow, sweep
from backends.sn40l.description.hardware import load_machine_file
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.deployment import default_executions, deployment_of, policy_of
from commands.simulate.options import SweepOptions

_OPTION_HEADER = (
    "sockets",
    "policy",
    "entries",
    "slots",
    "TTFT s",
    "TPOT ms",
    "range",
    "tok/s",
    "tok/s/user",
    "bottleneck",
)


def _option_cells(option: PlanOption) -> tuple[str, ...]:
    return (
        str(option.deployment.num_sockets),
        option.policy.name,
        str(option.policy.capacity),
        str(option.num_slots),
        f"{option.ttft:.3g}",
        f"{1e3 * option.tpot:.3f}",
        f"{1e3 * option.tpot_low:.3g} to {1e3 * option.tpot_high:.3g}",
        f"{option.rate:.0f}",
        f"{1 / option.tpot:.1f}",
        option.bottleneck,
    )


def _values(option: PlanOption) -> dict[str, Any]:
    return {
        "num_sockets": option.deployment.num_sockets,
        "execution": option.deployment.execution,
        "policy": option.policy.name,
        "slot_capacity": option.policy.capacity,
        "layout": asdict(option.policy.layout),
        "store": None if option.policy.store is None else asdict(option.policy.store),
        "num_slots": option.num_slots,
        "ttft_seconds": option.ttft,
        "tpot_seconds": option.tpot,
        "tpot_seconds_range": [option.tpot_low, option.tpot_high],
        "tokens_per_second": option.rate,
        "bottleneck": option.bottleneck,
        "sockets_per_sequence": option.placement.sockets_per_sequence,
        "bytes_per_socket": {tier.name: dict(tier.parts) for tier in option.placement.tiers},
    }


def sweep_answer(options: SweepOptions) -> Answer:
    """Return a row for each combination of batch, context, sockets, policy and execution."""
    deployment = deployment_of(options, max(options.sockets) if options.sockets else None, loops=False)
    counts = options.sockets or socket_counts(deployment.machine.max_sockets)[-2:]
    deployment.model.check_context(max(options.contexts))
    policies = [policy_of(options, name, options.slot_capacity) for name in options.policy]
    executions = options.executions or default_executions(deployment.machine)
    axes = SweepAxes(options.batches, options.contexts, counts, policies, executions)
    rows = list(sweep(deployment, axes, load_machine_file(options.machine).changes()))
    if options.plot:
        from backends.sn40l.plots import draw_sweep

        draw_sweep(options.plot, rows)
    header = ("execution", "context", *_OPTION_HEADER)
    return Answer(
        [table(header, [_sweep_cells(row) for row in rows])], {"rows": [_sweep_values(row) for row in rows]}
    )


def _sweep_cells(row: SweepRow) -> tuple[str, ...]:
    head = (row.execution, str(row.context))
    if row.option is not None:
        return (*head, *_option_cells(row.option))
    missing = f"{row.missing / 1e9:.2f} GB of {row.missing_tier} per socket missing"
    deployment = (str(row.num_sockets), row.policy, str(row.capacity), str(row.batch))
    return (*head, *deployment, "-", "-", "-", "-", "-", missing)


def _sweep_values(row: SweepRow) -> dict[str, Any]:
    head = {
        "execution": row.execution,
        "context": row.context,
        "num_sockets": row.num_sockets,
        "policy": row.policy,
        "batch": row.batch,
    }
    return head | (
        _values(row.option)
        if row.option is not None
        else {"missing_bytes_per_socket": row.missing, "missing_tier": row.missing_tier}
    )
