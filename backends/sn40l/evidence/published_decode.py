"""Published figures of decode at small batches: what a token costs, kernel looping, and other machines."""

import statistics

from backends.sn40l.description.hardware import Machine
from backends.sn40l.description.model_config import Model
from backends.sn40l.evidence.figures import Figure, Machines, span, value
from backends.sn40l.evidence.measures import (
    DENSE_MODELS,
    LISTED_MODELS,
    attained,
    decode_of,
    looping_gain,
    model_of,
    rate_of,
    seconds_of,
    token_bytes,
)
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.placement import max_batch
from backends.sn40l.step.prefill import Chunk, prefill_seconds

LOOPING = "arXiv 2410.23668"
DATAFLOW = "successor of arXiv 2410.23668 (secondary)"
SN40L = "arXiv 2405.07518"
_GIB = 2**30


def model_figures() -> tuple[Figure, ...]:
    source = f"{LOOPING} table 1"
    context = 4096

    def model() -> Model:
        return model_of("llama-3.1-8b")

    def gigaflop() -> float:
        return (model().decode_operations(context) + 2 * model().embedding_params) / 1e9

    counted = "all parameters counted, as the source's bytes are; 20 comes out if attention counts twice"
    return (
        value("8B weights", source, "GiB", 14.9, 0.01, lambda _: model().weight_bytes / _GIB),
        value("8B cache at 4k", source, "GiB", 0.5, 0.01, lambda _: model().cache_bytes(context) / _GIB),
        value("8B bytes a token", source, "GiB", 15.4, 0.01, lambda _: token_bytes(model(), context) / _GIB),
        value("8B operations a token", source, "GFLOP", 20, 0.10, lambda _: gigaflop(), note=counted),
        value(
            "8B intensity",
            source,
            "FLOP/B",
            1.3,
            0.10,
            lambda _: gigaflop() / (token_bytes(model(), context) / _GIB),
            note="GFLOP over GiB",
        ),
    )


def looping_figures() -> tuple[Figure, ...]:
    listed = "models of the successor paper, batch 1, 4k, 16 sockets"

    def over(machines: Machines) -> list[float]:
        names = ("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen2.5-72b", "mixtral-8x7b")
        sn40l = machines["sn40l"]
        h100 = machines["dgx-h100"]
        return [
            rate_of(sn40l, name, 16, Execution.LOOPED) / rate_of(h100, name, 8, Execution.FUSED)
            for name in names
        ]

    def scaling(machine: Machine) -> list[float]:
        names = [name for name in LISTED_MODELS if _fits_8(machine, name)]
        return [
            rate_of(machine, name, 16, Execution.LOOPED) / rate_of(machine, name, 8, Execution.FUSED)
            for name in names
        ]

    loops = Execution.LOOPED

    def shares(machines: Machines) -> list[float]:
        return [attained(machines["sn40l"], name, 16, loops) for name in DENSE_MODELS]

    def gains(machines: Machines) -> list[float]:
        return [looping_gain(machines["sn40l"], name) for name in LISTED_MODELS]

    def gain_8b(machines: Machines) -> float:
        return looping_gain(machines["sn40l"], "llama-3.1-8b")

    def calls_8b(machines: Machines) -> float:
        return float(decode_of(machines["sn40l"], "llama-3.1-8b", 16, loops).num_calls)

    best = (
        "the sources do not say which model gains most; "
        "1042 tok/s of a looped 8B leave it 1.9, and a 3B would gain 2.4"
    )
    typical = (
        "7B and 8B are at 71, but with 70B and more nothing in the model keeps a loop "
        "from its 97 % of bandwidth"
    )
    return (
        value("looping, best", LOOPING, "×", 2.2, 0.10, lambda m: max(gains(m)), note=listed, miss=best),
        value(
            "looping, mean",
            LOOPING,
            "×",
            1.6,
            0.10,
            lambda m: statistics.geometric_mean(gains(m)),
            note=listed,
        ),
        value("looping, 8B", f"{LOOPING} (secondary)", "×", 2.0, 0.10, gain_8b, note="“about 2”"),
        value(
            "8 → 16 sockets, best",
            LOOPING,
            "×",
            2.5,
            0.10,
            lambda m: max(scaling(m["sn40l"])),
            note="read as: looped on 16 over not looped on 8; doubling alone never more than doubles",
        ),
        span(
            "share of peak, best",
            LOOPING,
            "%",
            90,
            100,
            0.0,
            lambda m: max(shares(m)),
            note="dense models, 16 sockets",
            nulls=(("stream_efficiency, fitted", 96.7),),
        ),
        span(
            "share of peak, least",
            f"{LOOPING} (secondary)",
            "%",
            70,
            100,
            0.0,
            lambda m: min(shares(m)),
            note="“generally over 70”",
        ),
        span(
            "share of peak, typical",
            f"{LOOPING} (secondary)",
            "%",
            70,
            78,
            0.05,
            lambda m: statistics.median(shares(m)),
            note="median of the dense models",
            miss=typical,
            nulls=(("8B on 16 sockets, fitted", 70.0),),
        ),
        value(
            "share of peak, 8B",
            f"{LOOPING} (secondary)",
            "%",
            78,
            0.10,
            lambda m: attained(m["sn40l"], "llama-3.1-8b", 16, loops),
            note="the source's model has 32 layers",
        ),
        value(
            "over DGX H100, best",
            LOOPING,
            "×",
            3.7,
            0.10,
            lambda m: max(over(m)),
            note="batch 1, 4k, models that fit 8 H100",
        ),
        value(
            "8B on 16 sockets",
            f"{SN40L} table IV",
            "tok/s",
            1042,
            0.10,
            lambda m: rate_of(m["sn40l"], "llama-3.1-8b", 16, loops, 8192),
            fits="sn40l.collective_latency",
            note="8k, taken as looped",
        ),
        value("calls a token, looped 8B", LOOPING, "calls", 4, 0.0, calls_8b),
    )


def _fits_8(machine: Machine, name: str) -> bool:
    return max_batch(Deployment(model_of(name), machine, 8), 4096, limit=1) > 0


def decode_figures() -> tuple[Figure, ...]:
    fused = Execution.FUSED
    looped = Execution.LOOPED
    sheet = "public decode sheet of 16 SN40L, MiniMax-M2.7 FP8 (secondary)"

    def minimax(machines: Machines, context: int) -> float:
        return 1e3 / rate_of(machines["sn40l"], "minimax-m2", 16, looped, context)

    def h100(machines: Machines, sockets: int) -> float:
        return rate_of(machines["dgx-h100"], "llama-3.1-8b", sockets, fused)

    layers = "without embedding, classifier and sampling"
    batch = "batch 32, 4k: the notes name no batch; 1.5 at 8 sequences, 2.0 at 64"
    return (
        value(
            "R1 at batch 1",
            "DAC-62 talk (secondary)",
            "tok/s",
            198,
            0.10,
            lambda m: rate_of(m["sn40l"], "deepseek-r1", 16, fused, 1024),
            fits="sn40l.launch",
            note="1k, two kernels a layer, not looped",
        ),
        value(
            "MiniMax TPOT at 1k",
            sheet,
            "ms",
            2.23,
            0.10,
            lambda m: minimax(m, 1024),
            fits="sn40l.drain",
            note="taken as looped",
        ),
        value(
            "MiniMax TPOT at 10k",
            sheet,
            "ms",
            2.38,
            0.10,
            lambda m: minimax(m, 10240),
            nulls=(("the line through 1k and 100k", 2.23 + (4.31 - 2.23) * 9 / 99),),
        ),
        value(
            "MiniMax TPOT at 100k",
            sheet,
            "ms",
            4.31,
            0.10,
            lambda m: minimax(m, 102400),
            fits="sn40l.stream_efficiency",
        ),
        value(
            "8B on 8 H100",
            DATAFLOW,
            "tok/s",
            300,
            0.10,
            lambda m: h100(m, 8),
            fits="dgx-h100.drain",
            note="4k",
        ),
        value(
            "8B, 4 → 8 H100",
            DATAFLOW,
            "×",
            1.42,
            0.05,
            lambda m: h100(m, 8) / h100(m, 4),
            nulls=(("twice the bandwidth", 2.0),),
        ),
        value(
            "8B on 8 H100, of peak",
            LOOPING,
            "%",
            21,
            0.05,
            lambda m: attained(m["dgx-h100"], "llama-3.1-8b", 8, fused),
        ),
        value(
            "calls a token, 8B on H100",
            LOOPING,
            "calls",
            320,
            0.0,
            lambda m: float(decode_of(m["dgx-h100"], "llama-3.1-8b", 8, fused).num_calls - 3),
            note=layers,
        ),
        value(
            "Qwen2.5-72B looping, large batch",
            DATAFLOW,
            "×",
            2.0,
            0.15,
            lambda m: _large_batch_gain(m["sn40l"]),
            note=batch,
        ),
        value(
            "fused layer, of HBM peak",
            SN40L,
            "%",
            85,
            0.05,
            lambda m: 100 * _fused_layer_share(m["sn40l"]),
            note="8B on 8 sockets",
            nulls=(("stream_efficiency, fitted", 96.7),),
        ),
    )


def vllm_figures() -> tuple[Figure, ...]:
    """Return a public sweep of vLLM on one A100: requests of 1,024 tokens in and 128 out."""
    source = "johnmusgrave.com/p/vllm-throughput-latency-sweep-on (secondary)"

    def rate(machines: Machines, concurrency: int) -> float:
        deployment = Deployment(model_of("llama-3.1-8b"), machines["a100"], 1)
        step = decode_seconds(deployment, DecodeShape(concurrency, 1024 + 64))
        return concurrency * 128 / (concurrency * prefill_seconds(deployment, Chunk(1024)) + 127 * step)

    return (
        value("8B on an A100, one request", source, "tok/s", 75, 0.25, lambda m: rate(m, 1)),
        value(
            "8B on an A100, 8 requests over one",
            source,
            "×",
            6.6,
            0.25,
            lambda m: rate(m, 8) / rate(m, 1),
            nulls=(("batches for nothing", 8.0),),
        ),
    )


def _large_batch_gain(machine: Machine) -> float:
    seconds = [
        seconds_of(machine, "qwen2.5-72b", 16, execution, 32)
        for execution in (Execution.FUSED, Execution.LOOPED)
    ]
    return seconds[0] / seconds[1]


def _fused_layer_share(machine: Machine) -> float:
    step = decode_of(machine, "llama-3.1-8b", 8, Execution.FUSED)
    layer = next(event.kernel for event in step.events if event.name == "layer")
    assert layer is not None
    return layer.hbm_bytes / layer.seconds(machine) / machine.hbm_bandwidth
