"""Time to the first token and peak memory by prompt length, with a full and a bounded scratch, on one core.

`python -m bench.bounded_prefill --out results/bounded-prefill` writes `.json` and `.png`. The model is a
Llama of three layers with random weights, as speed and memory do not depend on their values. Of the last
layer a prompt needs little more than keys and values.

Each point is measured in another process. After a short prompt to warm up, the backend reads one prompt in
chunks of 512 tokens into a slot of 2,048 entries. The scratch fits the prompt, as in a server for such
prompts. The plot shows CPU time, which is hardly longer on a busy machine. The JSON has CPU time and wall
time.
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
SLOT_CAPACITY = 2048  # entries
SCRATCH_CAPACITY = 8192  # entries
CHUNK = 512  # tokens


def save_model(folder: Path) -> None:
    """Write the measured model."""
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
    """Read one prompt of random tokens.

    `peak_bytes` is the process's largest resident memory, including its libraries and weights.
    """
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
    started = time.perf_counter()
    cpu_started = time.process_time()
    num_read = 0
    while num_read < length:
        num_read = _read_chunk(backend, prompt, num_read)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "num_prompt_tokens": length,
        "ttft_seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak,
        "cache_bytes": backend.pools[0].cache.num_bytes,
    }


def _read_chunk(backend: TorchBackend, prompt: list[int], start: int) -> int:
    """Read a chunk from `start` on, and return its end."""
    length = len(prompt)
    layout = backend.spec.scratch.layout
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
        echo=tuple(prompt[: layout.num_echoed]) if end == limit else (),
    )
    shape = next(shape for shape in backend.spec.prefill_shapes if shape.num_tokens >= end - start)
    backend.submit(PrefillBatch((row,), shape)).result()
    return end


def _measure_in_process(model: str, length: int, scratch_capacity: int | None) -> dict[str, float | int]:
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
    for name, label in (("whole", "full scratch"), ("bounded", f"scratch of {SCRATCH_CAPACITY:,} entries")):
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
    parser.add_argument("--out", type=Path, help="path of the results, without suffix")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--longest-whole",
        type=int,
        default=LENGTHS[-2],
        help="the longest prompt that is also read in a full scratch",
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
            # Both follow each other at once, so that ratios are right on a busy machine.
            for name, capacity in (("whole", None), ("bounded", SCRATCH_CAPACITY)):
                if capacity is not None or length <= arguments.longest_whole:
                    results[name].append(_measure_in_process(folder, length, capacity))
            arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    _draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
