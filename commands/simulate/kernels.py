"""`step`: one device step, kernel by kernel."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

from backends.sn40l.description.hardware import load_machine_file
from backends.sn40l.step.decode import decode_seconds, decode_step
from backends.sn40l.step.deployment import DecodeShape
from backends.sn40l.step.kernels import Step, bottleneck
from backends.sn40l.step.placement import switch_seconds
from backends.sn40l.step.prefill import Chunk, prefill_seconds, prefill_step
from backends.sn40l.step.ranges import value_range
from backends.sn40l.step.trace import chrome_trace
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.deployment import deployment_of
from commands.simulate.options import StepOptions


def step_answer(options: StepOptions) -> Answer:
    """Return the time of a decode or prefill step by kernel."""
    deployment = replace(deployment_of(options, options.sockets), execution=options.execution)
    deployment.model.check_context(options.prefill or options.slot_capacity)
    changes = load_machine_file(options.machine).changes()
    if options.prefill:
        chunk = Chunk(options.prefill)
        step = prefill_step(deployment, chunk)
        spread = value_range(deployment, changes, lambda changed: prefill_seconds(changed, chunk))
    else:
        shape = DecodeShape(options.batch, options.slot_capacity)
        step = decode_step(deployment, shape)
        spread = value_range(deployment, changes, lambda changed: decode_seconds(changed, shape))
    if options.chrome_trace:
        options.chrome_trace.write_text(json.dumps(chrome_trace(step)))
    if options.plot:
        from backends.sn40l.plots import draw_bandwidth

        draw_bandwidth(options.plot, {options.execution: step}, deployment.machine, options.model)
    peak_bandwidth = step.num_sockets * deployment.machine.hbm_bandwidth
    totals = {
        "seconds": step.seconds,
        "seconds_low": spread.low,
        "seconds_high": spread.high,
        "calls": step.num_calls,
        "hbm_bytes": step.hbm_bytes,
        "operations": step.operations,
        "share_of_peak_bandwidth": step.hbm_bytes / step.seconds / peak_bandwidth,
    }
    if deployment.machine.ddr_capacity:
        totals["switch_seconds"] = switch_seconds(deployment)  # of the weights, from DDR
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
