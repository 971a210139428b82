"""Kernels and calls, and their time on one socket. Only this module turns work into seconds.

A static kernel computes with the data that it has streamed. In a loop, the weights of the next iteration
stream during the computation of this one, so an iteration takes the longer of the two. A call that is not a
loop takes the sum. Links overlap with both, except for the exposed share of the collectives. Nothing streams
between calls. All sockets of a node do the same work, and amounts are those of the busiest socket.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from backends.sn40l.description.hardware import Machine


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of one kernel on one socket, in bytes and operations.

    `attention_operations` include the time to fill the pipeline.
    """

    name: str
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    activation_bytes: float = 0.0  # written to and read from HBM between operators that are not fused
    ddr_bytes: float = 0.0
    gather_bytes: float = 0.0
    gemm_operations: float = 0.0
    attention_operations: float = 0.0
    attention_efficiency: float = 1.0
    link_bytes: float = 0.0  # streamed while the kernel computes
    exchange_bytes: float = 0.0  # moved over the links before it starts
    num_collectives: int = 0
    node_bytes: float = 0.0  # sent to the next nodes
    num_hops: int = 0  # between nodes
    awaits_router: bool = False
    loops_inside: bool = False  # over experts or tiles, whose bytes stream one turn ahead

    @property
    def hbm_bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes + self.gather_bytes

    @property
    def operations(self) -> float:
        return self.gemm_operations + self.attention_operations

    def bounds(self, machine: Machine) -> dict[str, float]:
        """Return the seconds that each resource alone would need."""
        stream = machine.hbm_bandwidth * machine.stream_efficiency
        return {
            "weights": self.weight_bytes / stream,
            "cache": self.cache_bytes / (stream * machine.cache_efficiency),
            "activations": self.activation_bytes / stream,
            "gathers": self.gather_bytes / (machine.hbm_bandwidth * machine.gather_efficiency),
            "ddr": self.ddr_bytes / machine.ddr_bandwidth,
            "products": self.gemm_operations / (machine.matrix_rate * machine.gemm_efficiency),
            "attention": self.attention_operations / (machine.matrix_rate * self.attention_efficiency),
            "links": self.link_bytes / machine.link_bandwidth,
            "sram": (self.hbm_bytes + self.ddr_bytes) / machine.sram_bandwidth,
        }

    def seconds(self, machine: Machine, *, is_looped: bool = False) -> float:
        """Return the seconds of the kernel after its launch, or of one iteration of a loop over layers."""
        return _kernel_seconds(self, machine, is_looped or self.loops_inside or machine.overlaps_streams)


@lru_cache(maxsize=4096)
def _kernel_seconds(kernel: Kernel, machine: Machine, streams_ahead: bool) -> float:
    bound = kernel.bounds(machine)
    # Of products and of attention.
    reading = [bound["weights"] + bound["activations"], bound["cache"] + bound["gathers"]]
    computing = [bound["products"], bound["attention"]]
    if machine.overlaps_stages:
        reading, computing = [sum(reading)], [max(computing)]
    slowest = max(bound["ddr"], bound["sram"])
    if streams_ahead:
        streamed = max(sum(map(max, reading, computing)), slowest)
    else:
        streamed = max(sum(reading), slowest) + sum(computing)
    exposed = (
        kernel.exchange_bytes / machine.link_bandwidth + kernel.num_collectives * machine.collective_latency
    )
    if kernel.num_hops:
        exposed += kernel.node_bytes / machine.node_bandwidth + kernel.num_hops * machine.node_latency
    return exposed + max(streamed, bound["links"])


def merge(name: str, kernels: Sequence[Kernel]) -> Kernel:
    """Return one kernel with the work of several."""
    return Kernel(
        name=name,
        weight_bytes=sum(kernel.weight_bytes for kernel in kernels),
        cache_bytes=sum(kernel.cache_bytes for kernel in kernels),
        activation_bytes=sum(kernel.activation_bytes for kernel in kernels),
        ddr_bytes=sum(kernel.ddr_bytes for kernel in kernels),
        gather_bytes=sum(kernel.gather_bytes for kernel in kernels),
        gemm_operations=sum(kernel.gemm_operations for kernel in kernels),
        attention_operations=sum(kernel.attention_operations for kernel in kernels),
        attention_efficiency=min(kernel.attention_efficiency for kernel in kernels),
        link_bytes=sum(kernel.link_bytes for kernel in kernels),
        exchange_bytes=sum(kernel.exchange_bytes for kernel in kernels),
        num_collectives=sum(kernel.num_collectives for kernel in kernels),
        node_bytes=sum(kernel.node_bytes for kernel in kernels),
        num_hops=sum(kernel.num_hops for kernel in kernels),
        awaits_router=any(kernel.awaits_router for kernel in kernels),
        loops_inside=any(kernel.loops_inside for kernel in kernels),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One launch of kernels that run without a gap, or `num_launches` launches that share them."""

    kernels: tuple[Kernel, ...]
    num_launches: int = 1

    @property
    def is_loop(self) -> bool:
        return len(self.kernels) > 1


def hops(num_nodes: int, num_sockets: int, activation_bytes: float) -> Iterator[Call]:
    """Yield the call, if any, in which the sockets hand a step's activations from node to node."""
    count = num_nodes - 1
    if count:
        yield Call((Kernel("nodes", node_bytes=count * activation_bytes / num_sockets, num_hops=count),))


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a socket from `start` to `end`: a kernel, or a gap without streaming (`kernel` None)."""

    name: str
    start: float
    end: float
    kernel: Kernel | None


@dataclass(frozen=True, slots=True)
class Step:
    """One device step on one of `num_sockets` equal sockets."""

    events: tuple[Event, ...]
    num_sockets: int
    num_calls: int

    @property
    def seconds(self) -> float:
        return self.events[-1].end if self.events else 0.0

    @property
    def hbm_bytes(self) -> float:
        """Bytes that the node reads from HBM and writes to it."""
        return self.num_sockets * sum(event.kernel.hbm_bytes for event in self.events if event.kernel)

    @property
    def operations(self) -> float:
        """Operations of the node, those that only fill the pipeline included."""
        return self.num_sockets * sum(event.kernel.operations for event in self.events if event.kernel)

    @property
    def gap_seconds(self) -> float:
        """Seconds in which nothing streams."""
        return sum(event.end - event.start for event in self.events if event.kernel is None)

    def share(self, name: str) -> float:
        """Return the part of the step's seconds that kernels of this name take, their launches left out."""
        return (
            sum(event.end - event.start for event in self.events if event.kernel and event.name == name)
            / self.seconds
        )


def run(calls: Iterable[Call], machine: Machine, num_sockets: int, call_seconds: float) -> Step:
    """Return the step that launches these calls one after another, each launch costing `call_seconds`."""
    events: list[Event] = []
    now = 0.0
    num_calls = 0
    for call in calls:
        now = _append(events, "launch", now, call_seconds * call.num_launches, None)
        num_calls += call.num_launches
        for kernel in call.kernels:
            if call.is_loop and kernel.awaits_router:
                now = _append(events, "router", now, machine.drain, None)
            now = _append(events, kernel.name, now, kernel.seconds(machine, is_looped=call.is_loop), kernel)
    return Step(tuple(events), num_sockets, num_calls)


def total_seconds(calls: Iterable[Call], machine: Machine, call_seconds: float) -> float:
    """Return the seconds of `run` without its events. A call that is repeated is timed once."""
    seconds: dict[int, tuple[float, Call]] = {}  # by identity; the call is kept so that none gets its number
    total = 0.0
    for call in calls:
        timed = seconds.get(id(call))
        if timed is None:
            timed = seconds[id(call)] = (_call_seconds(call, machine, call_seconds), call)
        total += timed[0]
    return total


def _call_seconds(call: Call, machine: Machine, call_seconds: float) -> float:
    is_loop = call.is_loop
    drains = sum(kernel.awaits_router for kernel in call.kernels) if is_loop else 0
    kernels = sum(kernel.seconds(machine, is_looped=is_loop) for kernel in call.kernels)
    return call_seconds * call.num_launches + drains * machine.drain + kernels


def bottleneck(step: Step, machine: Machine) -> str:
    """Return the largest part of the step's time: a resource, links' latency, or gaps between calls."""
    spent: dict[str, float] = {"gaps": step.gap_seconds}
    for event in step.events:
        if event.kernel:
            bounds = event.kernel.bounds(machine)
            slowest = max(bounds, key=lambda name: bounds[name])
            exposed = event.kernel.num_collectives * machine.collective_latency
            spent["collectives"] = spent.get("collectives", 0.0) + exposed
            spent[slowest] = spent.get(slowest, 0.0) + event.end - event.start - exposed
    return max(spent, key=lambda name: spent[name])


def _append(events: list[Event], name: str, start: float, seconds: float, kernel: Kernel | None) -> float:
    events.append(Event(name, start, start + seconds, kernel))
    return start + seconds
