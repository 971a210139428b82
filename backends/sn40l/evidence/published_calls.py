"""Published figures of kernel calls and memories: fusion, orchestration, and what fits where."""

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Figure, Machines, span, value
from backends.sn40l.evidence.measures import model_of
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.placement import max_batch, switch_seconds
from backends.sn40l.step.prefill import Chunk, prefill_seconds, prefill_step

SN40L = "arXiv 2405.07518"
DATAFLOW = "successor of arXiv 2410.23668 (secondary)"


def orchestration_figures() -> tuple[Figure, ...]:
    source = f"{SN40L} figures 10 and 11"
    names = ("llama-3.1-8b", "llama-3.1-70b")

    def seconds(machine: Machine, name: str, execution: Execution, host: bool, prefill: bool) -> float:
        deployment = Deployment(model_of(name), machine, 8, execution, host_launched=host)
        if prefill:
            return prefill_seconds(deployment, Chunk(4096))
        return decode_seconds(deployment, DecodeShape(1, 4096))

    def gains(machines: Machines, prefill: bool) -> list[float]:
        sn40l = machines["sn40l"]
        fused = Execution.FUSED
        return [
            seconds(sn40l, name, fused, True, prefill) / seconds(sn40l, name, fused, False, prefill)
            for name in names
        ]

    def fusions(machines: Machines, prefill: bool) -> list[float]:
        sn40l = machines["sn40l"]
        unfused = Execution.OPERATORS
        fused = Execution.FUSED
        return [
            seconds(sn40l, name, unfused, True, prefill) / seconds(sn40l, name, fused, True, prefill)
            for name in names
        ]

    def launches(machines: Machines) -> float:
        calls = [
            prefill_step(
                Deployment(model_of("llama-3.1-8b"), machines["sn40l"], 8, execution), Chunk(4096)
            ).num_calls
            for execution in (Execution.OPERATORS, Execution.FUSED)
        ]
        return calls[0] / calls[1]

    note = "8B and 70B on 8 sockets, 4k, batch 1"
    bound = (
        "at the compute efficiency that 46 s for 128k imply, a large model's prefill is bound by products, "
        "and spilling hides behind them"
    )
    return (
        span(
            "orchestration at decode, least",
            source,
            "×",
            1.4,
            8,
            0.0,
            lambda m: min(gains(m, False)),
            note=note,
        ),
        span(
            "orchestration at decode, most",
            source,
            "×",
            1.4,
            8,
            0.0,
            lambda m: max(gains(m, False)),
            note=note,
        ),
        span(
            "orchestration at prefill, most",
            source,
            "×",
            1.0,
            1.1,
            0.0,
            lambda m: max(gains(m, True)),
            note=note,
        ),
        span("fusion at decode, least", source, "×", 1, 13, 0.0, lambda m: min(fusions(m, False)), note=note),
        span("fusion at decode, most", source, "×", 1, 13, 0.0, lambda m: max(fusions(m, False)), note=note),
        span(
            "fusion at prefill, least",
            source,
            "×",
            1.5,
            3,
            0.0,
            lambda m: min(fusions(m, True)),
            note=note,
            miss=bound,
        ),
        span("fusion at prefill, most", source, "×", 1.5, 3, 0.0, lambda m: max(fusions(m, True)), note=note),
        value(
            "fusion at prefill, launches",
            source,
            "×",
            11,
            0.05,
            launches,
            note="an 8B for the source's 7B, 4k",
        ),
    )


def memory_figures() -> tuple[Figure, ...]:
    def switch(machines: Machines) -> float:
        return 1e3 * switch_seconds(Deployment(model_of("llama-3.1-8b"), machines["sn40l"], 16))

    def fits_h100(machines: Machines) -> float:
        return float(max_batch(Deployment(model_of("llama-3.1-405b"), machines["dgx-h100"], 8), 4096))

    bound = "“more than 100 GB/s” a socket is taken as 100"
    return (
        value("8B switched in from DDR", "Hot Chips 2024", "ms", 10, 0.05, switch, note="16 sockets"),
        value(
            "DDR of 8 sockets over a DGX H100 host link",
            SN40L,
            "×",
            15.5,
            0.10,
            lambda m: 8 * m["sn40l"].ddr_bandwidth / m["dgx-h100"].ddr_bandwidth,
            note=bound,
        ),
        value(
            "405B sequences on a DGX H100",
            DATAFLOW,
            "slots",
            0,
            0.0,
            fits_h100,
            is_absolute=True,
            note="it does not fit in BF16",
        ),
    )
