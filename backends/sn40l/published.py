"""The published figures, and the same quantities from this model. Twelve of them fix one parameter each; all others are held out.

Sources are public papers and talks; (secondary) marks what was read in someone else's notes. What the sources leave open, such as a context
length, is said in the figure's note.
"""

import math
import statistics
from collections.abc import Callable
from functools import lru_cache

from backends.sn40l.decode import decode_step
from backends.sn40l.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.figures import Figure, Machines
from backends.sn40l.hardware import Machine
from backends.sn40l.kernels import Step
from backends.sn40l.model_config import Model, load_model
from backends.sn40l.placement import max_batch
from backends.sn40l.prefill import Chunk, Compression, prefill_step

SNAPSTREAM = "arXiv 2511.03092"
LOOPING = "arXiv 2410.23668"
DATAFLOW = "successor of arXiv 2410.23668 (secondary)"
SN40L = "arXiv 2405.07518"
MULTI_TOKEN = 2.4  # the factor in every throughput of table 5: multi-token prediction assumed, not measured
TABLE_5 = (  # prompt, cache, batch and tokens/s without and with SnapStream
    (131072, 32768, 16, 64, 434, 1832),
    (65536, 16384, 32, 128, 908, 3928),
    (32768, 8192, 64, 256, 1832, 7903),
)
LISTED_MODELS = (
    "gpt-oss-120b",
    "deepseek-r1",
    "llama-4-maverick",
    "llama-4-scout",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mixtral-8x7b",
    "qwen2.5-7b",
    "qwen2.5-72b",
)
DENSE_MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen2.5-7b", "qwen2.5-72b")
_GIB = 2**30


@lru_cache(maxsize=64)
def _model(name: str) -> Model:
    return load_model(name)


def _decode(machine: Machine, name: str, sockets: int, execution: Execution, batch: int = 1, context: int = 4096) -> Step:
    return decode_step(Deployment(_model(name), machine, sockets, execution), DecodeShape(batch, context))


def _rate(machine: Machine, name: str, sockets: int, execution: Execution, context: int = 4096) -> float:
    return 1 / _decode(machine, name, sockets, execution, context=context).seconds


def published_figures() -> tuple[Figure, ...]:
    """Return every published figure that the model covers."""
    return (*_characterisation(), *_throughputs(), *_prefill_shares(), *_looping(), *_other_decode(), *_orchestration(), *_memory())


def _value(
    key: str,
    source: str,
    unit: str,
    published: float,
    tolerance: float,
    compute: Callable[[Machines], float],
    *,
    fits: str | None = None,
    note: str = "",
    miss: str = "",
    is_absolute: bool = False,
) -> Figure:
    return Figure(key, source, unit, published, published, compute, tolerance, is_absolute, fits, note, miss)


def _range(
    key: str,
    source: str,
    unit: str,
    low: float,
    high: float,
    tolerance: float,
    compute: Callable[[Machines], float],
    *,
    note: str = "",
    miss: str = "",
) -> Figure:
    return Figure(key, source, unit, low, high, compute, tolerance, note=note, miss=miss)


def _characterisation() -> tuple[Figure, ...]:
    source, context = f"{LOOPING} table 1", 4096

    def model() -> Model:
        return _model("llama-3.1-8b")

    def gigaflop() -> float:
        return (model().decode_operations(context) + 2 * model().embedding_params) / 1e9

    counted = "all parameters counted, as the source's bytes are; its 20 is met exactly when attention counts twice"
    return (
        _value("8B weights", source, "GiB", 14.9, 0.01, lambda _: model().weight_bytes / _GIB),
        _value("8B cache at 4k", source, "GiB", 0.5, 0.01, lambda _: model().cache_bytes(context) / _GIB),
        _value("8B bytes a token", source, "GiB", 15.4, 0.01, lambda _: _token_bytes(model(), context) / _GIB),
        _value("8B operations a token", source, "GFLOP", 20, 0.10, lambda _: gigaflop(), note=counted),
        _value(
            "8B intensity",
            source,
            "FLOP/B",
            1.3,
            0.10,
            lambda _: gigaflop() / (_token_bytes(model(), context) / _GIB),
            note="GFLOP over GiB",
        ),
        _value("8B roofline, 16 sockets", DATAFLOW, "tok/s", 1542, 0.01, lambda m: _roofline(m["sn40l"], model(), 16, context)),
    )


def _token_bytes(model: Model, context: int) -> float:
    return model.weight_bytes + model.cache_bytes(context)


def _roofline(machine: Machine, model: Model, sockets: int, context: int) -> float:
    """Return tokens/s at batch 1 of a dense model if all its weights and its cache were read at peak bandwidth (the sources' equation)."""
    return sockets * machine.hbm_bandwidth / _token_bytes(model, context)


def table_5_rate(machine: Machine, batch: int, capacity: int) -> float:
    """Return tokens/s of DeepSeek-R1 on 16 sockets, the paper's factor for multi-token prediction included."""
    return MULTI_TOKEN * batch / _decode(machine, "deepseek-r1", 16, Execution.FUSED, batch, capacity).seconds


def table_5_batch(machine: Machine, capacity: int) -> int:
    """Return the largest batch of DeepSeek-R1 on 16 sockets."""
    return max_batch(Deployment(_model("deepseek-r1"), machine, 16), capacity)


def _throughputs() -> tuple[Figure, ...]:
    source = f"{SNAPSTREAM} table 5"
    fitted = {(131072, 16): "sn40l.pipeline_fill", (32768, 64): "sn40l.decode_attention_efficiency"}
    figures: list[Figure] = []
    for prompt, cache, full_batch, batch, full_rate, rate in TABLE_5:
        column = f"R1 {prompt // 1024}k"
        for label, entries, size, published in (
            (f"{column} full", prompt, full_batch, full_rate),
            (f"{column}→{cache // 1024}k", cache, batch, rate),
        ):
            fits = fitted.pop((entries, size), None)
            note = f"batch {size}, ×{MULTI_TOKEN} included"
            compute = _bind(lambda m, b, c: table_5_rate(m["sn40l"], b, c), size, entries)
            figures.append(_value(f"{label}: rate", source, "tok/s", published, 0.10, compute, fits=fits, note=note))
            figures.append(
                _value(f"{label}: batch", source, "slots", size, 0.0, _bind(lambda m, c: float(table_5_batch(m["sn40l"], c)), entries))
            )
        gain = _bind(
            lambda m, b, c, fb, p: table_5_rate(m["sn40l"], b, c) / table_5_rate(m["sn40l"], fb, p), batch, cache, full_batch, prompt
        )
        figures.append(_value(f"{column}: gain", source, "×", round(rate / full_rate, 2), 0.05, gain))
    return tuple(figures)


def moe_layer_shares(machine: Machine) -> dict[str, float]:
    """Return the shares of one expert layer's prefill of DeepSeek-R1 at 128k on 16 sockets, in percent."""
    step = _r1_prefill(machine, 131072, Compression(16384, 16384))
    kernels = [event for event in step.events if event.kernel][-8:-1]  # the last layer, without the classifier
    total = sum(event.end - event.start for event in kernels)
    return {event.name: 100 * (event.end - event.start) / total for event in kernels}


def _r1_prefill(machine: Machine, num_tokens: int, compression: Compression | None = None) -> Step:
    return prefill_step(Deployment(_model("deepseek-r1"), machine, 16), Chunk(num_tokens, compression=compression))


def _prefill_shares() -> tuple[Figure, ...]:
    source, ttft_source = f"{SNAPSTREAM} table 4", "arXiv 2603.02631 (secondary)"
    shares = (  # published in percent of an expert layer's prefill at 128k
        ("projections", 4.10, None),
        ("attention", 69.40, None),
        ("output", 5.84, "sn40l.link_bandwidth"),
        ("router", 3.15, None),
        ("experts", 14.67, "sn40l.gemm_efficiency"),
        ("selection", 2.52, "sn40l.gather_efficiency"),
        ("ring", 0.32, None),
    )
    rows = [
        _value(
            f"R1 prefill: {name}",
            source,
            "%",
            published,
            0.5,
            _bind(lambda m, n: moe_layer_shares(m["sn40l"])[n], name),
            fits=fits,
            is_absolute=True,
            note="tolerance in points",
        )
        for name, published, fits in shares
    ]
    draft = "the source's time includes a draft model's prefill; a third length gives the quadratic part another size than table 4 does"
    return (
        *rows,
        _range("R1 prefill: SnapStream", SNAPSTREAM, "%", 2, 5, 0.0, lambda m: _overhead(m["sn40l"])),
        _value(
            "R1 prefill of 128k",
            ttft_source,
            "s",
            46,
            0.10,
            lambda m: _r1_prefill(m["sn40l"], 131072).seconds,
            fits="sn40l.prefill_attention_efficiency",
        ),
        _value("R1 prefill of 32k", ttft_source, "s", 4.3, 0.10, lambda m: _r1_prefill(m["sn40l"], 32768).seconds, miss=draft),
        _value(
            "R1 prefill of 16k", ttft_source, "s", 2.5, 0.20, lambda m: _r1_prefill(m["sn40l"], 16384).seconds, note="draft included there"
        ),
    )


def _overhead(machine: Machine) -> float:
    shares = moe_layer_shares(machine)
    return 100 * (shares["selection"] + shares["ring"]) / (100 - shares["selection"] - shares["ring"])


def looping_gain(machine: Machine, name: str, sockets: int = 16) -> float:
    """Return how many times faster a token is when the layers are looped, at batch 1 and 4k."""
    return _rate(machine, name, sockets, Execution.LOOPED) / _rate(machine, name, sockets, Execution.FUSED)


def attained(machine: Machine, name: str, sockets: int, execution: Execution, context: int = 4096) -> float:
    """Return the share of its roofline that a dense model reaches at batch 1, in percent."""
    return 100 * _rate(machine, name, sockets, execution, context) / _roofline(machine, _model(name), sockets, context)


def _looping() -> tuple[Figure, ...]:
    listed = "models of the successor paper, batch 1, 4k, 16 sockets"

    def over(machines: Machines) -> list[float]:
        names = ("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen2.5-72b", "mixtral-8x7b")
        sn40l, h100 = machines["sn40l"], machines["dgx-h100"]
        return [_rate(sn40l, name, 16, Execution.LOOPED) / _rate(h100, name, 8, Execution.FUSED) for name in names]

    def scaling(machine: Machine) -> list[float]:
        names = [name for name in LISTED_MODELS if _fits_8(machine, name)]
        return [_rate(machine, name, 16, Execution.LOOPED) / _rate(machine, name, 8, Execution.FUSED) for name in names]

    loops = Execution.LOOPED

    def shares(machines: Machines) -> list[float]:
        return [attained(machines["sn40l"], name, 16, loops) for name in DENSE_MODELS]

    def gains(machines: Machines) -> list[float]:
        return [looping_gain(machines["sn40l"], name) for name in LISTED_MODELS]

    def gain_8b(machines: Machines) -> float:
        return looping_gain(machines["sn40l"], "llama-3.1-8b")

    def calls_8b(machines: Machines) -> float:
        return float(_decode(machines["sn40l"], "llama-3.1-8b", 16, loops).num_calls)

    best = "the sources do not say which model gains most; 1042 tok/s of a looped 8B leave it 1.9, and a 3B would gain 2.4"
    return (
        _value("looping, best", LOOPING, "×", 2.2, 0.10, lambda m: max(gains(m)), note=listed, miss=best),
        _value("looping, mean", LOOPING, "×", 1.6, 0.10, lambda m: _geometric(gains(m)), note=listed),
        _value("looping, 8B", f"{LOOPING} (secondary)", "×", 2.0, 0.10, gain_8b, note="“about 2”"),
        _value("8 → 16 sockets, best", LOOPING, "×", 2.5, 0.10, lambda m: max(scaling(m["sn40l"])),
               note="read as: looped on 16 over not looped on 8; doubling alone never more than doubles"),
        _range("share of peak, best", LOOPING, "%", 90, 100, 0.0, lambda m: max(shares(m)), note="dense models, 16 sockets"),
        _range("share of peak, least", f"{LOOPING} (secondary)", "%", 70, 100, 0.0, lambda m: min(shares(m)), note="“generally over 70”"),
        _value("share of peak, 8B", f"{LOOPING} (secondary)", "%", 78, 0.10, lambda m: attained(m["sn40l"], "llama-3.1-8b", 16, loops),
               note="the source's model has 32 layers"),
        _value("over DGX H100, best", LOOPING, "×", 3.7, 0.10, lambda m: max(over(m)), note="batch 1, 4k, models that fit 8 H100"),
        _value("8B on 16 sockets", f"{SN40L} table IV", "tok/s", 1042, 0.10, lambda m: _rate(m["sn40l"], "llama-3.1-8b", 16, loops, 8192),
               fits="sn40l.collective_latency", note="8k, taken as looped"),
        _value("calls a token, looped 8B", LOOPING, "calls", 4, 0.0, calls_8b),
    )  # fmt: skip


def _fits_8(machine: Machine, name: str) -> bool:
    return max_batch(Deployment(_model(name), machine, 8), 4096, limit=1) > 0


def _other_decode() -> tuple[Figure, ...]:
    fused, looped = Execution.FUSED, Execution.LOOPED
    sheet = "public decode sheet of 16 SN40L, MiniMax-M2.7 FP8 (secondary)"

    def minimax(machines: Machines, context: int) -> float:
        return 1e3 / _rate(machines["sn40l"], "minimax-m2", 16, looped, context)

    def h100(machines: Machines, sockets: int) -> float:
        return _rate(machines["dgx-h100"], "llama-3.1-8b", sockets, fused)

    layers = "without embedding, classifier and sampling"
    batch = "the notes name no batch; at 32 sequences the weights still bound the step and looping only removes its gaps"
    return (
        _value("R1 at batch 1", "DAC-62 talk (secondary)", "tok/s", 198, 0.10, lambda m: _rate(m["sn40l"], "deepseek-r1", 16, fused, 1024),
               fits="sn40l.launch", note="1k, two kernels a layer, not looped"),
        _value("MiniMax TPOT at 1k", sheet, "ms", 2.23, 0.10, lambda m: minimax(m, 1024), fits="sn40l.drain", note="taken as looped"),
        _value("MiniMax TPOT at 10k", sheet, "ms", 2.38, 0.10, lambda m: minimax(m, 10240)),
        _value("MiniMax TPOT at 100k", sheet, "ms", 4.31, 0.10, lambda m: minimax(m, 102400), fits="sn40l.stream_efficiency"),
        _value("8B on 8 H100", DATAFLOW, "tok/s", 300, 0.10, lambda m: h100(m, 8), fits="dgx-h100.drain", note="4k"),
        _value("8B, 4 → 8 H100", DATAFLOW, "×", 1.42, 0.05, lambda m: h100(m, 8) / h100(m, 4)),
        _value("8B on 8 H100, of peak", LOOPING, "%", 21, 0.05, lambda m: attained(m["dgx-h100"], "llama-3.1-8b", 8, fused)),
        _value("calls a token, 8B on H100", LOOPING, "calls", 320, 0.0,
               lambda m: float(_decode(m["dgx-h100"], "llama-3.1-8b", 8, fused).num_calls - 3), note=layers),
        _value("Qwen2.5-72B looping, large batch", DATAFLOW, "×", 2.0, 0.15, lambda m: _large_batch_gain(m["sn40l"]), miss=batch),
        _value("fused layer, of HBM peak", SN40L, "%", 85, 0.05, lambda m: 100 * _fused_layer_share(m["sn40l"]), note="8B on 8 sockets"),
    )  # fmt: skip


def _large_batch_gain(machine: Machine) -> float:
    seconds = [_decode(machine, "qwen2.5-72b", 16, execution, 32).seconds for execution in (Execution.FUSED, Execution.LOOPED)]
    return seconds[0] / seconds[1]


def _fused_layer_share(machine: Machine) -> float:
    step = _decode(machine, "llama-3.1-8b", 8, Execution.FUSED)
    layer = next(event.kernel for event in step.events if event.name == "layer")
    assert layer is not None
    return layer.hbm_bytes / layer.seconds(machine) / machine.hbm_bandwidth


def _orchestration() -> tuple[Figure, ...]:
    source, names = f"{SN40L} figures 10 and 11", ("llama-3.1-8b", "llama-3.1-70b")

    def seconds(machine: Machine, name: str, execution: Execution, host: bool, prefill: bool) -> float:
        deployment = Deployment(_model(name), machine, 8, execution, host_launched=host)
        return (prefill_step(deployment, Chunk(4096)) if prefill else decode_step(deployment, DecodeShape(1, 4096))).seconds

    def gains(machines: Machines, prefill: bool) -> list[float]:
        sn40l, fused = machines["sn40l"], Execution.FUSED
        return [seconds(sn40l, name, fused, True, prefill) / seconds(sn40l, name, fused, False, prefill) for name in names]

    def fusions(machines: Machines, prefill: bool) -> list[float]:
        sn40l, unfused, fused = machines["sn40l"], Execution.OPERATORS, Execution.FUSED
        return [seconds(sn40l, name, unfused, True, prefill) / seconds(sn40l, name, fused, True, prefill) for name in names]

    note = "8B and 70B on 8 sockets, 4k, batch 1"
    bound = (
        "at the compute efficiency that 46 s for 128k imply, a large model's prefill is bound by products, and spilling hides behind them"
    )
    centre = round(math.sqrt(1.4 * 8), 2)
    return (
        _value("orchestration at decode, mean", source, "×", centre, 0.10, lambda m: _geometric(gains(m, False)), fits="sn40l.host_launch",
               note="the geometric centre of 1.4 and 8"),
        _range("orchestration at decode, least", source, "×", 1.4, 8, 0.0, lambda m: min(gains(m, False)), note=note),
        _range("orchestration at decode, most", source, "×", 1.4, 8, 0.0, lambda m: max(gains(m, False)), note=note),
        _range("orchestration at prefill, most", source, "×", 1.0, 1.1, 0.0, lambda m: max(gains(m, True)), note=note),
        _range("fusion at decode, least", source, "×", 1, 13, 0.0, lambda m: min(fusions(m, False)), note=note),
        _range("fusion at decode, most", source, "×", 1, 13, 0.0, lambda m: max(fusions(m, False)), note=note),
        _range("fusion at prefill, least", source, "×", 1.5, 3, 0.0, lambda m: min(fusions(m, True)), note=note, miss=bound),
        _range("fusion at prefill, most", source, "×", 1.5, 3, 0.0, lambda m: max(fusions(m, True)), note=note),
    )  # fmt: skip


def _memory() -> tuple[Figure, ...]:
    def switch(machines: Machines) -> float:
        return 1e3 * _model("llama-3.1-8b").weight_bytes / (16 * machines["sn40l"].ddr_bandwidth)

    def fits_h100(machines: Machines) -> float:
        return float(max_batch(Deployment(_model("llama-3.1-405b"), machines["dgx-h100"], 8), 4096))

    bound = "“more than 100 GB/s” a socket is taken as 100"
    return (
        _value("8B switched in from DDR", "Hot Chips 2024", "ms", 10, 0.05, switch, note="16 sockets"),
        _value("DDR of 8 sockets over a DGX H100 host link", SN40L, "×", 15.5, 0.25,
               lambda m: 8 * m["sn40l"].ddr_bandwidth / m["dgx-h100"].ddr_bandwidth, note=bound),
        _value("405B sequences on a DGX H100", DATAFLOW, "slots", 0, 0.0, fits_h100, is_absolute=True, note="it does not fit in BF16"),
    )  # fmt: skip


def _geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def _bind(function: Callable[..., float], *arguments: object) -> Callable[[Machines], float]:
    """Return `function` with all arguments but the machines bound now rather than when a loop has gone on."""
    return lambda machines: function(machines, *arguments)
