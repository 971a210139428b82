"""Time the torch backend's decode and prefill steps against the machine's floors, without a scheduler.

Figures are medians over rounds. Each round also measures the memory bandwidth, because on a shared machine
only ratios from the same moment are meaningful. Slots hold zeros, since no time depends on their values; only
stores of policy sparse hold random tokens. Rows of a decode step read different tokens, so they choose their
own experts. The backend has the options of `snapserve serve`. With several pools, decode steps of the others
are timed in turns with those of the first. With `--compare-int8`, a second
pool has the first one's slots in 8 bits.

Usage: `GOMP_SPINCOUNT=5000 python -m bench.decode --model DIR [--decode 8x256 1x256 4x2048] [--prefill 128x8
2048x1 8192x1] [--temperature 1 --top-p 0.9] [--rounds 7] [--json FILE]`.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from backends.interface import Batch, DecodeBatch, DecodeRow, Draw, PrefillBatch, PrefillRow, SamplingParams
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import Quantization, TorchBackendConfig
from backends.torch_backend.native.kernels import BLOCK, GROUP, GROUP_BYTES
from bench.floor import (
    Floors,
    Machine,
    Work,
    decode_floors,
    measure_machine,
    prefill_floors,
    synchronise,
    work_of,
)
from cache.pool_options import KVCacheDtype
from server.options.command_line import OptionError
from server.options.serve import add_serve_options, read_config

Pair = tuple[int, int]
Launch = tuple[int, int, int]  # rows, entries, steps
Timed = tuple[float, Floors]  # seconds of a step or of prompts, and their floors

GREEDY = Draw(SamplingParams(temperature=0.0))
# Of the weights of linear layers and experts, and of the output layer.
_BYTES_PER_WEIGHTS = {
    Quantization.INT8: (1, 1),
    Quantization.W8A8: (1, 1),
    Quantization.INT4: (GROUP_BYTES / (GROUP * BLOCK), 1),
}
BUFFER_BYTES = 2**28  # much larger than any cache, and fast to sum


def decode_batch(
    num_rows: int,
    num_tokens: int,
    num_steps: int = 1,
    num_prompt_tokens: int = 1,
    draw: Draw = GREEDY,
    pool: int = 0,
) -> DecodeBatch:
    """Return a launch of `num_rows` sequences that hold `num_tokens` tokens at its end."""
    rows = tuple(
        DecodeRow(f"row {slot}", slot, 7 + slot, num_tokens - num_steps, num_prompt_tokens, draw)
        for slot in range(num_rows)
    )
    return DecodeBatch(rows, num_steps, pool=pool)


def prefill_batches(backend: TorchBackend, num_tokens: int, num_prompts: int) -> list[PrefillBatch]:
    """Return the batches with which the scheduler would read the prompts.

    Short prompts share a batch. A long prompt is read in the largest chunks.
    """
    pool = backend.spec.pools[0]
    shapes = backend.spec.prefill_shapes
    is_direct = num_tokens <= pool.max_direct_tokens
    if not is_direct or num_tokens > shapes[-1].num_tokens:
        return [
            batch
            for slot in range(num_prompts)
            for batch in _chunks(backend, num_tokens, slot, None if is_direct else 0)
        ]
    shape = min(  # the fewest steps, and of these the least padding
        (shape for shape in shapes if shape.num_tokens >= num_tokens),
        key=lambda shape: (math.ceil(num_prompts / shape.num_rows), shape.num_rows * shape.num_tokens),
    )
    prompt = _prompt(backend, num_tokens)
    rows = [
        PrefillRow(f"prompt {slot}", prompt, 0, num_tokens, (slot,), draws=(GREEDY,))
        for slot in range(num_prompts)
    ]
    return [
        PrefillBatch(tuple(rows[first : first + shape.num_rows]), shape)
        for first in range(0, num_prompts, shape.num_rows)
    ]


def _chunks(backend: TorchBackend, num_tokens: int, slot: int, scratch: int | None) -> list[PrefillBatch]:
    shape = backend.spec.prefill_shapes[-1]
    prompt = _prompt(backend, num_tokens)
    batches = []
    for start in range(0, num_tokens, shape.num_tokens):
        chunk = prompt[start : start + shape.num_tokens]
        draws = (GREEDY,) if start + len(chunk) == num_tokens else ()
        batches.append(
            PrefillBatch((PrefillRow("prompt", chunk, start, num_tokens, (slot,), scratch, draws),), shape)
        )
    return batches


def _prompt(backend: TorchBackend, num_tokens: int) -> tuple[int, ...]:
    return tuple(7 + index % (backend.spec.vocab_size - 7) for index in range(num_tokens))


def run(backend: TorchBackend, batches: Sequence[Batch]) -> float:
    """Return the seconds that the batches take, including the host's work."""
    start = time.perf_counter()
    for batch in batches:
        backend.submit(batch).result()
    return time.perf_counter() - start


class ScoringClock:
    """Sums the seconds that layers spend on the window's votes and on packing, by wrapping the two methods.

    It waits for the GPU before and after each call. Only a prompt's last chunks call the methods.
    """

    def __init__(self, backend: TorchBackend) -> None:
        self.seconds = 0.0
        self._device = backend.pools[0].device
        for layer in backend.pools[0].cache.layers:
            for name in ("observe", "pack"):
                setattr(layer, name, self._timed(getattr(layer, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            synchronise(self._device)
            start = time.perf_counter()
            method(*arguments)
            synchronise(self._device)
            self.seconds += time.perf_counter() - start

        return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 for invalid options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--decode",
        type=_pair,
        nargs="+",
        default=[(8, 256), (1, 256), (4, 2048)],
        help="sequences × entries of each sequence",
    )
    parser.add_argument(
        "--prefill", type=_pair, nargs="+", default=[(128, 8), (2048, 1), (8192, 1)], help="tokens × prompts"
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=4,
        help="decode steps of a launch; launches of one step are timed too",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of the decode steps' draws")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the decode steps' draws")
    parser.add_argument("--compare-int8", action="store_true", help="time slots in 8 bits too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    add_serve_options(parser)
    parsed = parser.parse_args(arguments)
    try:
        config = read_config(parsed, os.environ).backend.config
        if not isinstance(config, TorchBackendConfig):
            raise OptionError("--backend: expected torch, whose steps are timed")
    except OptionError as error:
        print(f"bench.decode: {error}", file=sys.stderr)
        return 2
    draw = Draw(SamplingParams(temperature=parsed.temperature, top_p=parsed.top_p))
    document = measure(
        config,
        parsed.decode,
        parsed.prefill,
        parsed.rounds,
        parsed.num_steps,
        draw,
        compares_int8=parsed.compare_int8,
    )
    print(_table(document))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def measure(
    config: TorchBackendConfig,
    decode: Sequence[Pair],
    prefill: Sequence[Pair],
    rounds: int,
    num_steps: int,
    draw: Draw = GREEDY,
    *,
    compares_int8: bool = False,
) -> dict[str, Any]:
    """Return the figures in the form of the JSON document."""
    first, *others = config.pools
    if compares_int8:
        others = [replace(first, name="int8", kv_cache_dtype=KVCacheDtype.INT8)]
    most_rows = max(*(rows for rows, _ in decode), *(prompts for _, prompts in prefill))
    pools = tuple(replace(each, num_slots=max(each.num_slots, most_rows)) for each in (first, *others))
    backend = TorchBackend(replace(config, pools=pools))
    try:
        start = time.perf_counter()
        backend.warmup()
        seconds_to_warm = time.perf_counter() - start
        if backend.compiled is not None:
            backend.compiled.wait()
        _fill_stores(backend)
        launches = [(*case, steps) for case in decode for steps in sorted({1, num_steps})]
        steps: dict[Launch, Sequence[Batch]] = {
            launch: [decode_batch(*launch, draw=draw)] * 5 for launch in launches
        }
        compared: dict[str, dict[Launch, Sequence[Batch]]] = {
            pool.spec.name: {
                launch: [decode_batch(*launch, draw=draw, pool=index)] * 5 for launch in launches
            }
            for index, pool in enumerate(backend.pools)
            if index > 0
        }
        reads: dict[Pair, Sequence[Batch]] = {case: prefill_batches(backend, *case) for case in prefill}
        return _figures(backend, config, _Cases(steps, compared, reads), rounds) | {
            "temperature": draw.sampling.temperature,
            "top_p": draw.sampling.top_p,
            "seconds_to_warm": seconds_to_warm,
            "compiled": None if backend.compiled is None else asdict(backend.compiled.times),
        }
    finally:
        backend.close()


def _fill_stores(backend: TorchBackend) -> None:
    """Fill stores with random tokens: equal ones would all be as good as the best, and all be compared."""
    for pool in backend.pools:
        for layer in pool.cache.layers:
            if layer.slots.store is not None:
                for plane in layer.slots.store.planes:  # codes, steps and centres
                    plane.fill_(0.25) if plane.is_floating_point() else plane.random_(256)


@dataclass(frozen=True, slots=True)
class _Cases:
    """The batches of each case: decode in the first pool, decode in the others by name, and prefill."""

    decode: Mapping[Launch, Sequence[Batch]]
    compared: Mapping[str, Mapping[Launch, Sequence[Batch]]]
    prefill: Mapping[Pair, Sequence[Batch]]


@dataclass(frozen=True, slots=True)
class _Times:
    """What the rounds took, by case."""

    machines: list[Machine] = field(default_factory=list)
    steps: dict[Launch, list[Timed]] = field(default_factory=lambda: defaultdict(list))
    shares: dict[tuple[str, Launch], list[float]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[Pair, list[Timed]] = field(default_factory=lambda: defaultdict(list))
    scoring_shares: dict[Pair, list[float]] = field(default_factory=lambda: defaultdict(list))


def _figures(backend: TorchBackend, config: TorchBackendConfig, cases: _Cases, rounds: int) -> dict[str, Any]:
    attending = next(layer for layer in backend.pools[0].cache.layers if layer.holds_entries)
    dtype = attending.scratch.planes[0].dtype  # the model's
    work = counted_work(backend, config, dtype)
    times = _time(backend, cases, work, dtype, attending.slots.layout.capacity, rounds)
    return {
        "model": config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "num_threads": torch.get_num_threads(),
        "pools": [pool.spec.name for pool in backend.pools],
        "slot_bytes": [pool.spec.slot_bytes for pool in backend.pools],
        "bandwidth": statistics.median(machine.bandwidth for machine in times.machines),
        "matrix_rate": statistics.median(machine.matrix_rate for machine in times.machines),
        "decode": [_decode_row(times, launch, list(cases.compared)) for launch in cases.decode],
        "prefill": [_prefill_row(times, case) for case in cases.prefill],
    }


def counted_work(backend: TorchBackend, config: TorchBackendConfig, dtype: torch.dtype) -> Work:
    """Return the work of the backend's model, with its recurrent states."""
    bytes_per_weights = _BYTES_PER_WEIGHTS.get(config.quantization)
    work = work_of(AutoConfig.from_pretrained(config.model), dtype.itemsize, bytes_per_weights)
    states = [state for layer in backend.pools[0].cache.layers for state in layer.slots.states]
    return replace(work, state_bytes=sum(state[0].nbytes for state in states))


def _time(
    backend: TorchBackend, cases: _Cases, work: Work, dtype: torch.dtype, capacity: int, rounds: int
) -> _Times:
    """Time every case once a round, and the machine itself for its floors in that round."""
    times = _Times()
    scoring = ScoringClock(backend)
    for index in range(rounds + 1):
        if index == 1:
            times = _Times()  # without round 0, which warms up
        machine = measure_machine(backend.pools[0].device, dtype, BUFFER_BYTES, (1024,), seconds=0.1)
        times.machines.append(machine)
        for launch, batches in cases.decode.items():
            floors = decode_floors(work, machine, launch[0], min(launch[1], capacity))
            seconds = run(backend, batches)
            times.steps[launch].append((seconds / len(batches) / launch[2], floors))
            for pool, of_pool in cases.compared.items():
                times.shares[pool, launch].append(run(backend, of_pool[launch]) / seconds)
        for case, batches in cases.prefill.items():
            scoring.seconds = 0.0
            elapsed = run(backend, batches)
            times.reads[case].append((elapsed, prefill_floors(work, machine, *case)))
            times.scoring_shares[case].append(scoring.seconds / elapsed)
        print(f"round {index} of {rounds}", file=sys.stderr)
    return times


def _decode_row(times: _Times, launch: Launch, pools: Sequence[str]) -> dict[str, Any]:
    rows, entries, num_steps = launch
    return {
        "rows": rows,
        "entries": entries,
        "steps_a_launch": num_steps,
        **_medians(times.steps[launch]),
        "saved_seconds": _saved(times.steps[rows, entries, 1], times.steps[launch]),
        **{f"{pool}_share": statistics.median(times.shares[pool, launch]) for pool in pools},
    }


def _prefill_row(times: _Times, case: Pair) -> dict[str, Any]:
    tokens, prompts = case
    medians = _medians(times.reads[case])
    return {
        "tokens": tokens,
        "prompts": prompts,
        "scoring_share": statistics.median(times.scoring_shares[case]),
        "tokens_per_second": tokens * prompts / medians["seconds"],
        **medians,
    }


def _saved(single: Sequence[Timed], shared: Sequence[Timed]) -> float:
    """Return the seconds that a step saves by sharing a launch: the host's work for a launch is done once."""
    pairs = zip(single, shared, strict=True)
    return statistics.median(alone - in_launch for (alone, _), (in_launch, _) in pairs)


def _medians(rounds: Sequence[Timed]) -> dict[str, float]:
    return {
        "seconds": statistics.median(seconds for seconds, _ in rounds),
        "best_seconds": min(seconds for seconds, _ in rounds),
        "memory_floor_seconds": statistics.median(floors.memory for _, floors in rounds),
        "matrix_floor_seconds": statistics.median(floors.matrix for _, floors in rounds),
        "over_floor": statistics.median(seconds / floors.seconds for seconds, floors in rounds),
    }


def _table(document: dict[str, Any]) -> str:
    rates = f"{document['bandwidth'] / 1e9:.1f} GB/s, {document['matrix_rate'] / 1e9:.0f} GFLOP/s"
    lines = [f"{document['num_threads']} threads, {document['dtype']}, {rates}", ""]
    times = "bytes / bandwidth (ms) | operations / rate (ms) | took (ms) | best | over the floor"
    lines += [f"| step | {times} | tokens/s | saved | scoring |", "|---|---|---|---|---|---|---|---|---|"]
    for row in document["decode"]:
        name = f"decode {row['rows']} × {row['entries']}, {row['steps_a_launch']} per launch"
        rate = f"{row['rows'] / row['seconds']:.0f}"
        lines.append(f"| {name} | {_times(row)} | {rate} | {1e3 * row['saved_seconds']:.2f} | |")
    for row in document["prefill"]:
        name = f"prefill {row['prompts']} × {row['tokens']}"
        lines.append(
            f"| {name} | {_times(row)} | {row['tokens_per_second']:.0f} | | {row['scoring_share']:.1%} |"
        )
    lines += _compared_lines(document)
    if document["compiled"] is not None:
        lines.append(
            "\ncompiled code: "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in document["compiled"].items())
        )
    return "\n".join(lines)


def _compared_lines(document: dict[str, Any]) -> list[str]:
    """Return the other pools' ratios to the first, if there are others."""
    first, *others = document["pools"]
    of_first, *of_others = document["slot_bytes"]
    lines = []
    for pool, num_bytes in zip(others, of_others, strict=True):
        shares = [
            f"{row['rows']} × {row['entries']}, {row['steps_a_launch']} per launch: "
            f"{row[f'{pool}_share']:.2f}"
            for row in document["decode"]
        ]
        lines.append(f"\n{pool} over {first}: bytes {num_bytes / of_first:.3f}; time {'; '.join(shares)}")
    return lines


def _times(row: Mapping[str, float]) -> str:
    times = (
        row[name] for name in ("memory_floor_seconds", "matrix_floor_seconds", "seconds", "best_seconds")
    )
    return " | ".join(f"{1e3 * seconds:.2f}" for seconds in times) + f" | **{row['over_floor']:.2f}**"


def _pair(text: str) -> Pair:
    first, _, second = text.partition("x")
    return int(first), int(second)


if __name__ == "__main__":
    sys.exit(main())
