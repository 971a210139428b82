"""`measure`: the constants of the machine at hand, fitted on steps of the real torch backend.

Bandwidth and the rate of products are measured alone. Five efficiencies are each fitted on one step of a
model with random weights. Steps of another model, never used for fitting, test the result.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backends.interface import (
    Batch,
    DecodeBatch,
    DecodeRow,
    Draw,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    SamplingParams,
)
from backends.sn40l.description.hardware import Machine, load_machine
from backends.sn40l.description.model_config import Model, model_from_config
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment
from backends.sn40l.step.prefill import Chunk, prefill_seconds
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DtypeName, TorchBackendConfig
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.options import MeasureOptions

_TOLERANCE = 0.15
_CHUNK = 512
_DRAW = Draw(SamplingParams(temperature=0.0))
_BASE = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Shape:
    """A Llama with random weights."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int

    def config(self, context: int) -> dict[str, Any]:
        return _BASE | {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": context,
        }


_TINY = _Shape(64, 8, 2, 1, 128, 256)
_FITTED = _Shape(768, 8, 12, 4, 2048, 16384)
_HELD_OUT = _Shape(1024, 6, 16, 8, 2816, 32000)


@dataclass(frozen=True, slots=True)
class _Step:
    """A decode step of `num_rows` sequences of `index` tokens, or a chunk that starts at `index`."""

    name: str
    num_rows: int  # 0: a chunk
    index: int

    def batch(self) -> Batch:
        if self.num_rows:
            rows = (DecodeRow(str(slot), slot, 1, self.index, 8, _DRAW) for slot in range(self.num_rows))
            return DecodeBatch(tuple(rows))
        row = PrefillRow("a", (1,) * _CHUNK, self.index, self.index + _CHUNK + 8, (0,))
        return PrefillBatch((row,), PrefillShape(1, _CHUNK))

    def simulated(self, model: Model, machine: Machine) -> float:
        deployment = Deployment(model, machine, 1)
        if self.num_rows:
            return decode_seconds(deployment, DecodeShape(self.num_rows, self.index + 1))
        return prefill_seconds(deployment, Chunk(_CHUNK, self.index))


def measure_answer(options: MeasureOptions) -> Answer:
    """Measure, fit, and compare with steps of another model. The status is 1 beyond 15 %."""
    context = options.context
    machine = replace(
        load_machine("cpu"),
        hbm_bandwidth=_bandwidth(options.repeats),
        hbm_capacity=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        compute_units=torch.get_num_threads(),
        compute_unit_rate=_matrix_rate(options.repeats) / torch.get_num_threads(),
        drain=0.0,
    )
    one, many = _Step("decode, 1 slot", 1, 64), _Step("decode, 8 slots, long", 8, context - 64)
    early, late = _Step("prompt, first chunk", 0, 0), _Step("prompt, last chunk", 0, context - 2 * _CHUNK)
    rows: list[tuple[str, str, float, float]] = []
    with _backend(_TINY, options) as run:
        num_calls = 3 + machine.kernels_per_layer * _TINY.num_layers
        machine = replace(machine, launch=run(one) / num_calls)
    with _backend(_FITTED, options) as run:
        model = _model(_FITTED, context)
        for name, step in (
            ("stream_efficiency", one),
            ("gemm_efficiency", early),
            ("decode_attention_efficiency", many),
            ("prefill_attention_efficiency", late),
        ):
            seconds = run(step)
            machine = _fitted(machine, name, seconds, lambda m, s=step: s.simulated(model, m))  # type: ignore[misc]
            rows.append((step.name, f"fits {name}", seconds, step.simulated(model, machine)))
    with _backend(_HELD_OUT, options) as run:
        model = _model(_HELD_OUT, context)
        held_out = (
            one,
            _Step("decode, 4 slots", 4, context // 2),
            many,
            early,
            _Step("prompt, middle chunk", 0, context // 2),
        )
        rows += [(step.name, "held out", run(step), step.simulated(model, machine)) for step in held_out]
    return _answer(options, machine, rows)


def _answer(
    options: MeasureOptions, machine: Machine, rows: Sequence[tuple[str, str, float, float]]
) -> Answer:
    constants = {name: getattr(machine, name) for name in _MEASURED}
    text = _toml(constants)
    if options.output:
        options.output.write_text(text)
    errors = [ours / real - 1 for _, use, real, ours in rows if use == "held out"]
    cells = [
        (name, use, f"{1e3 * real:.3f}", f"{1e3 * ours:.3f}", f"{ours / real - 1:+.1%}")
        for name, use, real, ours in rows
    ]
    worst = max(map(abs, errors))
    lines = [
        text,
        table(("step", "use", "measured ms", "simulated ms", "error"), cells),
        "",
        f"largest error of steps that were not fitted: {worst:.1%} (at most {_TOLERANCE:.0%} is expected)",
    ]
    steps = [
        {"step": name, "use": use, "measured_seconds": real, "simulated_seconds": ours}
        for name, use, real, ours in rows
    ]
    values = {"constants": constants, "steps": steps, "worst_error": worst}
    return Answer(lines, values, status=0 if worst <= _TOLERANCE else 1)


_MEASURED = {
    "compute_units": "threads of torch",
    "compute_unit_rate": "measured: a bfloat16 product of 1024 × 2048 × 2048",
    "hbm_bandwidth": "measured: a reduction of 256 MB",
    "hbm_capacity": "measured: physical memory",
    "launch": "measured: decode of a tiny model, by call",
    "drain": "held within launch",
    "stream_efficiency": "measured: decode of one slot",
    "gemm_efficiency": "measured: the first chunk of a prompt",
    "decode_attention_efficiency": "measured: decode of 8 long slots",
    "prefill_attention_efficiency": "measured: the last chunk of a prompt",
}


def _toml(constants: dict[str, float]) -> str:
    tables = [
        f"[{name}]\nvalue = {constants[name]!r}\nsource = {json.dumps(source, ensure_ascii=False)}\n"
        for name, source in _MEASURED.items()
    ]
    return "\n".join(('title = "measured here"\nbase = "cpu"\n', *tables))


def _fitted(machine: Machine, name: str, seconds: float, simulated: Callable[[Machine], float]) -> Machine:
    """Return the machine with the efficiency at which the step takes `seconds`, within 0.01 and 2."""
    low, high = math.log(0.01), math.log(2.0)
    for _ in range(40):
        middle = (low + high) / 2
        change: dict[str, Any] = {name: math.exp(middle)}
        if simulated(replace(machine, **change)) > seconds:
            low = middle
        else:
            high = middle
    found: dict[str, Any] = {name: math.exp((low + high) / 2)}
    return replace(machine, **found)


def _model(shape: _Shape, context: int) -> Model:
    return model_from_config("measured", shape.config(context))


@contextmanager
def _backend(shape: _Shape, options: MeasureOptions) -> Iterator[Callable[[_Step], float]]:
    """Yield a function that returns the shortest of several runs of a step, in seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        settings = {key: value for key, value in shape.config(options.context).items() if key != "dtype"}
        made = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
        made.save_pretrained(folder)
        del made
        backend = TorchBackend(
            TorchBackendConfig(
                model=str(Path(folder)),
                pools=(PoolOptions(8, PolicyOptions(PolicyName.FULL), "full"),),
                max_model_len=options.context,
                prefill_chunk=_CHUNK,
                dtype=DtypeName.BFLOAT16,
                compile=options.compile,
            )
        )
        try:
            if options.compile:
                backend.warmup()
                while backend.use_idle_time():
                    time.sleep(0.01)
            yield lambda step: min(
                backend.submit(step.batch()).result().elapsed for _ in range(options.repeats)
            )
        finally:
            backend.close()


def _bandwidth(repeats: int) -> float:
    data = torch.ones(64 * 2**20)
    return data.numel() * data.element_size() / _shortest(lambda: data.sum(), repeats)


def _matrix_rate(repeats: int) -> float:
    left = torch.ones(1024, 2048, dtype=torch.bfloat16)
    right = torch.ones(2048, 2048, dtype=torch.bfloat16)
    return 2 * 1024 * 2048 * 2048 / _shortest(lambda: left @ right, repeats)


def _shortest(run: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
