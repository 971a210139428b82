"""`measure`: the constants of the machine at hand, fitted on steps of the real torch backend.

Bandwidth and the rate of products are measured alone. Five efficiencies and the time of a call are each
fitted on one step of one of two models with random weights. Steps of a third one, never used for fitting,
test the result. All steps take turns, round after round, and the median of each counts: the bandwidth of a
shared machine changes by half within seconds, and the shortest run of a short step finds a faster moment than
that of a long one. How much it changes shows as the median over the shortest. The models are loaded several
times, since where their weights lie in memory changes how fast they are read.
"""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.options import MeasureOptions

_TOLERANCE = 0.15
_CHUNK = 512
_SWEEPS = 30
_LOADS = 3
# The limits of a fit: the constant of the slowest step and of the fastest.
_EFFICIENCIES = (0.01, 2.0)
_LAUNCHES = (1e-3, 1e-7)
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


# Of one size and twice as large: a call takes the same time in both, and weights do not. Entries are read for
# each KV head and multiplied for each query head, so the ratio of the two differs.
_SMALL = _Shape(768, 8, 12, 2, 2048, 16384)
_LARGE = _Shape(1152, 8, 18, 18, 3072, 16384)
_HELD_OUT = _Shape(960, 8, 15, 3, 2816, 20000)


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


@dataclass(frozen=True, slots=True)
class _Compared:
    """A step, its use, and its seconds: measured, the median over the shortest, and simulated."""

    name: str
    use: str
    measured: float
    spread: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def measure_answer(options: MeasureOptions) -> Answer:
    """Measure, fit, and compare with steps of another model. The status is 1 beyond 15 %."""
    context = options.context
    one, many = _Step("decode, 1 slot", 1, 64), _Step("decode, 8 slots, long", 8, context - 64)
    early, late = _Step("prompt, first chunk", 0, 0), _Step("prompt, last chunk", 0, context - 2 * _CHUNK)
    fits = {
        "launch": (_SMALL, one),
        "stream_efficiency": (_LARGE, one),
        "gemm_efficiency": (_SMALL, early),
        "cache_efficiency": (_LARGE, many),
        "decode_attention_efficiency": (_SMALL, many),
        "prefill_attention_efficiency": (_SMALL, late),
    }
    held_out = (
        one,
        _Step("decode, 4 slots", 4, context // 2),
        many,
        early,
        _Step("prompt, middle chunk", 0, context // 2),
    )
    steps = {_SMALL: (one, many, early, late), _LARGE: (one, many), _HELD_OUT: held_out}
    times = _times(steps, options)
    machine = replace(
        load_machine("cpu"),
        hbm_bandwidth=_DATA_BYTES / statistics.median(times[_BANDWIDTH]),
        hbm_capacity=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        compute_units=torch.get_num_threads(),
        compute_unit_rate=_PRODUCT_OPERATIONS / statistics.median(times[_PRODUCT]) / torch.get_num_threads(),
        drain=0.0,
    )
    for name, (shape, step) in _SWEEPS * tuple(fits.items()):  # each enters the other steps a little, too
        model = model_from_config("measured", shape.config(context))
        machine = _fitted(
            machine, name, statistics.median(times[shape, step]), partial(step.simulated, model)
        )
    uses = [(shape, step, f"fits {name}") for name, (shape, step) in fits.items()]
    uses += [(_HELD_OUT, step, "held out") for step in held_out]
    compared: list[_Compared] = []
    for shape, step, use in uses:
        measured = statistics.median(times[shape, step])
        simulated = step.simulated(model_from_config("measured", shape.config(context)), machine)
        spread = measured / min(times[shape, step])
        compared.append(_Compared(step.name, use, measured, spread, simulated))
    return _answer(options, machine, compared)


def _answer(options: MeasureOptions, machine: Machine, compared: Sequence[_Compared]) -> Answer:
    constants = {name: getattr(machine, name) for name in _MEASURED}
    text = _toml(constants)
    if options.output:
        options.output.write_text(text)
    cells = [
        (
            one.name,
            one.use,
            f"{1e3 * one.measured:.3f}",
            f"{one.spread:.2f}",
            f"{1e3 * one.simulated:.3f}",
            f"{one.error:+.1%}",
        )
        for one in compared
    ]
    worst = max(abs(one.error) for one in compared if one.use == "held out")
    header = ("step", "use", "measured ms", "median / shortest", "simulated ms", "error")
    lines = [
        text,
        table(header, cells),
        "",
        f"largest error of steps that were not fitted: {worst:.1%} (at most {_TOLERANCE:.0%} is expected)",
    ]
    steps = [
        {
            "step": one.name,
            "use": one.use,
            "measured_seconds": one.measured,
            "median_over_shortest": one.spread,
            "simulated_seconds": one.simulated,
        }
        for one in compared
    ]
    values = {"constants": constants, "steps": steps, "worst_error": worst}
    return Answer(lines, values, status=0 if worst <= _TOLERANCE else 1)


_MEASURED = {
    "compute_units": "threads of torch",
    "compute_unit_rate": "measured: a product of 1024 × 2048 × 2048, in bfloat16 where the processor has it",
    "hbm_bandwidth": "measured: a reduction of 256 MB",
    "hbm_capacity": "measured: physical memory",
    "launch": "measured: decode of one slot of a small model",
    "drain": "held within launch",
    "stream_efficiency": "measured: decode of one slot of a larger model",
    "gemm_efficiency": "measured: the first chunk of a prompt",
    "cache_efficiency": "measured: decode of 8 long slots, with as many KV heads as query heads",
    "decode_attention_efficiency": "measured: decode of 8 long slots, with a sixth of them",
    "prefill_attention_efficiency": "measured: the last chunk of a prompt",
}


def _toml(constants: dict[str, float]) -> str:
    tables = [
        f"[{name}]\nvalue = {constants[name]!r}\nsource = {json.dumps(source, ensure_ascii=False)}\n"
        for name, source in _MEASURED.items()
    ]
    return "\n".join(('title = "measured here"\nbase = "cpu"\n', *tables))


def _fitted(machine: Machine, name: str, seconds: float, simulated: Callable[[Machine], float]) -> Machine:
    """Return the machine with the constant at which the step takes `seconds`, within its limits."""
    slowest, fastest = (math.log(limit) for limit in (_LAUNCHES if name == "launch" else _EFFICIENCIES))
    for _ in range(40):
        middle = (slowest + fastest) / 2
        change: dict[str, Any] = {name: math.exp(middle)}
        if simulated(replace(machine, **change)) > seconds:
            slowest = middle
        else:
            fastest = middle
    found: dict[str, Any] = {name: math.exp((slowest + fastest) / 2)}
    return replace(machine, **found)


_BANDWIDTH, _PRODUCT = "bandwidth", "product"
_DATA_BYTES = 4 * 64 * 2**20
_PRODUCT_SHAPE = (1024, 2048, 2048)
_PRODUCT_OPERATIONS = 2 * math.prod(_PRODUCT_SHAPE)
_SHORT = 0.05  # seconds: shorter steps run several times a round
_Timed = str | tuple[_Shape, _Step]


def _times(steps: Mapping[_Shape, Sequence[_Step]], options: MeasureOptions) -> dict[_Timed, list[float]]:
    """Return the seconds of each run of each step, of a reduction and of a product."""
    times: dict[_Timed, list[float]] = {}
    for load in range(min(_LOADS, options.repeats)):
        num_rounds = len(range(load, options.repeats, _LOADS))
        for key, seconds in _times_of_load(steps, options, num_rounds).items():
            times.setdefault(key, []).extend(seconds)
    return times


def _times_of_load(
    steps: Mapping[_Shape, Sequence[_Step]], options: MeasureOptions, num_rounds: int
) -> dict[_Timed, list[float]]:
    data = torch.ones(_DATA_BYTES // 4)
    rows, inner, columns = _PRODUCT_SHAPE
    # Without instructions for bfloat16, this product takes 26 s; the backend then multiplies in float32.
    dtype = torch.bfloat16 if onednn.multiplies(torch.bfloat16) else torch.float32
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    with ExitStack() as stack:
        runs: dict[_Timed, Callable[[], float]] = {
            _BANDWIDTH: lambda: _seconds(lambda: data.sum()),
            _PRODUCT: lambda: _seconds(lambda: left @ right),
        }
        for shape, of_shape in steps.items():
            backend = stack.enter_context(_backend(shape, options))
            for step in of_shape:
                runs[shape, step] = partial(_elapsed, backend, step)
        times: dict[_Timed, list[float]] = {key: [] for key in runs}
        for run in runs.values():
            run()  # the first one of each allocates
        for _ in range(num_rounds):
            for key, run in runs.items():
                until = time.perf_counter() + _SHORT
                times[key].append(run())
                while time.perf_counter() < until:
                    times[key].append(run())
    return times


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _elapsed(backend: TorchBackend, step: _Step) -> float:
    return backend.submit(step.batch()).result().elapsed


@contextmanager
def _backend(shape: _Shape, options: MeasureOptions) -> Iterator[TorchBackend]:
    """Yield a warm backend of a model with random weights."""
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
            yield backend
        finally:
            backend.close()
