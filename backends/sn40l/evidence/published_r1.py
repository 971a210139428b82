"""Published figures of DeepSeek-R1 on 16 sockets: SnapStream's tables 4 and 5, and times of whole prompts."""

from collections.abc import Callable

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Figure, Null, bind, span, value
from backends.sn40l.evidence.measures import (
    MULTI_TOKEN,
    TABLE_5,
    drafted_prefill,
    expert_layer_shares,
    r1_prefill,
    table_5_batch,
    table_5_rate,
)

SNAPSTREAM = "arXiv 2511.03092"


def decode_figures() -> tuple[Figure, ...]:
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
            compute = bind(lambda m, b, c: table_5_rate(m["sn40l"], b, c), size, entries)
            nulls = tuple((name, MULTI_TOKEN * size / step(size)) for name, step in _NULL_STEPS)
            figures.append(
                value(
                    f"{label}: rate",
                    source,
                    "tok/s",
                    published,
                    0.10,
                    compute,
                    fits=fits,
                    note=note,
                    nulls=nulls,
                )
            )
            figures.append(
                value(
                    f"{label}: batch",
                    source,
                    "slots",
                    size,
                    0.0,
                    bind(lambda m, c: float(table_5_batch(m["sn40l"], c)), entries),
                )
            )
        gain = bind(
            lambda m, b, c, fb, p: table_5_rate(m["sn40l"], b, c) / table_5_rate(m["sn40l"], fb, p),
            batch,
            cache,
            full_batch,
            prompt,
        )
        nulls = tuple(
            (name, batch / step(batch) / (full_batch / step(full_batch))) for name, step in _NULL_STEPS
        )
        figures.append(
            value(f"{column}: gain", source, "×", round(rate / full_rate, 2), 0.05, gain, nulls=nulls)
        )
    return tuple(figures)


def _line(over: Callable[[float], float]) -> Callable[[int], float]:
    """Return the seconds of a step of table 5 as a line over `over(batch)`, through the two fitted cells."""
    (first, first_rate), (second, second_rate) = (16, 434), (64, 1832)
    start, end = MULTI_TOKEN * first / first_rate, MULTI_TOKEN * second / second_rate
    slope = (end - start) / (over(second) - over(first))
    return lambda batch: end + slope * (over(batch) - over(second))


_NULL_STEPS: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("a constant step", lambda _: MULTI_TOKEN * 64 / 1832),
    ("a line over the batch", _line(lambda batch: batch)),
    ("a line over 1 / batch", _line(lambda batch: 1 / batch)),
)


def prefill_figures() -> tuple[Figure, ...]:
    source = f"{SNAPSTREAM} table 4"
    ttft_source = "arXiv 2603.02631 (secondary)"
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
        value(
            f"R1 prefill: {name}",
            source,
            "%",
            published,
            0.5,
            bind(lambda m, n: expert_layer_shares(m["sn40l"])[n], name),
            fits=fits,
            is_absolute=True,
            note="tolerance in points",
        )
        for name, published, fits in shares
    ]
    miss = (
        f"the source names no draft; {_DRAFT} reads 128k at the low efficiencies that 46 s imply, and R1 "
        "alone takes 2.4 s for 16k and 5.6 s for 32k"
    )
    return (
        *rows,
        span("R1 prefill: SnapStream", SNAPSTREAM, "%", 2, 5, 0.0, lambda m: _overhead(m["sn40l"])),
        value(
            "R1 prefill of 128k",
            ttft_source,
            "s",
            46,
            0.10,
            lambda m: r1_prefill(m["sn40l"], 131072).seconds,
            fits="sn40l.prefill_attention_efficiency",
        ),
        value(
            "R1 prompt of 128k, 32k kept",
            ttft_source,
            "s",
            4.3,
            0.10,
            lambda m: drafted_prefill(m["sn40l"], _DRAFT, 131072, 32768),
            note="draft included",
            miss=miss,
            nulls=_null_seconds(32768),
        ),
        value(
            "R1 prompt of 128k, 16k kept",
            ttft_source,
            "s",
            2.5,
            0.20,
            lambda m: drafted_prefill(m["sn40l"], _DRAFT, 131072, 16384),
            note="draft included",
            miss=miss,
            nulls=_null_seconds(16384),
        ),
    )


# Of the drafts that the source has for DeepSeek-R1, the one that it recommends for long prompts.
_DRAFT = "qwen3-4b"


def _null_seconds(num_tokens: int) -> tuple[Null, ...]:
    """Return the time of a prompt as a multiple and as a square of the fitted 46 s for 128k."""
    share = num_tokens / 131072
    return ("the rate of 128k", 46 * share), ("the square of 128k", 46 * share**2)


def _overhead(machine: Machine) -> float:
    shares = expert_layer_shares(machine)
    return 100 * (shares["selection"] + shares["ring"]) / (100 - shares["selection"] - shares["ring"])
