"""A step over time: as a Chrome trace (chrome://tracing, Perfetto) and as a series of HBM bandwidth."""

from collections.abc import Sequence
from typing import Any

from backends.sn40l.step.kernels import Event, Step


def chrome_trace(step: Step) -> dict[str, Any]:
    """Return the step in Chrome's trace format, with one process for each socket.

    Times are in microseconds. Bytes and operations are those of one socket.
    """
    events = [_entry(event, socket) for socket in range(step.num_sockets) for event in step.events]
    names = [_name(socket) for socket in range(step.num_sockets)]
    return {"displayTimeUnit": "ns", "otherData": {"simulated": True}, "traceEvents": names + events}


def _name(socket: int) -> dict[str, Any]:
    return {
        "name": "process_name",
        "ph": "M",
        "pid": socket,
        "tid": 0,
        "args": {"name": f"socket {socket} (simulated)"},
    }


def _entry(event: Event, socket: int) -> dict[str, Any]:
    kernel = event.kernel
    amounts = (
        {"hbm_bytes": kernel.hbm_bytes, "link_bytes": kernel.link_bytes, "operations": kernel.operations}
        if kernel
        else {}
    )
    return {
        "name": event.name,
        "cat": "kernel" if kernel else "gap",
        "ph": "X",
        "pid": socket,
        "tid": 0,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": amounts,
    }


def bandwidth(step: Step, interval: float) -> Sequence[float]:
    """Return the node's HBM traffic in bytes a second, averaged over intervals of `interval` seconds."""
    series = [0.0] * (int(step.seconds / interval) + 1)
    for event in step.events:
        if event.kernel is not None and event.end > event.start:
            rate = event.kernel.hbm_bytes / (event.end - event.start)
            for index in range(int(event.start / interval), int(event.end / interval) + 1):
                overlap = min(event.end, (index + 1) * interval) - max(event.start, index * interval)
                series[index] += step.num_sockets * rate * max(overlap, 0.0) / interval
    return series
