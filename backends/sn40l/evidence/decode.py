"""Decode at small batches: what a token costs, kernel looping, other machines, and a sweep of vLLM."""

import statistics
from collections.abc import Mapping

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Machines, Null, Value
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

_GIB = 2**30
_CONTEXT = 4096
_FUSED = Execution.FUSED
_LOOPED = Execution.LOOPED
_8B = "llama-3.1-8b"


def values() -> dict[str, Value]:
    """Return our values by the figures' names."""
    return {
        "8B weights": lambda _: model_of(_8B).weight_bytes / _GIB,
        "8B cache at 4k": lambda _: model_of(_8B).cache_bytes(_CONTEXT) / _GIB,
        "8B bytes a token": lambda _: token_bytes(model_of(_8B), _CONTEXT) / _GIB,
        "8B operations a token": lambda _: _gigaflop(),
        "8B intensity": lambda _: _gigaflop() / (token_bytes(model_of(_8B), _CONTEXT) / _GIB),
        "looping, best": lambda m: max(_gains(m)),
        "looping, mean": lambda m: statistics.geometric_mean(_gains(m)),
        "looping, 8B": lambda m: looping_gain(m["sn40l"], _8B),
        "8 → 16 sockets, best": lambda m: max(_scaling(m["sn40l"])),
        "share of peak, best": lambda m: max(_shares(m)),
        "share of peak, least": lambda m: min(_shares(m)),
        "share of peak, typical": lambda m: statistics.median(_shares(m)),
        "share of peak, 8B": lambda m: attained(m["sn40l"], _8B, 16, _LOOPED),
        "over DGX H100, best": lambda m: max(_over_h100(m)),
        "8B on 16 sockets": lambda m: rate_of(m["sn40l"], _8B, 16, _LOOPED, 8192),
        "calls a token, looped 8B": lambda m: float(decode_of(m["sn40l"], _8B, 16, _LOOPED).num_calls),
        "R1 at batch 1": lambda m: rate_of(m["sn40l"], "deepseek-r1", 16, _FUSED, 1024),
        "MiniMax TPOT at 1k": lambda m: _minimax(m, 1024),
        "MiniMax TPOT at 10k": lambda m: _minimax(m, 10240),
        "MiniMax TPOT at 100k": lambda m: _minimax(m, 102400),
        "8B on 8 H100": lambda m: _on_h100(m, 8),
        "8B, 4 → 8 H100": lambda m: _on_h100(m, 8) / _on_h100(m, 4),
        "8B on 8 H100, of peak": lambda m: attained(m["dgx-h100"], _8B, 8, _FUSED),
        # Without embedding, classifier and sampling.
        "calls a token, 8B on H100": lambda m: float(decode_of(m["dgx-h100"], _8B, 8, _FUSED).num_calls - 3),
        "Qwen2.5-72B looping, large batch": lambda m: _large_batch_gain(m["sn40l"]),
        "fused layer, of HBM peak": lambda m: 100 * _fused_layer_share(m["sn40l"]),
        "8B on an A100, one request": lambda m: _concurrent_rate(m, 1),
        "8B on an A100, 8 requests over one": lambda m: _concurrent_rate(m, 8) / _concurrent_rate(m, 1),
    }


def nulls(published: Mapping[str, float]) -> dict[str, tuple[Null, ...]]:
    """Return what lines through fitted figures give."""
    start, end = (published[f"MiniMax TPOT at {context}"] for context in ("1k", "100k"))
    return {
        "MiniMax TPOT at 10k": (("the line through 1k and 100k", start + (end - start) * 9 / 99),),
    }


def _gigaflop() -> float:
    model = model_of(_8B)
    return (model.decode_operations(_CONTEXT) + 2 * model.embedding_params) / 1e9


def _gains(machines: Machines) -> list[float]:
    return [looping_gain(machines["sn40l"], name) for name in LISTED_MODELS]


def _shares(machines: Machines) -> list[float]:
    return [attained(machines["sn40l"], name, 16, _LOOPED) for name in DENSE_MODELS]


def _over_h100(machines: Machines) -> list[float]:
    names = (_8B, "llama-3.1-70b", "qwen2.5-7b", "qwen2.5-72b", "mixtral-8x7b")
    sn40l, h100 = machines["sn40l"], machines["dgx-h100"]
    return [rate_of(sn40l, name, 16, _LOOPED) / rate_of(h100, name, 8, _FUSED) for name in names]


def _scaling(machine: Machine) -> list[float]:
    names = [
        name
        for name in LISTED_MODELS
        if max_batch(Deployment(model_of(name), machine, 8), DecodeShape(1, _CONTEXT), limit=1) > 0
    ]
    return [rate_of(machine, name, 16, _LOOPED) / rate_of(machine, name, 8, _FUSED) for name in names]


def _minimax(machines: Machines, context: int) -> float:
    return 1e3 / rate_of(machines["sn40l"], "minimax-m2", 16, _LOOPED, context)


def _on_h100(machines: Machines, sockets: int) -> float:
    return rate_of(machines["dgx-h100"], _8B, sockets, _FUSED)


def _concurrent_rate(machines: Machines, concurrency: int) -> float:
    """Return tokens/s of requests of 1,024 tokens in and 128 out, so many at a time."""
    deployment = Deployment(model_of(_8B), machines["a100"], 1)
    step = decode_seconds(deployment, DecodeShape(concurrency, 1024 + 64))
    return concurrency * 128 / (concurrency * prefill_seconds(deployment, Chunk(1024)) + 127 * step)


def _large_batch_gain(machine: Machine) -> float:
    fused, looped = (seconds_of(machine, "qwen2.5-72b", 16, how, 32) for how in (_FUSED, _LOOPED))
    return fused / looped


def _fused_layer_share(machine: Machine) -> float:
    step = decode_of(machine, _8B, 8, _FUSED)
    layer = next(event.kernel for event in step.events if event.name == "layer")
    assert layer is not None
    return layer.hbm_bytes / layer.seconds(machine) / machine.hbm_bandwidth
