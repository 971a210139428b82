"""`step`: one device step, kernel by kernel, and as a trace."""

import argparse
import json
from collections import Counter, defaultdict

from backends.sn40l.backend import default_deployment
from backends.sn40l.decode import decode_step
from backends.sn40l.deployment import DecodeShape, Deployment
from backends.sn40l.kernels import Step, bottleneck
from backends.sn40l.prefill import Chunk, prefill_step
from backends.sn40l.trace import chrome_trace
from server.simulate.answer import Answer
from server.simulate.table import table


def step_answer(arguments: argparse.Namespace) -> Answer:
    """What the step spends its time on."""
    named = default_deployment(arguments.model, arguments.machine, arguments.sockets)
    deployment = Deployment(named.model, named.machine, arguments.sockets, arguments.execution, uses_ddr=arguments.uses_ddr)
    if arguments.prefill:
        step = prefill_step(deployment, Chunk(arguments.prefill))
    else:
        step = decode_step(deployment, DecodeShape(arguments.batch, arguments.slot_capacity))
    if arguments.trace:
        arguments.trace.write_text(json.dumps(chrome_trace(step)))
    totals = {
        "seconds": step.seconds,
        "calls": step.num_calls,
        "hbm_bytes": step.hbm_bytes,
        "operations": step.operations,
        "share_of_peak_bandwidth": step.hbm_bytes / step.seconds / (step.num_sockets * named.machine.hbm_bandwidth),
    }
    limit = bottleneck(step, named.machine)
    lines = [*(f"{name:24} {value:,.6g}" for name, value in totals.items()), f"{'bottleneck':24} {limit}", "", _kernel_table(step)]
    return Answer(lines, {**totals, "bottleneck": limit})


def _kernel_table(step: Step) -> str:
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    read: defaultdict[str, float] = defaultdict(float)
    for event in step.events:
        counts[event.name] += 1
        seconds[event.name] += event.end - event.start
        read[event.name] += event.kernel.hbm_bytes if event.kernel else 0
    rows = [
        (name, str(counts[name]), f"{1e3 * spent:.4f}", f"{spent / step.seconds:.1%}", f"{step.num_sockets * read[name] / 1e9:.3f}")
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return table(("kernel", "times", "ms", "share", "GB of HBM"), rows)
