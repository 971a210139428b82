"""The floors of a model's times on this machine: bytes by measured bandwidth, operations by measured rate.

A decode step takes at least the time to read every weight and every live cache entry once. A prefill takes at
least the time of its matrix products. Both rates are the best that torch reaches here in several ways, not
those of a data sheet. They are right on an idle machine, so the load is reported too. The formulas are for
decoders with grouped-query attention. Routers are taken to choose experts evenly.

Usage: `python -m bench.floor MODEL_DIR [--batch 8] [--entries 256] [--prompt 8192] [--json FILE]`.
"""

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SECONDS = 2.0  # of measurement for each way


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates by way: bytes per second, and floating-point operations per second.

    Operations are in `dtype`, and on a CPU in float32 too: torch's products of a type that a processor lacks
    are slower than the kernels', which compute in float32 there.
    `load` is the load average of the minute before. With a load far above 0, the rates are too low.
    """

    device: str
    num_threads: int
    load: float
    dtype: str
    bandwidths: Mapping[str, float]
    matrix_rates: Mapping[str, float]

    @property
    def bandwidth(self) -> float:
        return max(self.bandwidths.values())

    @property
    def matrix_rate(self) -> float:
        return max(self.matrix_rates.values())


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes of a model that determine its bytes and operations."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_matrix: int  # weights of matrices, without the output layer and experts
    num_key_value: int  # weights of one layer's key and value projections, which are among these
    num_output: int  # weights of the output layer
    num_other: int  # norms and biases, read but not multiplied
    bytes_per_element: int
    bytes_per_weight: float  # of the matrices and experts
    bytes_per_output_weight: int  # of the output layer
    num_expert: int = 0  # weights of one expert in each of the layers
    num_experts: int = 0  # of a layer
    num_chosen: int = 0  # of them, by each row
    state_bytes: int = 0  # of a sequence's recurrent states in all layers, which a step reads and writes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, but for an untied embedding, of which a step reads only a few rows."""
        return self._read_bytes(self.num_experts)

    def _read_bytes(self, num_experts: float) -> int:
        num_quantized = self.num_matrix + num_experts * self.num_expert
        matrix_bytes = num_quantized * self.bytes_per_weight + self.num_output * self.bytes_per_output_weight
        return round(matrix_bytes + self.num_other * self.bytes_per_element)

    @property
    def _num_multiplied(self) -> int:
        """Weights that a row is multiplied by, without the output layer."""
        return self.num_matrix + self.num_chosen * self.num_expert

    @property
    def entry_bytes(self) -> int:
        """Bytes of one cache entry's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_element

    def bytes_for(self, num_rows: int) -> int:
        """Bytes of the weights that a batch of rows reads: all but the experts that no row chooses."""
        left_out = (1 - self.num_chosen / self.num_experts) ** num_rows if self.num_experts else 0
        return self._read_bytes(self.num_experts * (1 - left_out))

    def decode_bytes(self, batch: int, entries: int) -> int:
        return self.bytes_for(batch) + batch * (entries * self.entry_bytes + 2 * self.state_bytes)

    def decode_operations(self, batch: int, entries: int) -> int:
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * entries
        return batch * (2 * (self._num_multiplied + self.num_output) + attention)

    def prefill_operations(self, num_tokens: int) -> int:
        """Return the operations up to a prompt's first output token.

        Causal attention covers half of the square. The output layer computes only the last token, and so does
        the last layer, except for its keys and values.
        """
        num_full_layers = self.num_layers - 1
        per_layer = self._num_multiplied // self.num_layers
        all_tokens = num_tokens * (num_full_layers * per_layer + self.num_key_value)
        last_token = per_layer - self.num_key_value + self.num_output
        num_pairs = num_full_layers * (num_tokens * (num_tokens + 1) // 2) + num_tokens
        return 2 * (all_tokens + last_token) + 4 * self.num_heads * self.head_dim * num_pairs


class UnsupportedModelError(ValueError):
    """The formulas do not hold for this model."""


def work_of(
    config: PreTrainedConfig, bytes_per_element: int, bytes_per_weights: tuple[float, int] | None = None
) -> Work:
    """Count a model's weights without allocating them.

    `bytes_per_weights` are those of quantized matrices and experts, and of the output layer beside them.
    Matrices that stay in the model's type, such as routers, are counted as quantized ones too. Recurrent
    states are not counted.

    Raises `UnsupportedModelError` for compressed attention, and for layers whose rows do not all choose the
    same number of the same number of experts.
    """
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"the config has kv_lora_rank = {config.kv_lora_rank}: expected keys and values"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shapes = {parameter: parameter.shape for parameter in model.parameters()}  # tied ones once
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    experts = [
        parameter  # [expert, …]
        for module in model.modules()
        if hasattr(module, "is_concatenated")  # transformers' experts
        for parameter in module.parameters(recurse=False)
    ]
    num_experts, num_chosen = _choice(config, experts)
    counted_apart = {id(parameter) for parameter in (*experts, embedding, output)}
    layers = [parameter for parameter in shapes if id(parameter) not in counted_apart]
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_weight, bytes_per_output_weight = bytes_per_weights or (bytes_per_element, bytes_per_element)
    return Work(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_matrix=sum(parameter.numel() for parameter in layers if parameter.ndim == 2),
        num_key_value=2 * num_kv_heads * head_dim * config.hidden_size,
        num_output=output.numel(),
        num_other=sum(parameter.numel() for parameter in layers if parameter.ndim != 2),
        bytes_per_element=bytes_per_element,
        bytes_per_weight=bytes_per_weight,
        bytes_per_output_weight=bytes_per_output_weight,
        num_expert=sum(parameter[0].numel() for parameter in experts),
        num_experts=num_experts,
        num_chosen=num_chosen,
    )


def _choice(config: PreTrainedConfig, experts: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return how many experts a layer has, and how many of them a row chooses."""
    if not experts:
        return 0, 0
    numbers = {parameter.shape[0] for parameter in experts}
    num_chosen = getattr(config, "num_experts_per_tok", None)
    if len(numbers) != 1 or not isinstance(num_chosen, int):
        raise UnsupportedModelError(
            f"layers have {sorted(numbers)} experts, of which rows choose {num_chosen}: expected one number"
        )
    return numbers.pop(), num_chosen


@dataclass(frozen=True, slots=True)
class Floors:
    """The least seconds by memory bandwidth and by matrix rate. The floor is the larger one."""

    memory: float
    matrix: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.matrix)


def decode_floors(work: Work, machine: Machine, batch: int, entries: int) -> Floors:
    """Return the floors of a decode step of `batch` sequences with `entries` live cache entries each."""
    return Floors(
        work.decode_bytes(batch, entries) / machine.bandwidth,
        work.decode_operations(batch, entries) / machine.matrix_rate,
    )


def prefill_floors(work: Work, machine: Machine, num_tokens: int, num_prompts: int = 1) -> Floors:
    """Return the floors of the first tokens of prompts in one batch, with exact attention."""
    operations = num_prompts * work.prefill_operations(num_tokens)
    read_bytes = work.bytes_for(num_prompts * num_tokens)
    return Floors(read_bytes / machine.bandwidth, operations / machine.matrix_rate)


def measure_machine(
    device: torch.device, dtype: torch.dtype, num_bytes: int, sizes: Sequence[int], seconds: float = SECONDS
) -> Machine:
    """Measure with buffers of `num_bytes`, which exceed any cache, and square matrices of `sizes`."""
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        num_threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        dtype=str(dtype).removeprefix("torch."),
        bandwidths=_bandwidths(device, num_bytes, seconds),
        matrix_rates=_matrix_rates(device, dtype, sizes, seconds),
    )


def _bandwidths(device: torch.device, num_bytes: int, seconds: float) -> dict[str, float]:
    floats = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(floats)
    return {
        "sum of float32": num_bytes / _best_time(floats.sum, device, seconds),
        "maximum of int32": num_bytes / _best_time(floats.view(torch.int32).max, device, seconds),
        "copy, read and write": 2 * num_bytes / _best_time(lambda: target.copy_(floats), device, seconds),
    }


def _matrix_rates(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int], seconds: float
) -> dict[str, float]:
    rates = {}
    types = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    for size, each in itertools.product(sizes, sorted(types, key=str)):
        one = torch.randn(size, size, device=device, dtype=each)
        other = torch.randn(size, size, device=device, dtype=each)
        best = _best_time(partial(torch.matmul, one, other), device, seconds)
        rates[f"{size} × {size} × {size}, {str(each).removeprefix('torch.')}"] = 2 * size**3 / best
    return rates


def _best_time(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the shortest time of a call, which other load on the machine affects least."""
    call()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronise(device: torch.device) -> None:
    """Wait for all work that was submitted to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    arguments = _parser().parse_args()
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    if device.type == "cpu":
        machine = measure_machine(device, dtype, 2**29, (1024, 2048))
    else:
        machine = measure_machine(device, dtype, 2**33, (4096, 8192, 16384))
    work = work_of(AutoConfig.from_pretrained(arguments.model), dtype.itemsize)
    decode = [
        (batch, entries, decode_floors(work, machine, batch, entries))
        for batch in arguments.batch
        for entries in arguments.entries
    ]
    prefill = [(num_tokens, prefill_floors(work, machine, num_tokens)) for num_tokens in arguments.prompt]
    _print_table(machine, work, decode, prefill)
    if arguments.json is not None:
        document = {
            "machine": asdict(machine) | {"bandwidth": machine.bandwidth, "matrix_rate": machine.matrix_rate},
            "model": asdict(work) | {"weight_bytes": work.weight_bytes, "entry_bytes": work.entry_bytes},
            "decode": [
                {"batch": batch, "entries": entries, "floors": asdict(floors)}
                for batch, entries, floors in decode
            ],
            "prefill": [
                {"num_tokens": num_tokens, "floors": asdict(floors)} for num_tokens, floors in prefill
            ],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _print_table(
    machine: Machine,
    work: Work,
    decode: Sequence[tuple[int, int, Floors]],
    prefill: Sequence[tuple[int, Floors]],
) -> None:
    print(f"{machine.device}, {machine.num_threads} threads, {machine.dtype}, load before {machine.load:.1f}")
    print("\n| measured | rate |\n|---|---|")
    for name, rate in machine.bandwidths.items():
        print(f"| memory: {name} | {rate / 1e9:.1f} GB/s |")
    for name, rate in machine.matrix_rates.items():
        print(f"| matrix: {name} | {rate / 1e9:.0f} GFLOP/s |")
    print(f"\nweights {work.weight_bytes / 1e6:.0f} MB, a cache entry {work.entry_bytes / 1e3:.1f} kB")
    print("\n| step | bytes / bandwidth (ms) | operations / rate (ms) |\n|---|---|---|")
    for batch, entries, floors in decode:
        print(
            f"| decode, {batch} × {entries} entries | {1e3 * floors.memory:.2f} | {1e3 * floors.matrix:.2f} |"
        )
    for num_tokens, floors in prefill:
        print(f"| prefill of {num_tokens} tokens | {1e3 * floors.memory:.2f} | {1e3 * floors.matrix:.2f} |")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences of a decode step")
    parser.add_argument(
        "--entries",
        type=int,
        nargs="+",
        default=[256, 2048, 8192],
        help="live cache entries of each sequence",
    )
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 8192], help="tokens of a prompt")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    main()
