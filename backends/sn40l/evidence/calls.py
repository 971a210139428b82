"""Kernel calls and memories: fusion, orchestration, and what fits where."""

from backends.sn40l.evidence.figures import Machines, Value
from backends.sn40l.evidence.measures import model_of
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.placement import max_batch, switch_seconds
from backends.sn40l.step.prefill import Chunk, prefill_seconds, prefill_step

_FUSED = Execution.FUSED
_8B = "llama-3.1-8b"


def values() -> dict[str, Value]:
    """Return our values by the figures' names."""
    return {
        "orchestration at decode, least": lambda m: min(_orchestration(m)),
        "orchestration at decode, most": lambda m: max(_orchestration(m)),
        "orchestration at prefill, most": lambda m: max(_orchestration(m, is_prefill=True)),
        "fusion at decode, least": lambda m: min(_fusion(m)),
        "fusion at decode, most": lambda m: max(_fusion(m)),
        "fusion at prefill, least": lambda m: min(_fusion(m, is_prefill=True)),
        "fusion at prefill, most": lambda m: max(_fusion(m, is_prefill=True)),
        "fusion at prefill, launches": _launches,
        "8B switched in from DDR": lambda m: 1e3 * switch_seconds(Deployment(model_of(_8B), m["sn40l"], 16)),
        "DDR of 8 sockets over a DGX H100 host link": lambda m: (
            8 * m["sn40l"].ddr_bandwidth / m["dgx-h100"].ddr_bandwidth
        ),
        "405B sequences on a DGX H100": lambda m: float(
            max_batch(Deployment(model_of("llama-3.1-405b"), m["dgx-h100"], 8), DecodeShape(1, 4096))
        ),
    }


def _orchestration(machines: Machines, *, is_prefill: bool = False) -> list[float]:
    """Return how many times as fast an 8B and a 70B are if the device launches, not the host."""
    by_host, by_device = (
        _seconds(machines, _FUSED, is_hosted=is_hosted, is_prefill=is_prefill) for is_hosted in (True, False)
    )
    return [host / device for host, device in zip(by_host, by_device, strict=True)]


def _fusion(machines: Machines, *, is_prefill: bool = False) -> list[float]:
    """Return how many times as fast an 8B and a 70B are if layers are fused; the host launches."""
    apart, fused = (
        _seconds(machines, how, is_hosted=True, is_prefill=is_prefill)
        for how in (Execution.OPERATORS, _FUSED)
    )
    return [one / other for one, other in zip(apart, fused, strict=True)]


def _seconds(machines: Machines, execution: Execution, *, is_hosted: bool, is_prefill: bool) -> list[float]:
    found: list[float] = []
    for name in (_8B, "llama-3.1-70b"):
        deployment = Deployment(model_of(name), machines["sn40l"], 8, execution, host_launched=is_hosted)
        found.append(
            prefill_seconds(deployment, Chunk(4096))
            if is_prefill
            else decode_seconds(deployment, DecodeShape(1, 4096))
        )
    return found


def _launches(machines: Machines) -> float:
    apart, fused = (
        prefill_step(Deployment(model_of(_8B), machines["sn40l"], 8, how), Chunk(4096)).num_calls
        for how in (Execution.OPERATORS, _FUSED)
    )
    return apart / fused
