"""`plan` and `sweep`: the capacity and speed of deployments.

`backends.sn40l` computes; this module prints.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from backends.sn40l.plan import PlanOption, ServiceLevel, plan, socket_counts
from backends.sn40l.sweep import SweepAxes, SweepRow, sweep
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.deployment import default_executions, deployment_of, policy_of
from commands.simulate.options import PlanOptions, SweepOptions
from server.options.command_line import OptionError


def plan_answer(options: PlanOptions) -> Answer:
    """Return the deployments that meet the service level, cheapest first.

    Raises `OptionError` if none does.
    """
    deployment = deployment_of(options, max(options.sockets) if options.sockets else None)
    counts = options.sockets or socket_counts(deployment.machine.max_sockets)
    level = ServiceLevel(options.max_ttft, options.max_tpot, options.min_rate)
    deployment.model.check_context(options.context)
    resolved = [policy_of(name, options.slot_capacity).resolve(options.context) for name in options.policy]
    fitting = plan(deployment, counts, resolved, options.context)
    found = [option for option in fitting if level.is_met(option)]
    if not found:
        raise OptionError(_unmet(options, fitting))
    lines = [
        f"{options.model} on {options.machine}, context {options.context:,}",
        "",
        "Cheapest:",
        "",
        *_placement_lines(found[0]),
        "",
        "All that meet the level, cheapest first:",
        "",
        table(_OPTION_HEADER, [_option_cells(option) for option in found]),
    ]
    return Answer(lines, {"options": [_values(option) for option in found]})


def _unmet(options: PlanOptions, fitting: Sequence[PlanOption]) -> str:
    """Return the limits that no deployment meets together, each with the best value of any deployment."""
    limits = (
        ("--max-ttft", options.max_ttft, min(option.ttft for option in fitting)),
        ("--max-tpot", options.max_tpot, min(option.tpot for option in fitting)),
        ("--min-rate", options.min_rate, max(option.rate for option in fitting)),
    )
    unmet = " and ".join(
        f"{flag} {limit:g} (best of any: {best:.4g})" for flag, limit, best in limits if limit is not None
    )
    return f"none of {len(fitting)} deployments meets {unmet}"


_OPTION_HEADER = (
    "sockets",
    "policy",
    "entries",
    "slots",
    "TTFT s",
    "TPOT ms",
    "tok/s",
    "tok/s/user",
    "bottleneck",
)


def _option_cells(option: PlanOption) -> tuple[str, ...]:
    return (
        str(option.deployment.num_sockets),
        option.policy.name,
        str(option.policy.layout.capacity),
        str(option.num_slots),
        f"{option.ttft:.3g}",
        f"{1e3 * option.tpot:.3f}",
        f"{option.rate:.0f}",
        f"{1 / option.tpot:.1f}",
        option.bottleneck,
    )


def _placement_lines(option: PlanOption) -> list[str]:
    layout = option.policy.layout
    sections = f"{layout.num_sink} sink, {layout.num_recent:,} recent, {layout.num_kept:,} kept"
    slots = f"{option.num_slots} slots of {layout.capacity:,} entries ({option.policy.name}: {sections})"
    num_split = option.placement.sockets_per_sequence
    split = f"attention of a sequence on {num_split} {'socket' if num_split == 1 else 'sockets'}"
    lines = [f"{option.deployment.num_sockets} sockets, {slots}, {split}, {option.deployment.execution}"]
    for tier in option.placement.tiers:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in tier.parts if size)
        lines.append(
            f"  {tier.name:<4} {tier.used / 1e9:7.2f} of {tier.capacity / 1e9:7.2f} GB per socket: "
            f"{parts or 'empty'}"
        )
    return lines


def _values(option: PlanOption) -> dict[str, Any]:
    return {
        "num_sockets": option.deployment.num_sockets,
        "execution": option.deployment.execution,
        "policy": option.policy.name,
        "slot_capacity": option.policy.layout.capacity,
        "layout": asdict(option.policy.layout),
        "num_slots": option.num_slots,
        "ttft_seconds": option.ttft,
        "tpot_seconds": option.tpot,
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
    policies = [policy_of(name, options.slot_capacity) for name in options.policy]
    executions = options.executions or default_executions(deployment.machine)
    axes = SweepAxes(options.batches, options.contexts, counts, policies, executions)
    rows = list(sweep(deployment, axes))
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
    return (*head, *deployment, "-", "-", "-", "-", missing)


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
