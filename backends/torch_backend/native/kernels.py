"""The operators of the C++ kernels: their schemas, their build, and functions that call them.

Importing this module only declares the operators, so a graph with them can be traced before they are built.
`load_kernels` makes them callable in this process, and a backend's `Kernels` says whether it calls them.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from backends.interface import BackendUnusableError
from backends.torch_backend.torch_private import onednn
from cache.scoring import Window

SOURCES = Path(__file__).parent
BLOCK = 64  # outputs of a block in a packed weight; `kBlock` in tile.h
PADDING_BYTES = 64  # oneDNN pads an output's inputs with zeros to a multiple of this
GROUP = 32  # inputs that share a scale and a zero point in a weight of 4 bits; `kGroup` in groups.h
STEPS = 16  # of a zero point in a level; `kPerZeroPoint` in groups.h
GROUP_BYTES = GROUP * BLOCK // 2 + 3 * BLOCK  # of a block; the size of `Group` in groups.h

_DTYPES = (torch.float32, torch.bfloat16)
# Without contraction, products are rounded before they are added, as torch's are. Where the source calls
# `fmadd`, it is still fused.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")


class InstructionSet(NamedTuple):
    """A set of instructions that the kernels can be built for."""

    needs: tuple[str, ...]  # torch's names of the newest of the instructions
    architecture: str  # the compiler's flag
    vectors: str  # torch's name of the vectors

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags for torch's headers."""
        return (f"-DCPU_CAPABILITY={self.vectors}", f"-DCPU_CAPABILITY_{self.vectors}")


# The best first. The last two compute in bfloat16 by float32.
INSTRUCTION_SETS = {
    "amx_bf16": InstructionSet(("amx_bf16",), "-march=sapphirerapids", "AVX512"),
    "avx512_bf16": InstructionSet(("avx512_bf16",), "-march=cooperlake", "AVX512"),
    "avx512_vnni": InstructionSet(("avx512_vnni",), "-march=cascadelake", "AVX512"),
    "avx2": InstructionSet(("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"), "-march=haswell", "AVX2"),
}

_library = torch.library.Library("snapserve", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    (
        "linear(Tensor input, Tensor weight, Tensor? scales, Tensor? bias, int num_products, *, "
        "Tensor? norm=None, float epsilon=0.0, Tensor? residual=None, bool is_gated=False, "
        "bool rows_in_groups=False) -> Tensor"
    ),
    (
        "experts(Tensor input, Tensor chosen, Tensor strengths, Tensor first, Tensor? first_scales, "
        "Tensor? first_bias, Tensor second, Tensor? second_scales, Tensor? second_bias, *, "
        "str activation, float slope, float limit) -> Tensor"
    ),
    (
        "slot_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor entries, Tensor bias, "
        "float scaling, float softcap, Tensor? sinks, Tensor? slots, *, Tensor? cosines=None, "
        "Tensor? sines=None) -> Tensor"
    ),
    (
        "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor(c!) key_codes, Tensor(d!) value_codes, Tensor(e!) key_steps, Tensor(f!) value_steps, "
        "Tensor centres, Tensor entries, Tensor bias, Tensor num_stored, int num_attended, float scaling, "
        "float softcap, Tensor? sinks, *, Tensor? cosines=None, Tensor? sines=None) -> Tensor"
    ),
    (
        "advance_states(Tensor(a!) states, Tensor is_live, Tensor decay, Tensor added, Tensor writes, "
        "Tensor reads) -> Tensor"
    ),
    "quantize_in_groups(Tensor weight) -> Tensor",
    "rotate(Tensor heads, Tensor cosines, Tensor sines) -> Tensor",
    (
        "prompt_attention(Tensor query, Tensor key, Tensor value, Tensor last_seen, int window, "
        "float scaling, float softcap, Tensor? sinks) -> Tensor"
    ),
    (
        "window_votes(Tensor query, Tensor key, Tensor last_seen, Tensor strength, int first, int end, "
        "float scaling, float softcap, bool is_sum) -> Tensor"
    ),
    (
        "draw(Tensor logits, Tensor is_live, Tensor temperature, Tensor top_p, Tensor min_p, Tensor top_k, "
        "Tensor seed, Tensor choice, Tensor output_index, int step) -> Tensor"
    ),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


# Tracing calls these in place of the kernels, for the shapes and strides of the outputs. Operators that no
# graph contains need none.


@torch.library.register_fake("snapserve::linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake_linear(
    hidden: Tensor,
    weight: Tensor,  # noqa: ARG001
    scales: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    num_products: int,
    *,
    is_gated: bool = False,
    **_: object,
) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], num_products // 2 if is_gated else num_products)


@torch.library.register_fake("snapserve::experts", lib=_library)  # type: ignore[untyped-decorator]
def _fake_experts(hidden: Tensor, *_: object, **__: object) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.register_fake("snapserve::sparse_attention", lib=_library)  # type: ignore[untyped-decorator]
@torch.library.register_fake("snapserve::slot_attention", lib=_library)  # type: ignore[untyped-decorator]
def _fake_slot_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:  # noqa: ARG001
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


@torch.library.register_fake("snapserve::advance_states", lib=_library)  # type: ignore[untyped-decorator]
def _fake_advance_states(
    states: Tensor,  # noqa: ARG001
    is_live: Tensor,  # noqa: ARG001
    decay: Tensor,  # noqa: ARG001
    added: Tensor,
    *_: Tensor,
) -> Tensor:
    return added.new_empty(added.shape)


@torch.library.register_fake("snapserve::rotate", lib=_library)  # type: ignore[untyped-decorator]
def _fake_rotate(heads: Tensor, *_: object) -> Tensor:
    # The memory of the output is [row, token, head, width] for any layout of the input.
    by_token = heads.transpose(1, 2)
    return by_token.new_empty(by_token.shape).transpose(1, 2)


class ExpertWeights(NamedTuple):
    """The weights of a product of all experts, for `packed_experts`."""

    weight: Tensor  # [expert, output, input], or as of `in_groups` [expert, block, group, `GROUP_BYTES`]
    scales: Tensor | None  # [expert, output], float32; None for weights of the rows' type and in groups
    bias: Tensor | None  # [expert, output]


@dataclass
class Kernels:
    """What a backend does with the kernels. They may be built while it already serves."""

    are_used: bool = False
    can_quantize: bool = False  # they were there before the model: they quantise its weights
    _preparations: list[Callable[[], None]] = field(default_factory=list)

    def when_used(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` before the kernels are first used: at once if they are used already."""
        if self.are_used:
            prepare()
        else:
            self._preparations.append(prepare)

    def use(self) -> None:
        """Run the preparations, then use the kernels from now on.

        Raises `BackendUnusableError` if one fails, as without memory: some weights are packed and others not.
        """
        try:
            while self._preparations:
                self._preparations.pop()()
        except Exception as error:
            raise BackendUnusableError("the weights could not be packed for the kernels") from error
        self.are_used = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the kernels inside the `with` block only, as when a graph with them is traced."""
        before = self.are_used
        self.are_used = True
        try:
            yield
        finally:
            self.are_used = before


def instruction_set() -> str | None:
    """Return the best of `INSTRUCTION_SETS` that this processor has, if it has one."""
    has = torch.cpu.get_capabilities()
    names = (name for name, each in INSTRUCTION_SETS.items() if all(has.get(need) for need in each.needs))
    return next(names, None)


def kernels_are_supported() -> bool:
    """Return whether this processor has the instructions of the kernels: at least AVX2 with FMA."""
    return instruction_set() is not None


def sources() -> list[str]:
    """Return the texts of the kernels' source files."""
    return [path.read_text() for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))]


def build_kernels(target: Path, name: str | None = None) -> None:
    """Compile the kernels into the shared library `target`. Takes 10 to 40 s.

    `name` is one of `INSTRUCTION_SETS`, by default this processor's best one with all that it has besides.
    Raises OSError without a compiler, and CalledProcessError when the compilation fails.
    """
    instructions = INSTRUCTION_SETS[name or instruction_set() or "avx2"]
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    partial = target.with_suffix(f".{os.getpid()}")  # renamed at the end: no process loads half a library
    command = [
        os.environ.get("CXX", "g++"),
        "-march=native" if name is None else instructions.architecture,
        *FLAGS,
        *instructions.flags,
        f"-I{torch_folder / 'include'}",
        str(SOURCES / "kernels.cpp"),
        *libraries,
        "-o",
        str(partial),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    partial.replace(target)


def load_kernels(path: Path) -> None:
    """Load the library that `build_kernels` wrote. Loading it again does nothing."""
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]


def packed_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_outputs: int,
    scales: Tensor | None = None,
    *,
    rows_in_groups: bool = False,
) -> Tensor:
    """Return the product of rows [..., input] with a packed weight, in the rows' type: [..., output].

    The weight has the layout of `in_blocks`. An int8 or uint8 weight has float32 `scales` [output]. A uint8
    weight has the zero point 128, and its rows are quantised to int8 first, with one scale, or with one for
    each group of inputs if `rows_in_groups`. A uint8 weight without scales is one of `in_groups`, whose rows
    have a scale for each group, too.
    """
    output: Tensor = torch.ops.snapserve.linear(
        hidden, weight, scales, bias, num_outputs, rows_in_groups=rows_in_groups
    )
    return output


def packed_experts(
    hidden: Tensor,
    chosen: Tensor,
    strengths: Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    *,
    activation: str,
    slope: float,
    limit: float,
) -> Tensor:
    """Return the sums of the experts that were chosen for each row, times their strengths: as `hidden`.

    `hidden` is [row, width], `chosen` (int64) and `strengths` are [row, choice]. A choice that is no expert
    counts for nothing. The weights [expert, output, input] are whole blocks of outputs, each packed as
    `in_blocks` does for its expert, and types are those of `packed_linear`. If `first` has twice the blocks
    of `second`'s inputs, its first half are gates of the other half. `activation` is `silu`, `gelu_tanh`,
    `squared_relu` or `clamped_swish`: only the last one has a `slope` and a `limit`.
    """
    output: Tensor = torch.ops.snapserve.experts(
        hidden, chosen, strengths, *first, *second, activation=activation, slope=slope, limit=limit
    )
    return output


def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    planes: tuple[Tensor, ...],
    entries: Tensor,
    bias: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    slots: Tensor | None = None,
) -> Tensor:
    """Write each row's new token to its slot, then attend over its entries: [row, 1, head, value width].

    `slots` [row] may name a slot several times: all tokens are written before any row attends. Without them,
    row i has slot i. `query`, `key` and `value` are [row, head, 1, width]. `planes` are the slots' keys and
    values [slot, kv_head, entry, width], and for int8 both planes' scales [slot, kv_head, entry, 1]. Their
    `entries` [row, 1] are written. `bias` [row, 1, entry], float32, is added to the scores: an entry below
    -1e30 is masked.
    """
    sinks = None if sinks is None else sinks.to(query.dtype)
    keys, values, key_scales, value_scales = planes if len(planes) == 4 else (*planes, None, None)
    output: Tensor = torch.ops.snapserve.slot_attention(
        query,
        key,
        value,
        keys,
        values,
        key_scales,
        value_scales,
        entries,
        bias,
        scaling,
        softcap or 0.0,
        sinks,
        slots,
    )
    return output


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    planes: tuple[Tensor, ...],
    entries: Tensor,
    bias: Tensor,
    num_stored: Tensor,
    num_attended: int,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Do as `slot_attention`, and also attend to the `num_attended` best tokens of each row's store.

    `planes` are the slots' keys and values, then the planes of `cache.token_store`. `num_stored` [row] are
    the tokens in the stores. The last one is the token in the entry that is written: it is stored first.
    """
    sinks = None if sinks is None else sinks.to(query.dtype)
    output: Tensor = torch.ops.snapserve.sparse_attention(
        query, key, value, *planes, entries, bias, num_stored, num_attended, scaling, softcap or 0.0, sinks
    )
    return output


def advance_states(
    states: Tensor, is_live: Tensor, decay: Tensor, added: Tensor, writes: Tensor, reads: Tensor
) -> Tensor:
    """Do as `recurrent.advance_states`. A row that is not live has zeros in place of outputs."""
    rows = (each.contiguous() for each in (decay, added, writes, reads))
    output: Tensor = torch.ops.snapserve.advance_states(states, is_live, *rows)
    return output


def takes_prompt(query: Tensor) -> bool:
    """Return whether `prompt_attention` supports the type and width of `query` [row, head, token, width]."""
    return query.dtype in _DTYPES and query.shape[3] % 2 == 0


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    last_seen: Tensor,
    sliding_window: int | None,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over entries in the order of their sequence: [row, token, head, value width].

    `query` is [row, head, token, width]; `key` and `value` are [row, kv_head, entry, width]. The width of
    queries and keys is even. A token sees entries up to `last_seen` [row, token], or only the last
    `sliding_window` of these. A token whose `last_seen` is -1 sees none, and its output is 0.
    """
    sinks = None if sinks is None else sinks.to(query.dtype)
    window = key.shape[2] if sliding_window is None else sliding_window
    output: Tensor = torch.ops.snapserve.prompt_attention(
        query, key, value, last_seen, window, scaling, softcap or 0.0, sinks
    )
    return output


def observed_attention(window: Window) -> Tensor:
    """Return the same votes as `cache.scoring.reduced_attention`: float32 [head, key].

    Queries and keys need an even width, and each `last_seen` must be below the number of keys.
    """
    votes: Tensor = torch.ops.snapserve.window_votes(*window._replace(softcap=window.softcap or 0.0))
    return votes


def draw_tokens(
    logits: Tensor,
    is_live: Tensor,
    *,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    seed: Tensor,
    choice: Tensor,
    output_index: Tensor,
    step: int,
) -> Tensor:
    """Return the token that each live slot draws from its `logits` [slot, token], and 0 for others: [slot].

    `is_live` and the parameters are [slot]: float32 up to `min_p`, int64 from `top_k` on. The random number
    depends on `seed`, `choice` and the position `output_index + step`.
    """
    tokens: Tensor = torch.ops.snapserve.draw(
        logits, is_live, temperature, top_p, min_p, top_k, seed, choice, output_index, step
    )
    return tokens


def in_blocks(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight [output, input] packed for products with rows of `dtype`: [block, input / p, 64, p].

    `p` neighbouring inputs of an output fill 4 bytes: 1 of float32, 2 of bfloat16 or 4 of int8. Outputs of
    zeros fill the last block.
    """
    pack = 4 // dtype.itemsize
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK))
    return padded.view(-1, BLOCK, weight.shape[1] // pack, pack).transpose(1, 2)


def in_groups(levels: Tensor, scales: Tensor, zero_points: Tensor, num_inputs: int) -> Tensor:
    """Return a weight of 4 bits as `packed_linear` takes it: uint8 [block, group, `GROUP_BYTES`].

    `levels` [32, output × group] are 0 to 15, `scales` are bfloat16, and `zero_points` are uint8, in steps of
    1/16: both are [output × group]. Outputs are whole blocks.
    """
    num_groups = num_inputs // GROUP
    parts = levels.view(GROUP // 8, 2, 4, -1, BLOCK, num_groups)
    pairs = (parts[:, 0] | parts[:, 1] << 4).permute(2, 4, 0, 3, 1)  # [block, group, 4, 64, 4]
    by_group = (each.view(-1, BLOCK, num_groups).mT for each in (zero_points, scales))
    tail = [each.contiguous().view(torch.uint8) for each in by_group]
    return torch.cat([pairs.flatten(2), *tail], dim=2)


def taken_from_groups(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels [output, group, 32], scales and zero points [output, group, 1] of `in_groups`' weight."""
    num_blocks, num_groups, _ = packed.shape
    pairs, zero_points, scales = torch.split(packed, [GROUP * BLOCK // 2, BLOCK, 2 * BLOCK], dim=2)
    parts = torch.stack([pairs & 15, pairs >> 4], dim=3).view(num_blocks, num_groups, -1, BLOCK, 4, 2)
    levels = parts.permute(0, 3, 1, 2, 5, 4).reshape(num_blocks * BLOCK, num_groups, GROUP)
    by_group = (scales.contiguous().view(torch.bfloat16), zero_points)
    scales, zero_points = (each.mT.reshape(-1, num_groups, 1) for each in by_group)
    return levels, scales, zero_points


def takes_weight(weight: Tensor) -> bool:
    """Return whether `packed_linear` takes a weight [output, input] of this type and number of inputs."""
    if weight.dtype not in _DTYPES or not kernels_are_supported():
        return False
    return weight.shape[1] % (4 // weight.dtype.itemsize) == 0


def packed_weight(reordered: Tensor, weight: Tensor) -> Tensor | None:
    """Return the memory of a `weight` [output, input] that oneDNN has reordered, or None if it is not packed.

    The tensor shares the memory of `reordered`. oneDNN promises no layout, so each weight is compared with
    that of `in_blocks`, its inputs padded to 64 bytes.
    """
    if not takes_weight(weight):
        return None
    num_zeros = -weight.shape[1] % (PADDING_BYTES // weight.dtype.itemsize)
    if num_zeros:  # padding by nothing would copy the weight
        weight = torch.nn.functional.pad(weight, (0, num_zeros))
    expected = in_blocks(weight, weight.dtype)
    memory = onednn.memory(reordered)
    if memory.nbytes != expected.nbytes:
        return None
    packed = memory.view(weight.dtype).view(expected.shape)
    return packed if torch.equal(packed, expected) else None
