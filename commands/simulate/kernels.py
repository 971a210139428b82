"""`step`: one device step, kernel by kernel."""

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import replace

from backends.sn40l.decode import decode_step
from backends.sn40l.deployment import DecodeShape
from backends.sn40l.kernels import Step, bottleneck
from backends.sn40l.prefill import Chunk, prefill_step
from backends.sn40l.trace import chrome_trace
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.deployment import deployment_of


def step_answer(arguments: argparse.Namespace) -> Answer:
    """Return the time of a decode or prefill step by kernel."""
    deployment = replace(deployment_of(arguments, arguments.sockets), execution=arguments.execution)
    if arguments.prefill:
        step = prefill_step(deployment, Chunk(arguments.prefill))
    else:
        step = decode_step(deployment, DecodeShape(arguments.batch, arguments.slot_capacity))
    if arguments.chrome_trace:
        arguments.chrome_trace.write_text(json.dumps(chrome_trace(step)))
    if arguments.plot:
        from backends.sn40l.plots import draw_bandwidth

        draw_bandwidth(arguments.plot, {arguments.execution: step}, deployment.machine, arguments.model)
    peak_bandwidth = step.num_sockets * deployment.machine.hbm_bandwidth
    totals = {
        "seconds": step.seconds,
        "calls": step.num_calls,
        "hbm_bytes": step.hbm_bytes,
        "operations": step.operations,
        "share_of_peak_bandwidth": step.hbm_bytes / step.seconds / peak_bandwidth,
    }
    limit = bottleneck(step, deployment.machine)
    lines = [
        *(f"{name:24} {value:,.6g}" for name, value in totals.items()),
        f"{'bottleneck':24} {limit}",
        "",
        _kernel_table(step),
    ]
    return Answer(lines, {**totals, "bottleneck": limit})


def _kernel_table(step: Step) -> str:
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    hbm_bytes: defaultdict[str, float] = defaultdict(float)
    for event in step.events:
        counts[event.name] += 1
        seconds[event.name] += event.end - event.start
        hbm_bytes[event.name] += event.kernel.hbm_bytes if event.kernel else 0
    rows = [
        (
            name,
            str(counts[name]),
            f"{1e3 * total:.4f}",
            f"{total / step.seconds:.1%}",
            f"{step.num_sockets * hbm_bytes[name] / 1e9:.3f}",
        )
        for name, total in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return table(("kernel", "times", "ms", "share", "GB of HBM"), rows)
