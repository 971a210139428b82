"""Measure one GPU with random weights: by default a model of Llama 3.1 8B's sizes, in bfloat16.

- Decode over full slots: tokens per second and the share of the measured memory bandwidth, as a captured
  graph and eager.
- The same cache memory in slots that hold all of a long context, and in smaller SnapStream slots: the number
  of sequences and tokens per second. (SnapStream, arXiv 2511.03092, reports 4.2 to 4.3 times the throughput
  on its SN40L.)
- Prefill of a long prompt: tokens per second, and the share of the scoring.

Every figure is a median over rounds. Slots hold zeros; no time depends on their values. The script also runs
on a CPU with a small model. Its figures are then not a GPU's, and `figures_owed` is true.

Usage: `python -m bench.gpu --json gpu.json --plot gpu.svg [--model DIR] [--batch 1 16 64] [--entries 8192]
[--context 32768]`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.model.attention import ATTENTION_NAME, register_attention
from bench.decode import ScoringClock, decode_batch, prefill_batches, run
from bench.floor import Machine, Work, measure_machine, work_of
from bench.long_contexts import SMALL_SLOTS, cache_bytes, draw_rates, held_rows, same_memory
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions

PUBLISHED_RATIO = (4.2, 4.3)
LAUNCHES = 4  # of a round


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to measure, in tokens or cache entries."""

    batches: Sequence[int] = (1, 16, 64)
    entries: int = 8192
    context: int = 32768
    full_slots: int = 8  # slots that hold all of a context; SnapStream's slots take the same memory
    compression: int = 4
    num_steps: int = 8  # decode steps of a launch
    prefill_chunk: int = 2048
    rounds: int = 5
    max_cache_bytes: int | None = None  # None: all free memory


@dataclass
class GpuBench:
    """One model on one device, under several backends in turn."""

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    model: PreTrainedModel = field(init=False)
    work: Work = field(init=False)
    machine: Machine = field(init=False)
    graphs: list[dict[str, float]] = field(default_factory=list)

    def measure(self) -> dict[str, Any]:
        """Return the figures in the form of the JSON document."""
        start = time.perf_counter()
        is_gpu = self.device.type == "cuda"
        self.work = work_of(self.config, self.dtype.itemsize)
        with _progress("memory bandwidth and matrix rate"):
            if is_gpu:
                self.machine = measure_machine(self.device, self.dtype, 2**32, (8192,), seconds=0.5)
            else:
                self.machine = measure_machine(self.device, self.dtype, 2**26, (256,), seconds=0.05)
        with _progress("random weights"):
            self.model = make_model(self.config, self.device, self.dtype)
        decode = [
            row
            for is_graph in ((True, False) if is_gpu else (False,))
            for row in self._decode(is_graph=is_graph)
        ]
        same_memory, prefill = self._long_contexts()
        return {
            "device": self.machine.device,
            "figures_owed": not is_gpu,
            "torch": torch.__version__,
            "model": asdict(self.work)
            | {"weight_bytes": self.work.weight_bytes, "entry_bytes": self.work.entry_bytes},
            "machine": asdict(self.machine)
            | {"bandwidth": self.machine.bandwidth, "matrix_rate": self.machine.matrix_rate},
            "sizes": asdict(self.sizes),
            "decode": decode,
            "same_memory": same_memory,
            "prefill": prefill,
            "graphs": self.graphs,
            "seconds": time.perf_counter() - start,
        }

    def _decode(self, *, is_graph: bool) -> list[dict[str, Any]]:
        """Time decode over full slots, for each batch that fits in memory."""
        sizes = self.sizes
        way = "graph" if is_graph else "eager"
        fitting = [batch for batch in sizes.batches if self._missing(batch, sizes.entries) <= 0]
        rows: list[dict[str, Any]] = [
            {"batch": batch, "way": way, "bytes_missing": self._missing(batch, sizes.entries)}
            for batch in sizes.batches
            if batch not in fitting
        ]
        if fitting:
            with self._backend(
                PolicyOptions(PolicyName.FULL), max(fitting), sizes.entries, is_graph=is_graph
            ) as backend:
                rows += [
                    {"batch": batch, "way": way} | self._step(backend, batch, sizes.entries, sizes.entries)
                    for batch in fitting
                ]
        return rows

    def _long_contexts(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Time decode in full and in small slots of the same memory, and prefill into the small ones."""
        sizes = self.sizes
        is_graph = self.device.type == "cuda"
        if (missing := self._missing(sizes.full_slots, sizes.context)) > 0:
            return {"bytes_missing": missing}, None
        figures: dict[str, Any] = {"context": sizes.context, "published_ratio": PUBLISHED_RATIO}
        prefill: dict[str, Any] | None = None
        for name, slots in same_memory(sizes.context, sizes.full_slots, sizes.compression).items():
            with self._backend(slots.policy, slots.num_slots, sizes.context, is_graph=is_graph) as backend:
                figures[name] = {
                    "sequences": slots.num_slots,
                    "entries": slots.entries,
                    "cache_bytes": cache_bytes(backend),
                }
                figures[name] |= self._step(backend, slots.num_slots, sizes.context, slots.entries)
                if name == SMALL_SLOTS:
                    prefill = self._prefill(backend)
        figures["ratio"] = figures[SMALL_SLOTS]["tokens_per_second"] / figures["full"]["tokens_per_second"]
        return figures, prefill

    def _step(self, backend: TorchBackend, num_rows: int, context: int, entries: int) -> dict[str, float]:
        """Time decode steps. When a launch ends, each of its slots holds `entries` of `context` tokens."""
        num_steps = self.sizes.num_steps
        launches = [decode_batch(num_rows, context, num_steps, context - num_steps)] * LAUNCHES
        with _progress(f"decode of {num_rows} × {entries} entries"):
            run(backend, launches[:1])
            seconds = (
                statistics.median(run(backend, launches) for _ in range(self.sizes.rounds))
                / LAUNCHES
                / num_steps
            )
        return {
            "seconds": seconds,
            "tokens_per_second": num_rows / seconds,
            "bandwidth_share": self.work.decode_bytes(num_rows, entries) / seconds / self.machine.bandwidth,
        }

    def _prefill(self, backend: TorchBackend) -> dict[str, float]:
        """Time a prompt one token shorter than the context, and its scoring in another run."""
        num_tokens = self.sizes.context - 1
        batches = prefill_batches(backend, num_tokens, 1)
        with _progress(f"prefill of {num_tokens} tokens"):
            run(backend, batches)
            seconds = statistics.median(run(backend, batches) for _ in range(min(self.sizes.rounds, 3)))
            scoring = ScoringClock(backend)
            run(backend, batches)
        return {
            "tokens": num_tokens,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "matrix_share": self.work.prefill_operations(num_tokens) / seconds / self.machine.matrix_rate,
            "scoring_share": scoring.seconds / seconds,
        }

    def _missing(self, num_slots: int, entries: int) -> int:
        """Return the missing bytes for these slots, a scratch of the same length, and 5 % for the steps."""
        needed = (num_slots + 1) * entries * self.work.entry_bytes
        return needed * 21 // 20 - self._free_bytes()

    def _free_bytes(self) -> int:
        if self.sizes.max_cache_bytes is not None:
            return self.sizes.max_cache_bytes
        if self.device.type != "cuda":
            return sys.maxsize
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    @contextmanager
    def _backend(
        self, policy: PolicyOptions, num_slots: int, max_model_len: int, *, is_graph: bool
    ) -> Iterator[TorchBackend]:
        """Open a warmed-up backend over the model, and free its memory at the end."""
        config = TorchBackendConfig(
            "random weights",
            device=DeviceName(self.device.type),
            dtype=DtypeName(str(self.dtype).removeprefix("torch.")),
            pools=(PoolOptions(num_slots, policy),),
            max_model_len=max_model_len,
            num_scratch=1,
            prefill_chunk=self.sizes.prefill_chunk,
            compile=is_graph,
        )
        backend = TorchBackend(config, model=self.model)
        capture = ", capturing graphs" if is_graph else ""
        with _progress(f"warming up {num_slots} slots of policy {policy.name}{capture}"):
            start = time.perf_counter()
            backend.warmup()
        if is_graph:
            self.graphs.append(
                {
                    "slots": num_slots,
                    "recorded": backend.num_recorded,
                    "seconds_to_warm": time.perf_counter() - start,
                }
            )
        try:
            yield backend
        finally:
            backend.close()


def make_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights, made on its device."""
    register_attention()
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)  # type: ignore[no-untyped-call]
    ready: PreTrainedModel = model.eval()
    return ready


def llama_8b() -> PreTrainedConfig:
    """Return a configuration of Llama 3.1 8B's published sizes."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


@contextmanager
def _progress(title: str) -> Iterator[None]:
    start = time.perf_counter()
    print(f"{title} …", file=sys.stderr, flush=True)
    yield
    print(f"{title}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def table(document: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    owed = ": not a GPU, so its figures are missing" if document["figures_owed"] else ""
    bandwidth = f"{document['machine']['bandwidth'] / 1e9:.0f} GB/s"
    lines = [f"{document['device']}, {document['machine']['dtype']}, {bandwidth}{owed}", ""]
    lines += ["| step | ms | tokens/s | of the bandwidth |", "|---|---|---|---|"]
    for row in document["decode"]:
        lines.append(_line(f"decode {row['batch']} × {document['sizes']['entries']}, {row['way']}", row))
    memory = document["same_memory"]
    prefill = document["prefill"]
    if "ratio" not in memory:
        lines.append(_line("long contexts", memory))
        return "\n".join(lines)
    for name in ("full", SMALL_SLOTS):
        row = memory[name]
        cache = f"{row['cache_bytes'] / 1e9:.2f} GB"
        lines.append(_line(f"{name}: {row['sequences']} contexts of {memory['context']} in {cache}", row))
    low, high = PUBLISHED_RATIO
    lines.append(
        f"\nthe same memory in smaller slots: {memory['ratio']:.2f} × the tokens (published: {low} to {high})"
    )
    shares = f"{prefill['matrix_share']:.1%} of the matrix rate, scoring {prefill['scoring_share']:.1%}"
    lines.append(
        f"prefill of {prefill['tokens']} tokens: {prefill['tokens_per_second']:.0f} tokens/s, {shares}"
    )
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    if "bytes_missing" in row:
        return f"| {name} | {row['bytes_missing'] / 1e9:.2f} GB of memory missing | | |"
    rates = f"{row['tokens_per_second']:.0f} | {row['bandwidth_share']:.1%}"
    return f"| {name} | {1e3 * row['seconds']:.2f} | {rates} |"


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the throughput of decode by batch, and of the same memory in full and in small slots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    decode = {f"{row['batch']}\n{row['way']}": row for row in document["decode"] if "seconds" in row}
    draw_rates(left, decode, f"decode, {document['sizes']['entries']} entries per slot")
    draw_rates(right, held_rows(document["same_memory"]), "the same cache memory")
    owed = " (not a GPU: its figures are missing)" if document["figures_owed"] else ""
    figure.suptitle(document["device"] + owed)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    config = llama_8b() if parsed.model is None else AutoConfig.from_pretrained(parsed.model)
    names = ("entries", "context", "full_slots", "compression", "prefill_chunk", "num_steps", "rounds")
    max_cache_bytes = None if parsed.max_cache_gb is None else int(parsed.max_cache_gb * 1e9)
    sizes = Sizes(
        parsed.batch, max_cache_bytes=max_cache_bytes, **{name: getattr(parsed, name) for name in names}
    )
    document = GpuBench(config, torch.device(parsed.device), getattr(torch, parsed.dtype), sizes).measure()
    print(table(document))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
    if parsed.plot is not None:
        plot(document, parsed.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sizes = Sizes()
    parser.add_argument(
        "--model", help="folder whose config.json has the model's sizes (default: those of Llama 3.1 8B)"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu")
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--batch", type=int, nargs="+", default=sizes.batches, help="sequences of a decode step"
    )
    parser.add_argument("--entries", type=int, default=sizes.entries, help="entries of each slot")
    parser.add_argument("--context", type=int, default=sizes.context, help="tokens of a long context")
    parser.add_argument(
        "--full-slots", type=int, default=sizes.full_slots, help="slots that hold all of a long context"
    )
    parser.add_argument(
        "--compression",
        type=int,
        default=sizes.compression,
        help="factor by which SnapStream's slots are smaller",
    )
    parser.add_argument("--prefill-chunk", type=int, default=sizes.prefill_chunk)
    parser.add_argument("--num-steps", type=int, default=sizes.num_steps, help="decode steps of a launch")
    parser.add_argument("--rounds", type=int, default=sizes.rounds)
    parser.add_argument(
        "--max-cache-gb", type=float, help="limit of the cache's memory (default: all free memory)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--plot", type=Path, help="file for the plot, whose suffix is its format; needs matplotlib"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
