"""The kernels refuse arguments of a wrong shape, dtype or layout, and name the argument and both values."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.torch_backend.native.kernels import kernels_are_supported, load_kernels

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


def _assert_refused(operator: str, arguments: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """Call an operator with its arguments, then with some changed: only the second call fails."""
    call = getattr(torch.ops.snapserve, operator)
    call(**arguments)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(**(arguments | changes))


def _linear_arguments() -> dict[str, Any]:
    """Return 3 rows of 96 inputs and a weight of 128 outputs."""
    return {
        "input": torch.zeros(3, 96),
        "weight": torch.zeros(2, 96, 64, 1),
        "scales": None,
        "bias": torch.zeros(128),
        "num_products": 128,
        "norm": torch.ones(96),
        "residual": torch.zeros(3, 128),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(3, 96).half()}, "input must have dtype Float or BFloat16, got Half"),
        ({"input": torch.zeros(())}, "input must have dimensions [..., input], got a scalar"),
        ({"input": torch.zeros(3, 0)}, "input must have a positive multiple of 1 inputs"),
        (
            {"input": torch.zeros(3, 97)},
            "weight must have 128 outputs of 97 to 128 inputs for an input of shape [3, 97], got shape",
        ),
        (
            {"weight": torch.zeros(2, 96, 64, 1).bfloat16()},
            "weight must have dtype Byte, Char or input's Float, got BFloat16",
        ),
        (
            {"weight": torch.zeros(64, 96, 2, 1).transpose(0, 2)},
            "weight must be contiguous, got shape [2, 96, 64, 1] with strides [1, 2, 192, 1]",
        ),
        (
            {"weight": torch.zeros(2, 96, 64, 1, dtype=torch.int8)},
            "scales must be given for a weight of dtype Char, got None",
        ),
        ({"scales": torch.ones(128)}, "scales must be None for a weight of dtype Float, got a tensor"),
        (
            {"weight": torch.zeros(2, 96, 64, 1).byte(), "scales": torch.ones(127)},
            "scales must have shape [128] or be longer, got [127]",
        ),
        (
            {
                "input": torch.zeros(3, 98),
                "weight": torch.zeros(2, 98, 64, 1).byte(),
                "scales": torch.ones(128),
            },
            "input must have a positive multiple of 4 inputs for a weight of dtype Byte, got 98",
        ),
        (
            {
                "input": torch.zeros(1, 2**16 + 4),
                "weight": torch.zeros(1, 1).byte(),
                "scales": torch.ones(128),
            },
            "input must have at most 65536 inputs for a weight of dtype Byte, got 65540",
        ),
        (
            {"rows_in_groups": True},
            "a weight of dtype Byte and a multiple of 32 inputs, got dtype Float and 96 inputs",
        ),
        (
            {
                "weight": torch.zeros(2, 96, 64, 1, dtype=torch.int8),
                "scales": torch.ones(128),
                "rows_in_groups": True,
            },
            "a weight of dtype Byte and a multiple of 32 inputs, got dtype Char and 96 inputs",
        ),
        (
            {"weight": torch.zeros(2, 3, 1216).byte(), "rows_in_groups": True},
            "rows_in_groups needs scales",
        ),
        (
            {
                "input": torch.zeros(3, 100),
                "weight": torch.zeros(2, 100, 64, 1).byte(),
                "scales": torch.ones(128),
                "rows_in_groups": True,
            },
            "a weight of dtype Byte and a multiple of 32 inputs, got dtype Byte and 100 inputs",
        ),
        ({"num_products": 0}, "num_products must be positive, got 0"),
        (
            {"weight": torch.zeros(2, 4, 1216).byte()},
            "weight must have shape [2, 3, 1216], got [2, 4, 1216]",
        ),
        (
            {"input": torch.zeros(3, 100), "weight": torch.zeros(2, 3, 1216).byte()},
            "input must have a positive multiple of 32 inputs for a weight in groups, got 100",
        ),
        (
            {"weight": torch.zeros(1, 96, 64, 1), "num_products": 64, "is_gated": True},
            "num_products must be a multiple of 128 when is_gated, got 64",
        ),
        ({"bias": torch.zeros(127)}, "bias must have shape [128], got [127]"),
        ({"bias": torch.zeros(128).double()}, "bias must have dtype Float, got Double"),
        ({"norm": torch.ones(95)}, "norm must have shape [96], got [95]"),
        ({"norm": torch.ones(192)[::2]}, "norm must be contiguous, got shape [96] with strides [2]"),
        ({"residual": torch.zeros(3, 64)}, "residual must have shape [3, 128], got [3, 64]"),
    ],
)
@torch.inference_mode()
def test_linear_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("linear", _linear_arguments(), changes, message)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(64, 32).half(), "weight must have dtype Float or BFloat16, got Half"),
        (torch.zeros(2, 64, 32), "weight must have 2 dimensions [output, input], got shape [2, 64, 32]"),
        (torch.zeros(64, 48), "weight must have a multiple of 32 inputs, got 48"),
    ],
)
def test_quantize_in_groups_names_what_is_wrong(weight: torch.Tensor, message: str) -> None:
    _assert_refused("quantize_in_groups", {"weight": torch.zeros(64, 32)}, {"weight": weight}, message)


@torch.inference_mode()
def test_linear_requires_pairs_of_bfloat16_inputs() -> None:
    hidden, weight = (tensor.bfloat16() for tensor in (torch.zeros(3, 33), torch.zeros(1, 17, 64, 2)))
    with pytest.raises(RuntimeError, match=r"input must have a positive multiple of 2 inputs .*, got 33"):
        torch.ops.snapserve.linear(hidden, weight, None, None, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": torch.zeros(2, 3, 5, 8).double()}, "heads must have dtype Float or BFloat16, got Double"),
        (
            {"heads": torch.zeros(3, 5, 8)},
            "heads must have 4 dimensions [row, head, token, width], got shape [3, 5, 8]",
        ),
        (
            {"heads": torch.zeros(2, 3, 5, 16)[..., ::2]},
            "heads must have a last stride of 1, got strides [240, 80, 16, 2]",
        ),
        ({"heads": torch.zeros(2, 3, 5, 7)}, "heads must have an even width, got 7"),
        ({"cosines": torch.zeros(2, 5, 4)}, "cosines must have shape [2, 5, 8], got [2, 5, 4]"),
        ({"sines": torch.zeros(2, 5, 8).bfloat16()}, "sines must have dtype Float, got BFloat16"),
    ],
)
@torch.inference_mode()
def test_rotate_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    angles = torch.zeros(2, 5, 8)
    arguments = {"heads": torch.zeros(2, 3, 5, 8), "cosines": angles, "sines": angles}
    _assert_refused("rotate", arguments, changes, message)


def _slot_arguments() -> dict[str, Any]:
    """Return 2 rows of 4 heads, 2 KV heads, and 3 slots of 10 entries."""
    return {
        "query": torch.zeros(2, 4, 1, 8),
        "key": torch.zeros(2, 2, 1, 8),
        "value": torch.zeros(2, 2, 1, 6),
        "keys": torch.zeros(3, 2, 10, 8),
        "values": torch.zeros(3, 2, 10, 6),
        "key_scales": None,
        "value_scales": None,
        "entries": torch.zeros(2, 1, dtype=torch.int64),
        "bias": torch.zeros(2, 1, 9),
        "scaling": 1.0,
        "softcap": 0.0,
        "sinks": torch.zeros(4),
        "slots": None,
        "cosines": torch.zeros(2, 1, 8),
        "sines": torch.zeros(2, 1, 8),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 1, 8).half()}, "query must have dtype Float or BFloat16, got Half"),
        ({"query": torch.zeros(2, 4, 8)}, "query must have 4 dimensions [row, head, 1, width], got shape"),
        (
            {"query": torch.zeros(2, 3, 1, 8)},
            "query must have a multiple of 2 heads, the number of KV heads, got",
        ),
        ({"query": torch.zeros(2, 4, 2, 8)}, "query must have shape [2, 4, 1, 8], got [2, 4, 2, 8]"),
        ({"key": torch.zeros(1, 2, 1, 8)}, "key must have shape [2, 2, 1, 8], got [1, 2, 1, 8]"),
        ({"key": torch.zeros(2, 2, 1, 8).bfloat16()}, "key must have dtype Float, got BFloat16"),
        ({"value": torch.zeros(2, 2, 1, 12)[..., ::2]}, "value must have a last stride of 1, got strides"),
        ({"keys": torch.zeros(3, 2, 10, 6)}, "keys must have shape [3, 2, 10, 8], got [3, 2, 10, 6]"),
        ({"values": torch.zeros(3, 2, 9, 6)}, "values must have shape [3, 2, 10, 6], got [3, 2, 9, 6]"),
        (
            {"keys": torch.zeros(2, 3, 10, 8).transpose(0, 1)},
            "keys must be contiguous, got shape [3, 2, 10, 8]",
        ),
        (
            {"key_scales": torch.zeros(3, 2, 10, 1)},
            "key_scales and value_scales must both be given or both be None, got key_scales alone",
        ),
        (
            {name: torch.zeros(3, 2, 10, 1).bfloat16() for name in ("key_scales", "value_scales")},
            "keys must have dtype Char, got Float",
        ),
        (
            {
                "keys": torch.zeros(3, 2, 10, 8).char(),
                "values": torch.zeros(3, 2, 10, 6).char(),
                "key_scales": torch.zeros(3, 2, 10, 1).bfloat16(),
                "value_scales": torch.zeros(3, 2, 10).bfloat16(),
            },
            "value_scales must have shape [3, 2, 10, 1], got [3, 2, 10]",
        ),
        ({"entries": torch.zeros(2, 1).int()}, "entries must have dtype Long, got Int"),
        ({"entries": torch.tensor([[0], [10]])}, "entries must be in [0, 10), got 10 in row 1"),
        ({"bias": torch.zeros(2, 1, 9).double()}, "bias must have dtype Float, got Double"),
        ({"bias": torch.zeros(2, 1, 10)}, "bias must cover fewer entries than a slot's 10, got 10"),
        ({"sinks": torch.zeros(2)}, "sinks must have shape [4], got [2]"),
        ({"cosines": torch.zeros(2, 1, 4)}, "cosines must have shape [2, 1, 8], got [2, 1, 4]"),
        ({"sines": None}, "cosines and sines must both be given or both be None, got cosines alone"),
        (
            {"keys": torch.zeros(1, 2, 10, 8), "values": torch.zeros(1, 2, 10, 6)},
            "query must have at most one row per slot, 1, got 2",
        ),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "slots must have shape [2], got [1]"),
        ({"slots": torch.tensor([2, 3])}, "slots must be in [0, 3), got 3 in row 1"),
    ],
)
@torch.inference_mode()
def test_slot_attention_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("slot_attention", _slot_arguments(), changes, message)


def _sparse_arguments() -> dict[str, Any]:
    """Return the same slots with heads of 8, and stores of 2 blocks of 16 tokens."""
    slots = _slot_arguments()
    del slots["key_scales"], slots["value_scales"], slots["slots"]
    return slots | {
        "value": torch.zeros(2, 2, 1, 8),
        "values": torch.zeros(3, 2, 10, 8),
        "key_codes": torch.zeros(3, 2, 2, 1, 16, 4, dtype=torch.uint8),
        "value_codes": torch.zeros(3, 2, 32, 4, dtype=torch.uint8),
        "key_steps": torch.zeros(3, 2, 2, 1, 16).bfloat16(),
        "value_steps": torch.zeros(3, 2, 32, 1).bfloat16(),
        "centres": torch.zeros(3, 2, 8),
        "num_stored": torch.tensor([0, 32]),
        "num_attended": 5,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"value": torch.zeros(2, 2, 1, 6), "values": torch.zeros(3, 2, 10, 6)},
            "keys and values must have a multiple of 8 numbers, got 8 and 6",
        ),
        (
            {"key_codes": torch.zeros(3, 2, 32, 4, dtype=torch.uint8)},
            "key_codes must have 6 dimensions [slot, kv_head, block, width / 8, 16, 4], got shape",
        ),
        (
            {"key_codes": torch.zeros(3, 2, 1, 1, 16, 4, dtype=torch.uint8)},
            "value_codes must have shape [3, 2, 16, 4], got [3, 2, 32, 4]",
        ),
        ({"value_codes": torch.zeros(3, 2, 32, 4)}, "value_codes must have dtype Byte, got Float"),
        ({"key_steps": torch.zeros(3, 2, 32)}, "key_steps must have dtype BFloat16, got Float"),
        (
            {"key_steps": torch.zeros(3, 2, 2, 16, 1).bfloat16()},
            "key_steps must have shape [3, 2, 2, 1, 16], got [3, 2, 2, 16, 1]",
        ),
        (
            {"value_steps": torch.zeros(3, 2, 31, 1).bfloat16()},
            "value_steps must have shape [3, 2, 32, 1], got",
        ),
        ({"centres": torch.zeros(3, 2, 16)}, "centres must have shape [3, 2, 8], got [3, 2, 16]"),
        ({"num_stored": torch.tensor([0])}, "num_stored must have shape [2], got [1]"),
        ({"num_stored": torch.tensor([-1, 32])}, "num_stored must be in [0, 32], got -1 in row 0"),
        ({"num_stored": torch.tensor([0, 33])}, "num_stored must be in [0, 32], got 33 in row 1"),
        ({"num_attended": 0}, "num_attended must be at least 1, got 0"),
        ({"keys": torch.zeros(3, 2, 10, 8).char()}, "keys must have dtype Float, got Char"),
        ({"sines": None}, "cosines and sines must both be given or both be None, got cosines alone"),
    ],
)
@torch.inference_mode()
def test_sparse_attention_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("sparse_attention", _sparse_arguments(), changes, message)


def _prompt_arguments() -> dict[str, Any]:
    """Return 2 rows of 4 heads and 5 tokens, and 2 KV heads of 7 entries."""
    return {
        "query": torch.zeros(2, 4, 5, 8),
        "key": torch.zeros(2, 2, 7, 8),
        "value": torch.zeros(2, 2, 7, 6),
        "last_seen": torch.zeros(2, 5, dtype=torch.int64),
        "window": 7,
        "scaling": 1.0,
        "softcap": 0.0,
        "sinks": torch.zeros(4),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 5, 8).half()}, "query must have dtype Float or BFloat16, got Half"),
        (
            {"query": torch.zeros(2, 5, 5, 8)},
            "query must have a multiple of 2 heads, the number of KV heads, got",
        ),
        ({"query": torch.zeros(2, 4, 5, 16)[..., ::2]}, "query must have a last stride of 1, got strides"),
        (
            {"query": torch.zeros(2, 4, 5, 7), "key": torch.zeros(2, 2, 7, 7)},
            "query must have an even width, got 7",
        ),
        ({"key": torch.zeros(2, 2, 7)}, "key must have 4 dimensions [row, kv_head, entry, width], got shape"),
        ({"key": torch.zeros(2, 2, 7, 6)}, "key must have shape [2, 2, 7, 8], got [2, 2, 7, 6]"),
        ({"value": torch.zeros(2, 2, 6, 6)}, "value must have shape [2, 2, 7, 6], got [2, 2, 6, 6]"),
        ({"value": torch.zeros(2, 2, 7, 6).bfloat16()}, "value must have dtype Float, got BFloat16"),
        ({"last_seen": torch.zeros(2, 5)}, "last_seen must have dtype Long, got Float"),
        ({"last_seen": torch.zeros(2, 4).long()}, "last_seen must have shape [2, 5], got [2, 4]"),
        ({"last_seen": torch.zeros(5, 2).long().T}, "last_seen must be contiguous, got shape [2, 5]"),
        (
            {"last_seen": torch.tensor([[0] * 5, [7] * 5])},
            "last_seen must be below the number of entries, 7, got 7 in row 1",
        ),
        ({"sinks": torch.zeros(2)}, "sinks must have shape [4], got [2]"),
    ],
)
@torch.inference_mode()
def test_prompt_attention_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("prompt_attention", _prompt_arguments(), changes, message)


def _votes_arguments() -> dict[str, Any]:
    """Return 4 heads of 5 queries, and 2 KV heads of 7 entries."""
    return {
        "query": torch.zeros(4, 5, 8),
        "key": torch.zeros(2, 7, 8),
        "last_seen": torch.zeros(5, dtype=torch.int64),
        "strength": torch.ones(5),
        "first": 0,
        "end": 7,
        "scaling": 1.0,
        "softcap": 0.0,
        "is_sum": True,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(4, 5, 8).half()}, "query must have dtype Float or BFloat16, got Half"),
        (
            {"query": torch.zeros(3, 5, 8)},
            "query must have a multiple of 2 heads, the number of KV heads, got",
        ),
        (
            {"query": torch.zeros(4, 5, 7), "key": torch.zeros(2, 7, 7)},
            "query must have an even width, got 7",
        ),
        ({"key": torch.zeros(2, 7, 6)}, "key must have shape [2, 7, 8], got [2, 7, 6]"),
        ({"key": torch.zeros(2, 7, 8).bfloat16()}, "key must have dtype Float, got BFloat16"),
        (
            {"key": torch.zeros(2, 7, 16)[..., ::2]},
            "key must have a last stride of 1, got strides [112, 16, 2]",
        ),
        ({"last_seen": torch.zeros(4).long()}, "last_seen must have shape [5], got [4]"),
        (
            {"last_seen": torch.full((5,), 7)},
            "last_seen must be below the number of entries, 7, got 7",
        ),
        ({"strength": torch.ones(5).double()}, "strength must have dtype Float, got Double"),
        ({"strength": torch.ones(10)[::2]}, "strength must be contiguous, got shape [5] with strides [2]"),
        ({"first": -1}, "first must be at least 0, got -1"),
    ],
)
@torch.inference_mode()
def test_window_votes_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("window_votes", _votes_arguments(), changes, message)


def _draw_arguments() -> dict[str, Any]:
    """Return 3 slots and 10 tokens."""
    floats, integers = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    return {
        "logits": torch.zeros(3, 10),
        "is_live": torch.ones(3, dtype=torch.bool),
        "temperature": floats,
        "top_p": floats,
        "min_p": floats,
        "top_k": integers,
        "seed": integers,
        "choice": integers,
        "output_index": integers,
        "step": 0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(10)}, "logits must have 2 dimensions [slot, token], got shape [10]"),
        ({"is_live": torch.ones(3)}, "is_live must have dtype Bool, got Float"),
        ({"temperature": torch.ones(2)}, "temperature must have shape [3], got [2]"),
        ({"top_p": torch.ones(3).double()}, "top_p must have dtype Float, got Double"),
        ({"min_p": torch.ones(3).half()}, "min_p must have dtype Float, got Half"),
        ({"top_k": torch.ones(3).int()}, "top_k must have dtype Long, got Int"),
        ({"seed": torch.zeros(4).long()}, "seed must have shape [3], got [4]"),
        ({"choice": torch.zeros(3)}, "choice must have dtype Long, got Float"),
        ({"output_index": torch.zeros(3, 1).long()}, "output_index must have shape [3], got [3, 1]"),
    ],
)
@torch.inference_mode()
def test_draw_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("draw", _draw_arguments(), changes, message)


def _state_arguments() -> dict[str, Any]:
    """Return 2 rows of 6 heads of 4 channels, in 3 slots, with 2 groups of 8 numbers."""
    return {
        "states": torch.zeros(3, 6, 4, 8),
        "is_live": torch.ones(2, dtype=torch.bool),
        "decay": torch.zeros(2, 6),
        "added": torch.zeros(2, 6, 4),
        "writes": torch.zeros(2, 2, 8),
        "reads": torch.zeros(2, 2, 8),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"states": torch.zeros(3, 6, 32)},
            "states must have 4 dimensions [slot, head, channel, number], got",
        ),
        ({"states": torch.zeros(1, 6, 4, 8)}, "states must have a slot for each of 2 rows, got 1"),
        ({"states": torch.zeros(3, 6, 4, 8).bfloat16()}, "states must have dtype Float, got BFloat16"),
        ({"is_live": torch.ones(2)}, "is_live must have dtype Bool, got Float"),
        ({"decay": torch.zeros(2, 5)}, "decay must have shape [2, 6], got [2, 5]"),
        ({"added": torch.zeros(2, 4, 6).mT}, "added must be contiguous, got shape [2, 6, 4]"),
        ({"writes": torch.zeros(2, 4, 8)}, "writes must have groups of equally many of 6 heads, got 4"),
        ({"reads": torch.zeros(2, 3, 8)}, "reads must have shape [2, 2, 8], got [2, 3, 8]"),
    ],
)
@torch.inference_mode()
def test_advance_states_names_the_wrong_argument(changes: dict[str, Any], message: str) -> None:
    _assert_refused("advance_states", _state_arguments(), changes, message)
