"""`plan` and `sweep`: what a deployment holds and how fast it is. The work is done in `backends.sn40l`."""

import argparse
from typing import Any

from backends.sn40l.backend import default_deployment
from backends.sn40l.plan import PlanOption, ServiceLevel, plan
from backends.sn40l.sweep import SweepAxes, SweepRow, sweep
from server.simulate.answer import Answer
from server.simulate.command import policies
from server.simulate.table import table


def plan_answer(arguments: argparse.Namespace) -> Answer:
    """The cheapest deployment that meets the level, and the others."""
    deployment = default_deployment(arguments.model, arguments.machine, 1, uses_ddr=arguments.uses_ddr)
    level = ServiceLevel(arguments.max_ttft, arguments.max_tpot, arguments.min_rate)
    resolved = [options.resolve(arguments.context) for options in policies(arguments)]
    found = plan(deployment, resolved, arguments.context, level)
    lines = [f"{arguments.model} on {arguments.machine}, context {arguments.context:,}", ""]
    if not found:
        return Answer([*lines, "No deployment meets the level."], {"options": []}, status=1)
    lines += ["Cheapest:", "", *_placement_lines(found[0]), "", "All that meet the level, cheapest first:", ""]
    return Answer([*lines, table(_OPTION_HEADER, [_option_cells(option) for option in found])], {"options": [_values(o) for o in found]})


_OPTION_HEADER = ("sockets", "policy", "entries", "slots", "TTFT s", "TPOT ms", "tok/s", "tok/s/user", "bottleneck")


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
    slots = f"{option.num_slots} slots of {option.policy.layout.capacity:,} entries ({option.policy.name})"
    how = f"attention over {option.placement.sharding}, {option.deployment.execution}"
    lines = [f"{option.deployment.num_sockets} sockets, {slots}, {how}"]
    for tier in option.placement.tiers:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in tier.parts if size)
        lines.append(f"  {tier.name:<4} {tier.used / 1e9:7.2f} of {tier.capacity / 1e9:7.2f} GB a socket: {parts or 'empty'}")
    return lines


def _values(option: PlanOption) -> dict[str, Any]:
    return {
        "num_sockets": option.deployment.num_sockets,
        "execution": option.deployment.execution,
        "policy": option.policy.name,
        "slot_capacity": option.policy.layout.capacity,
        "num_slots": option.num_slots,
        "ttft_seconds": option.ttft,
        "tpot_seconds": option.tpot,
        "tokens_per_second": option.rate,
        "bottleneck": option.bottleneck,
        "sharding": option.placement.sharding,
        "bytes_per_socket": {tier.name: dict(tier.parts) for tier in option.placement.tiers},
    }


def sweep_answer(arguments: argparse.Namespace) -> Answer:
    """The table of all combinations."""
    deployment = default_deployment(arguments.model, arguments.machine, 1, loops=False, uses_ddr=arguments.uses_ddr)
    axes = SweepAxes(arguments.batches, arguments.contexts, arguments.sockets, policies(arguments), arguments.executions)
    rows = list(sweep(deployment, axes))
    if arguments.plot:
        from backends.sn40l.plots import draw_sweep

        draw_sweep(arguments.plot, rows)
    header = ("execution", "context", *_OPTION_HEADER)
    return Answer([table(header, [_sweep_cells(row) for row in rows])], {"rows": [_sweep_values(row) for row in rows]})


def _sweep_cells(row: SweepRow) -> tuple[str, ...]:
    head = (row.execution, str(row.context))
    if row.option is not None:
        return (*head, *_option_cells(row.option))
    missing = f"{row.missing / 1e9:.2f} GB a socket missing"
    return (*head, str(row.num_sockets), row.policy, str(row.capacity), str(row.batch), "-", "-", "-", "-", missing)


def _sweep_values(row: SweepRow) -> dict[str, Any]:
    head = {"execution": row.execution, "context": row.context, "num_sockets": row.num_sockets, "policy": row.policy, "batch": row.batch}
    return head | (_values(row.option) if row.option is not None else {"missing_bytes_per_socket": row.missing})
