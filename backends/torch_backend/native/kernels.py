"""The operators of `native/` as torch sees them: what they take, what they return, and how they are built and loaded.

Here they are only declared, so that a graph with them can be traced where they were never built. They live in this process once loaded;
whether a backend uses them is said by its own `Kernels`.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from backends.torch_backend.torch_private import onednn
from cache.scoring import Window

SOURCES = Path(__file__).parent
BLOCK = 64  # outputs that a weight's layout keeps together
_FILLED_BYTES = 64  # oneDNN fills an output's inputs up to whole ones of these

_DTYPES = (torch.float32, torch.bfloat16)
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-DCPU_CAPABILITY=AVX512",
    "-DCPU_CAPABILITY_AVX512",
)

_library = torch.library.Library("snapserve", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor input, Tensor weight, Tensor? scales, Tensor? bias, int num_products, *, Tensor? norm=None, float epsilon=0.0, "
    "Tensor? residual=None, bool is_gated=False) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "slot_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor entries, Tensor bias, "
    "float scaling, float softcap, Tensor? sinks, *, Tensor? cosines=None, Tensor? sines=None) -> Tensor"
)
_library.define("rotate(Tensor heads, Tensor cosines, Tensor sines) -> Tensor")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "prompt_attention(Tensor query, Tensor key, Tensor value, Tensor last_seen, int window, float scaling, float softcap, Tensor? sinks) "
    "-> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "window_votes(Tensor query, Tensor key, Tensor last_seen, Tensor strength, int first, int end, float scaling, float softcap, "
    "bool is_sum) -> Tensor"
)
_library.define(  # type: ignore[no-untyped-call]
    "draw(Tensor logits, Tensor is_live, Tensor temperature, Tensor top_p, Tensor min_p, Tensor top_k, Tensor seed, Tensor choice, "
    "Tensor output_index, int number) -> Tensor"
)


@torch.library.register_fake("snapserve::linear", lib=_library)  # type: ignore[untyped-decorator]
def _linear_shape(
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


@torch.library.register_fake("snapserve::slot_attention", lib=_library)  # type: ignore[untyped-decorator]
def _attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:  # noqa: ARG001
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


@torch.library.register_fake("snapserve::rotate", lib=_library)  # type: ignore[untyped-decorator]
def _rotated_shape(heads: Tensor, *_: object) -> Tensor:
    return heads.transpose(1, 2).new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


@dataclass
class Kernels:
    """Whether a backend's steps go through the kernels."""

    are_used: bool = False
    _preparations: list[Callable[[], None]] = field(default_factory=list)

    def when_used(self, prepare: Callable[[], None]) -> None:
        """Have something prepared for them before they are used: now, if they are already."""
        if self.are_used:
            prepare()
        else:
            self._preparations.append(prepare)

    def use(self) -> None:
        """Use them from now on."""
        while self._preparations:
            self._preparations.pop()()
        self.are_used = True

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use them for a while, as when a graph is traced for later."""
        before, self.are_used = self.are_used, True
        try:
            yield
        finally:
            self.are_used = before


def kernels_are_supported() -> bool:
    """Return whether this processor has the instructions that the kernels are written in."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def build_kernels(target: Path) -> None:
    """Compile the kernels, in about 10 s. Raises OSError without a compiler and CalledProcessError when it fails."""
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    partial = target.with_suffix(f".{os.getpid()}")
    command = [
        os.environ.get("CXX", "g++"),
        *_FLAGS,
        f"-I{torch_folder / 'include'}",
        str(SOURCES / "kernels.cpp"),
        *libraries,
        "-o",
        str(partial),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    partial.replace(target)


def load_kernels(path: Path) -> None:
    """Load what `build_kernels` made; a second time does nothing."""
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]


def packed_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, num_outputs: int, scales: Tensor | None = None
) -> Tensor:
    """Return the product of rows [..., input] and a packed weight: [..., output]. An int8 weight has float32 `scales` [output]."""
    output: Tensor = torch.ops.snapserve.linear(hidden, weight, scales, bias, num_outputs)
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
) -> Tensor:
    """Write each row's new token to its entry of the first slots and attend over those that `bias` does not hide: [row, 1, head, width].

    `query`, `key` and `value` are [row, head, 1, width], `planes` are [slot, kv_head, entry, width], `entries` [row, 1], `bias` float32
    [row, 1, entry].
    """
    sinks = None if sinks is None else sinks.to(query.dtype)
    output: Tensor = torch.ops.snapserve.slot_attention(
        query, key, value, *planes, entries, bias, scaling, softcap or 0.0, sinks
    )
    return output


def takes_prompt(query: Tensor) -> bool:
    """Return whether `prompt_attention` attends for such queries."""
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
    """Attend over entries in the order of their sequence: [row, token, head, width].

    `query`, `key` and `value` are [row, head, token or entry, width], the width of the first two even. `last_seen` [row, token]: a token
    sees this entry and those before it, of which there are `sliding_window` at most; −1: it sees none, and its output is 0.
    """
    sinks = None if sinks is None else sinks.to(query.dtype)
    window = key.shape[2] if sliding_window is None else sliding_window
    output: Tensor = torch.ops.snapserve.prompt_attention(
        query, key, value, last_seen, window, scaling, softcap or 0.0, sinks
    )
    return output


def observed_attention(window: Window) -> Tensor:
    """Do what `cache.scoring.reduced_attention` does. Queries and keys have an even width, and a query sees only keys that are there."""
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
    number: int,
) -> Tensor:
    """Return the token [slot] that each live slot draws from its `logits` [slot, token] at `output_index + number`; 0 where it is not live.

    The others are [slot], in float32 and int64.
    """
    tokens: Tensor = torch.ops.snapserve.draw(
        logits, is_live, temperature, top_p, min_p, top_k, seed, choice, output_index, number
    )
    return tokens


def in_blocks(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight [output, input] as `linear` reads it for rows of `dtype`: [block, input / p, 64, p], filled up with zeros.

    `p` inputs, 2 of bfloat16 and 1 of float32, lie side by side.
    """
    pack = 4 // dtype.itemsize
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK))
    return padded.view(-1, BLOCK, weight.shape[1] // pack, pack).transpose(1, 2)


def packed_weight(reordered: Tensor, weight: Tensor) -> Tensor | None:
    """Return the memory of a `weight` [output, input] that oneDNN has reordered, as `linear` takes it; None where it lies otherwise.

    The tensor is valid as long as `reordered` is. oneDNN promises no layout, so that each weight is compared with what is expected.
    """
    if not kernels_are_supported() or weight.dtype not in _DTYPES:
        return None
    num_inputs, size = weight.shape[1], weight.dtype.itemsize
    if num_inputs % (4 // size):
        return None
    expected = in_blocks(
        torch.nn.functional.pad(weight, (0, -num_inputs % (_FILLED_BYTES // size))), weight.dtype
    )
    memory = onednn.memory(reordered)
    if memory.nbytes != expected.nbytes:
        return None
    packed = memory.view(weight.dtype).view(expected.shape)
    return packed if torch.equal(packed, expected) else None
