"""Time the decode of long contexts in full slots and in smaller SnapStream slots.

- The same cache memory: it holds more contexts in smaller slots, at more tokens per second in all.
  (SnapStream, arXiv 2511.03092, reports 4.2 to 4.3 times for four times smaller slots.)
- The same number of contexts: the attention's part of a step. It is the difference to a step whose sequences
  hold one token.

All steps are timed in turns, and each round also measures the memory bandwidth. Figures are medians over
rounds, and ratios are medians of the rounds' ratios. Slots hold zeros; no time depends on their values.
`bench.gpu` measures the first on a GPU.

Usage: `GOMP_SPINCOUNT=5000 python -m bench.long_contexts MODEL_DIR [--context 8192] [--full-slots 4]
[--compression 4] [--rounds 9] [--json FILE] [--plot FILE]`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from bench.decode import BUFFER_BYTES, decode_batch, run
from bench.floor import measure_machine, work_of
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions

LAUNCHES = 10  # of a round
SMALL_SLOTS = "snapstream"
SAME_NUMBER = "snapstream, same number"

Times = Sequence[tuple[float, float]]  # for each round, seconds of a step and of its attention


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of one policy, with `entries` cache entries each, for contexts that fill them."""

    policy: PolicyOptions
    num_slots: int
    entries: int


def same_memory(context: int, full_slots: int, compression: int) -> dict[str, Slots]:
    """Return slots that hold all of a context, and `compression` times smaller ones of the same memory."""
    small = context // compression
    return {
        "full": Slots(PolicyOptions(PolicyName.FULL), full_slots, context),
        SMALL_SLOTS: Slots(PolicyOptions(slot_capacity=small), full_slots * compression, small),
    }


def cache_bytes(backend: TorchBackend) -> int:
    """Return the bytes of a backend's slots."""
    return sum(layer.slots.num_bytes for layer in backend.pools[0].cache.layers)


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of `context` tokens in a backend's slots, with `entries` live entries in each slot."""

    backend: TorchBackend
    num_rows: int
    entries: int
    context: int

    def time(self) -> tuple[float, float]:
        """Return the seconds of a step, and of its attention: the difference to sequences of one token."""
        full = decode_batch(self.num_rows, self.context, num_prompt_tokens=self.context - 1)
        empty = decode_batch(self.num_rows, 1)
        seconds = run(self.backend, [full] * LAUNCHES) / LAUNCHES
        without_attention = run(self.backend, [empty] * LAUNCHES) / LAUNCHES
        return seconds, seconds - without_attention


def measure(
    model: str,
    dtype: DtypeName,
    context: int,
    full_slots: int,
    compression: int,
    rounds: int,
    *,
    is_compiled: bool = True,
) -> dict[str, Any]:
    """Return the figures in the form of the JSON document."""
    kinds = same_memory(context, full_slots, compression)
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for name, slots in kinds.items():
            pools = (PoolOptions(slots.num_slots, slots.policy),)
            config = TorchBackendConfig(
                model,
                device=DeviceName.CPU,
                dtype=dtype,
                pools=pools,
                max_model_len=context,
                num_scratch=1,
                compile=is_compiled,
            )
            cases[name] = Case(
                stack.enter_context(closing(_ready(config))), slots.num_slots, slots.entries, context
            )
        cases[SAME_NUMBER] = Case(cases[SMALL_SLOTS].backend, full_slots, kinds[SMALL_SLOTS].entries, context)
        return {"model": model, "context": context, "compression": compression} | _figures(
            model, cases, rounds
        )


def _ready(config: TorchBackendConfig) -> TorchBackend:
    backend = TorchBackend(config)
    backend.warmup()
    if backend.compiled is not None:
        backend.compiled.wait()
    return backend


def _figures(model: str, cases: Mapping[str, Case], rounds: int) -> dict[str, Any]:
    plane = cases["full"].backend.pools[0].cache.layers[0].slots.planes[0]
    work = work_of(AutoConfig.from_pretrained(model), plane.element_size())
    bandwidths: list[float] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        bandwidths.append(
            measure_machine(plane.device, plane.dtype, BUFFER_BYTES, (1024,), seconds=0.1).bandwidth
        )
        for name in sorted(cases, reverse=index % 2 == 1):
            times[name].append(cases[name].time())
        print(f"round {index} of {rounds}", file=sys.stderr)  # round 0 warms up and is not counted
    figures: dict[str, Any] = {
        "dtype": str(plane.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
    }
    for name, case in cases.items():
        seconds, attention = (statistics.median(values) for values in zip(*times[name][1:], strict=True))
        num_bytes = work.decode_bytes(case.num_rows, case.entries)
        figures[name] = {
            "sequences": case.num_rows,
            "entries": case.entries,
            "cache_bytes": cache_bytes(case.backend) * case.num_rows // case.backend.spec.pools[0].num_slots,
            "seconds": seconds,
            "attention_seconds": attention,
            "tokens_per_second": case.num_rows / seconds,
            "bandwidth_share": statistics.median(
                num_bytes / of[0] / rate for of, rate in zip(times[name][1:], bandwidths[1:], strict=True)
            ),
        }
    num_more = cases[SMALL_SLOTS].num_rows / cases["full"].num_rows
    figures["ratio"] = num_more * _ratio(times["full"], times[SMALL_SLOTS], lambda of: of[0])
    figures["attention_ratio"] = _ratio(times["full"], times[SAME_NUMBER], lambda of: of[1])
    return figures


def _ratio(one: Times, other: Times, part: Callable[[tuple[float, float]], float]) -> float:
    return statistics.median(
        part(first) / part(second) for first, second in zip(one[1:], other[1:], strict=True)
    )


def _table(document: Mapping[str, Any]) -> str:
    lines = ["| slots | step (ms) | attention (ms) | tokens/s | of the bandwidth |", "|---|---|---|---|---|"]
    for row in (document[name] for name in ("full", SMALL_SLOTS, SAME_NUMBER)):
        name = f"{row['sequences']} × {row['entries']} entries, {row['cache_bytes'] / 1e6:.0f} MB"
        times = f"{1e3 * row['seconds']:.2f} | {1e3 * row['attention_seconds']:.2f}"
        lines.append(f"| {name} | {times} | {row['tokens_per_second']:.0f} | {row['bandwidth_share']:.0%} |")
    lines.append(f"\ncontexts of {document['context']} tokens, {document['compression']} × smaller slots:")
    lines.append(
        f"tokens/s from the same memory {document['ratio']:.2f} ×, "
        f"attention of the same number of contexts 1 / {document['attention_ratio']:.2f}"
    )
    return "\n".join(lines)


def draw_rates(axes: Any, rows: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw tokens per second, labelled with the share of the memory bandwidth, into a matplotlib Axes."""
    drawn = axes.bar(list(rows), [row["tokens_per_second"] for row in rows.values()])
    axes.bar_label(drawn, [f"{row['bandwidth_share']:.0%} of bandwidth" for row in rows.values()], fontsize=8)
    axes.set(title=title, ylabel="tokens/s")


def held_rows(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the measured rows of full and small slots, by the number of contexts that they hold."""
    return {
        f"{name}\n{document[name]['sequences']} contexts": document[name]
        for name in ("full", SMALL_SLOTS)
        if name in document
    }


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the throughput of the same memory, and the parts of a step for the same number of contexts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_rates(left, held_rows(document), f"the same cache memory: {document['ratio']:.2f} ×")
    rows = {f"{name}\n{document[name]['entries']} entries": document[name] for name in ("full", SAME_NUMBER)}
    attention = [1e3 * row["attention_seconds"] for row in rows.values()]
    others = [1e3 * row["seconds"] - part for row, part in zip(rows.values(), attention, strict=True)]
    right.bar(list(rows), others, label="everything else")
    right.bar(list(rows), attention, bottom=others, label=f"attention: 1 / {document['attention_ratio']:.2f}")
    right.set(title=f"a step of {document['full']['sequences']} contexts", ylabel="ms")
    right.legend()
    figure.suptitle(
        f"contexts of {document['context']} tokens, {document['num_threads']} threads, {document['dtype']}"
    )
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--dtype", type=DtypeName, default=DtypeName.AUTO, choices=tuple(DtypeName))
    parser.add_argument("--context", type=int, default=8192, help="tokens of a context")
    parser.add_argument("--full-slots", type=int, default=4, help="slots that hold all of a context")
    parser.add_argument(
        "--compression", type=int, default=4, help="factor by which SnapStream's slots are smaller"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--no-compile", dest="is_compiled", action="store_false", help="do not compile the steps"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--plot", type=Path, help="file for the plot, whose suffix is its format; needs matplotlib"
    )
    options = vars(parser.parse_args(arguments))
    json_path = options.pop("json")
    plot_path = options.pop("plot")
    document = measure(**options)
    print(_table(document))
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    if plot_path is not None:
        plot(document, plot_path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
