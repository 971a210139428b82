"""DeepSeek-R1 on 16 sockets: SnapStream's tables 4 and 5, and times of whole prompts."""

from collections.abc import Callable, Mapping
from functools import partial

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Machines, Null, Value
from backends.sn40l.evidence.measures import (
    EXPERT_LAYER,
    MULTI_TOKEN,
    TABLE_5,
    Cell,
    drafted_prefill,
    expert_layer_shares,
    model_of,
    r1_prefill,
    table_5_batch,
    table_5_rate,
)

# Of the drafts that the source has for DeepSeek-R1, the one that it recommends for long prompts.
_DRAFT = "qwen3-4b"


def values() -> dict[str, Value]:
    """Return our values by the figures' names."""
    found: dict[str, Value] = {}
    for full, compressed in TABLE_5:
        found |= {f"{cell.label}: rate": partial(_rate, cell) for cell in (full, compressed)}
        found |= {f"{cell.label}: batch": partial(_batch, cell) for cell in (full, compressed)}
        found[_gain_key(full)] = partial(_gain, full, compressed)
    found |= {f"R1 prefill: {name}": partial(_share, name) for name in EXPERT_LAYER}
    return found | {
        "R1 prefill: SnapStream": lambda m: _overhead(m["sn40l"]),
        "R1 prefill of 128k": lambda m: r1_prefill(m["sn40l"], 131072).seconds,
        "R1 prompt of 128k, 32k kept": lambda m: drafted_prefill(m["sn40l"], _DRAFT, 131072, 32768),
        "R1 prompt of 128k, 16k kept": lambda m: drafted_prefill(m["sn40l"], _DRAFT, 131072, 16384),
    }


def nulls(published: Mapping[str, float]) -> dict[str, tuple[Null, ...]]:
    """Return what constants and lines through the fitted figures give."""
    steps = _null_steps(published)
    found: dict[str, tuple[Null, ...]] = {}
    for full, compressed in TABLE_5:
        for cell in (full, compressed):
            found[f"{cell.label}: rate"] = tuple(
                (name, MULTI_TOKEN * cell.batch / step(cell.batch)) for name, step in steps
            )
        found[_gain_key(full)] = tuple(
            (name, compressed.batch / step(compressed.batch) / (full.batch / step(full.batch)))
            for name, step in steps
        )
    whole = published["R1 prefill of 128k"]
    for kept in (32, 16):
        share = kept / 128
        found[f"R1 prompt of 128k, {kept}k kept"] = (
            ("the rate of 128k", whole * share),
            ("the square of 128k", whole * share**2),
        )
    return found | _null_shares(published)


def _gain_key(full: Cell) -> str:
    return f"{full.label.removesuffix(' full')}: gain"


def _rate(cell: Cell, machines: Machines) -> float:
    return table_5_rate(machines["sn40l"], cell.batch, cell.entries)


def _batch(cell: Cell, machines: Machines) -> float:
    return float(table_5_batch(machines["sn40l"], cell.entries))


def _gain(full: Cell, compressed: Cell, machines: Machines) -> float:
    return _rate(compressed, machines) / _rate(full, machines)


def _share(name: str, machines: Machines) -> float:
    return expert_layer_shares(machines["sn40l"])[name]


def _overhead(machine: Machine) -> float:
    shares = expert_layer_shares(machine)
    return 100 * (shares["selection"] + shares["ring"]) / (100 - shares["selection"] - shares["ring"])


def _null_shares(published: Mapping[str, float]) -> dict[str, tuple[Null, ...]]:
    """Return the shares of an expert layer's products that their numbers of weights alone give."""
    layer, _ = model_of("deepseek-r1").kinds[-1]
    attention, experts = layer.attention, layer.experts
    assert experts is not None
    start, end = (published[f"R1 prefill: {name}"] for name in ("output", "experts"))
    fewest = attention.output_params
    slope = (end - start) / (layer.ffn_params + experts.num_chosen * experts.expert_params - fewest)
    params = {"projections": attention.input_params, "router": experts.router_params}
    return {
        f"R1 prefill: {name}": (("the line through output and experts", start + slope * (count - fewest)),)
        for name, count in params.items()
    }


def _null_steps(published: Mapping[str, float]) -> tuple[tuple[str, Callable[[int], float]], ...]:
    """Return the seconds of a step of table 5 over its batch: a constant, and lines through fitted cells."""
    (first, second) = (TABLE_5[0][0], TABLE_5[0][1])
    start, end = (MULTI_TOKEN * cell.batch / published[f"{cell.label}: rate"] for cell in (first, second))

    def line(over: Callable[[float], float]) -> Callable[[int], float]:
        slope = (end - start) / (over(second.batch) - over(first.batch))
        return lambda batch: end + slope * (over(batch) - over(second.batch))

    return (
        ("a constant step", lambda _: end),
        ("a line over the batch", line(lambda batch: batch)),
        ("a line over 1 / batch", line(lambda batch: 1 / batch)),
    )
