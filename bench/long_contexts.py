"""What long contexts cost to decode in slots that hold them whole, and in SnapStream slots that are some times smaller.

- the same cache memory: so many times more contexts, in tokens a second (SnapStream, arXiv 2511.03092, reports 4.2 to 4.3 times for four
  times smaller slots);
- the same number of contexts: the attention's part of a step, which is what the step takes beyond one whose sequences hold one token.

All steps are timed in turns, in every round together with the memory's rate; figures are medians over rounds, ratios medians of the
rounds' ratios. Slots hold zeros, on whose values no time depends. `bench.gpu` measures the first on a GPU.

Usage: `GOMP_SPINCOUNT=5000 python -m bench.long_contexts MODEL_DIR [--context 8192] [--full-slots 4] [--compression 4] [--rounds 9]
[--json FILE] [--plot FILE]`.
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

Times = Sequence[tuple[float, float]]  # seconds of a step, and of the attention in it, a round each


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of one policy for contexts that fill them: how many there are, and the cache entries of each."""

    policy: PolicyOptions
    num_slots: int
    entries: int


def same_memory(context: int, full_slots: int, compression: int) -> dict[str, Slots]:
    """Return slots that hold contexts of so many tokens whole, and `compression` times smaller ones that take the same memory."""
    small = context // compression
    return {
        "full": Slots(PolicyOptions(PolicyName.FULL), full_slots, context),
        SMALL_SLOTS: Slots(PolicyOptions(slot_capacity=small), full_slots * compression, small),
    }


def cache_bytes(backend: TorchBackend) -> int:
    """Return what a backend's slots take."""
    return sum(layer.slots.num_bytes for layer in backend.pools[0].cache.layers)


@dataclass(frozen=True, slots=True)
class Case:
    """Contexts of so many tokens in a backend's slots, of each of which `entries` are in use."""

    backend: TorchBackend
    num_rows: int
    entries: int
    context: int

    def time(self) -> tuple[float, float]:
        """Return the seconds of a step, and of the attention in it: those that a step of sequences of one token does not take."""
        of_contexts = decode_batch(self.num_rows, self.context, num_prompt_tokens=self.context - 1)
        seconds, others = (
            run(self.backend, [batch] * LAUNCHES) / LAUNCHES
            for batch in (of_contexts, decode_batch(self.num_rows, 1))
        )
        return seconds, seconds - others


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
    """Return the figures as the JSON document has them."""
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
    for number in range(rounds + 1):
        bandwidths.append(
            measure_machine(plane.device, plane.dtype, BUFFER_BYTES, (1024,), seconds=0.1).bandwidth
        )
        for name in sorted(cases, reverse=number % 2 == 1):
            times[name].append(cases[name].time())
        print(f"round {number} of {rounds}", file=sys.stderr)  # the first one warms up, and does not count
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
    more = cases[SMALL_SLOTS].num_rows / cases["full"].num_rows
    figures["ratio"] = more * _ratio(times["full"], times[SMALL_SLOTS], lambda of: of[0])
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
        f"tokens/s from the same memory {document['ratio']:.2f} ×, attention of as many contexts 1 / {document['attention_ratio']:.2f}"
    )
    return "\n".join(lines)


def draw_rates(axes: Any, rows: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw tokens a second, and the share of the memory bandwidth, into a matplotlib Axes."""
    drawn = axes.bar(list(rows), [row["tokens_per_second"] for row in rows.values()])
    axes.bar_label(drawn, [f"{row['bandwidth_share']:.0%} of bandwidth" for row in rows.values()], fontsize=8)
    axes.set(title=title, ylabel="tokens/s")


def held_rows(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of the two kinds of slots by what they hold, as far as they were measured."""
    return {
        f"{name}\n{document[name]['sequences']} contexts": document[name]
        for name in ("full", SMALL_SLOTS)
        if name in document
    }


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Draw the throughput of the same memory, and the parts of a step of the same number of contexts."""
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
    parser.add_argument("--full-slots", type=int, default=4, help="contexts held whole")
    parser.add_argument(
        "--compression", type=int, default=4, help="how many times smaller SnapStream's slots are"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--no-compile", dest="is_compiled", action="store_false", help="leave the steps uncompiled"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--plot", type=Path, help="file for the picture, its ending says which kind; needs matplotlib"
    )
    options = vars(parser.parse_args(arguments))
    targets = options.pop("json"), options.pop("plot")
    document = measure(**options)
    print(_table(document))
    if targets[0] is not None:
        targets[0].write_text(json.dumps(document, indent=2) + "\n")
    if targets[1] is not None:
        plot(document, targets[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
