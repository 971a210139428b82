"""Time to the first token and peak memory over the prompt's length, read whole and in a bounded scratch, on one core.

`python -m bench.bounded_prefill --out results/bounded-prefill` writes `.json` and `.png`. The model is a Llama of three layers, of whose last
a prompt needs little more than keys and values; its weights are random: speed and memory do not depend on their values. Every point is a
process of its own, in which one prompt is read by the backend in chunks of 512 tokens into a slot of 2,048 entries; it warms up on a short
one. A server for prompts of a length has scratches for them, so every point has. The picture shows CPU time, since it is hardly longer on a
busy machine; the JSON has both.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from backends.interface import Draw, PrefillBatch, PrefillRow, SamplingParams
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SLOT_CAPACITY, SCRATCH_CAPACITY, CHUNK = 2048, 8192, 512


def save_model(folder: Path) -> None:
    """Write the model that is measured."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=LENGTHS[-1],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)  # type: ignore[no-untyped-call]


def measure(model: str, length: int, scratch_capacity: int | None) -> dict[str, float | int]:
    """Read one prompt of random tokens; `peak_bytes` is the most that this process ever held, its libraries and weights included."""
    torch.set_num_threads(1)
    config = TorchBackendConfig(
        model,
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        num_scratch=1,
        pools=(PoolOptions(1, PolicyOptions(slot_capacity=SLOT_CAPACITY)),),
        max_model_len=length,
        scratch_capacity=scratch_capacity,
        prefill_chunk=CHUNK,
    )
    backend = TorchBackend(config)
    backend.warmup()
    prompt = torch.randint(1024, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    start, started, cpu_started = 0, time.perf_counter(), time.process_time()
    while start < length:
        start = _read_chunk(backend, prompt, start)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "num_prompt_tokens": length,
        "ttft_seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        "cache_bytes": backend.pools[0].cache.num_bytes,
    }


def _read_chunk(backend: TorchBackend, prompt: list[int], start: int) -> int:
    """Read on from `start`, and return where the chunk ended."""
    length, layout = len(prompt), backend.spec.scratch.layout
    limit = layout.round_end(start, length)
    end = min(start + CHUNK, limit)
    row = PrefillRow(
        "measured",
        tuple(prompt[start:end]),
        start,
        length,
        slots=(0,),
        scratch=0,
        draws=(Draw(SamplingParams(temperature=0.0)),) if end == length else (),
        ahead=tuple(prompt[length - layout.num_ahead :]) if end == limit < length else (),
    )
    shape = next(shape for shape in backend.spec.prefill_shapes if shape.num_tokens >= end - start)
    backend.submit(PrefillBatch((row,), shape)).result()
    return end


def _measure_apart(model: str, length: int, scratch_capacity: int | None) -> dict[str, float | int]:
    arguments = ["--measure", model, str(length), str(scratch_capacity or 0)]
    output = subprocess.run(
        [sys.executable, "-m", "bench.bounded_prefill", *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    point: dict[str, float | int] = json.loads(output.splitlines()[-1])
    return point


def _draw(results: dict[str, Any], path: Path) -> None:
    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, label in (("whole", "whole"), ("bounded", f"scratch of {SCRATCH_CAPACITY:,} entries")):
        points = results[name]
        lengths = [point["num_prompt_tokens"] for point in points]
        time_axes.plot(lengths, [point["cpu_seconds"] for point in points], marker="o", label=label)
        memory_axes.plot(lengths, [point["peak_bytes"] / 1e9 for point in points], marker="o", label=label)
    for axes, title in (
        (time_axes, "CPU time to the first token, one thread, s"),
        (memory_axes, "peak memory of the process, GB"),
    ):
        axes.set(title=title, xlabel="prompt tokens", xscale="log")
        axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    time_axes.set_yscale("log")
    memory_axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write, without suffix")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--longest-whole",
        type=int,
        default=LENGTHS[-2],
        help="longer prompts are read in the bounded scratch only",
    )
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "LENGTH", "SCRATCH"), help="print one point")
    arguments = parser.parse_args()
    if arguments.measure:
        model, length, scratch = arguments.measure
        print(json.dumps(measure(model, int(length), int(scratch) or None)))
        return
    results: dict[str, Any] = {
        "slot_capacity": SLOT_CAPACITY,
        "scratch_capacity": SCRATCH_CAPACITY,
        "whole": [],
        "bounded": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for length in tqdm(arguments.lengths, unit="length"):
            for name, capacity in (
                ("whole", None),
                ("bounded", SCRATCH_CAPACITY),
            ):  # side by side, so that ratios hold on a busy machine
                if capacity is not None or length <= arguments.longest_whole:
                    results[name].append(_measure_apart(folder, length, capacity))
            arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    _draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
