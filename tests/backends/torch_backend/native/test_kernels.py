"""The kernels equal float64 or torch's operations, and a row's result does not depend on the batch."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends.torch_backend.model.attention import MASKED, grouped_attention
from backends.torch_backend.model.linear import ReorderedLinear
from backends.torch_backend.native.kernels import (
    Kernels,
    kernels_are_supported,
    load_kernels,
    observed_attention,
    packed_linear,
    prompt_attention,
    slot_attention,
    takes_prompt,
)
from backends.torch_backend.torch_private import onednn
from cache.quantization import dequantize, quantize
from cache.scoring import Window, reduced_attention
from tests.pairs import pairwise_cases

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "sizes", [(64, 64), (96, 100), (160, 40), (32, 3), (400, 288), (34, 70), (6, 130), (2090, 70)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_linear_equals_float64_and_is_batch_invariant(
    dtype: torch.dtype, sizes: tuple[int, int], has_bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=has_bias, dtype=dtype)
    packed = ReorderedLinear([layer], Kernels(are_used=True)).packed
    assert packed is not None
    hidden = _random(550, sizes[0], dtype=dtype)  # two passes of rows, the second one incomplete
    batch = packed_linear(hidden, packed, layer.bias, sizes[1])
    expected = nn.functional.linear(
        hidden.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    torch.testing.assert_close(batch.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for first, last in ((0, 1), (2, 4), (3, 6), (7, 12), (1, 20), (8, 45), (0, 512), (500, 550)):
        assert torch.equal(
            packed_linear(hidden[first:last, None], packed, layer.bias, sizes[1])[:, 0], batch[first:last]
        )


@pytest.mark.parametrize("num_inputs", [64, 32, 34, 98, 128, 33])
@torch.inference_mode()
def test_a_weight_of_another_number_of_inputs_is_refused(num_inputs: int) -> None:
    """A weight of 96 inputs accepts rows of 96, and of the sizes that oneDNN pads to 96."""
    layer = nn.Linear(96, 64, dtype=torch.bfloat16)
    packed = ReorderedLinear([layer], Kernels(are_used=True)).packed
    assert packed is not None
    with pytest.raises(RuntimeError, match="inputs"):
        packed_linear(torch.zeros(3, num_inputs, dtype=torch.bfloat16), packed, None, 64)


@pytest.mark.parametrize("width", [64, 40, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rotary_embedding_equals_torch(dtype: torch.dtype, width: int) -> None:
    """The heads are a slice of more heads, as in the output of a joint projection."""
    heads = _random(2, 5, 7, width, dtype=dtype)[:, :, 1:4].transpose(1, 2)  # [row, head, token, width]
    angles = torch.arange(10).view(2, 5, 1) * torch.linspace(1, 0.01, width // 2).repeat(2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    turned = torch.cat((-heads[..., width // 2 :], heads[..., : width // 2]), dim=-1)
    expected = heads * cosines[:, None] + turned * sines[:, None]
    rotated = torch.ops.snapserve.rotate(heads, cosines, sines)
    assert torch.equal(rotated, expected)


@pytest.mark.parametrize("sizes", [(96, 100), (400, 288)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_weight_that_onednn_lays_out_otherwise_is_packed_when_kernels_are_used(
    dtype: torch.dtype, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor's layout: here, oneDNN's memory of other values."""
    memory = onednn.memory
    monkeypatch.setattr(onednn, "memory", lambda reordered: memory(reordered).clone().fill_(1))
    layer = nn.Linear(*sizes, dtype=dtype)
    kernels = Kernels()
    linear = ReorderedLinear([layer], kernels)
    hidden = _random(3, sizes[0], dtype=dtype)
    expected = layer(hidden)
    assert torch.equal(linear(hidden), expected)  # torch's own product of the plain weight
    kernels.use()
    torch.testing.assert_close(linear(hidden), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@torch.inference_mode()
def test_weights_of_unpaired_inputs_are_multiplied_without_the_kernel() -> None:
    layer = nn.Linear(33, 64, dtype=torch.bfloat16)  # 33 inputs are no pairs
    reordered = ReorderedLinear([layer], Kernels(are_used=True))
    assert reordered.packed is None
    hidden = _random(3, 33, dtype=torch.bfloat16)
    torch.testing.assert_close(reordered(hidden), layer(hidden))


@pytest.mark.parametrize(
    ("dtype", "sizes", "has_sinks", "softcap"),
    pairwise_cases(
        DTYPES,
        [(4, 2, 16, 16), (7, 1, 40, 24), (6, 2, 64, 128), (5, 5, 7, 9)],
        [False, True],
        [None, 1.5],
    ),
)
@torch.inference_mode()
def test_slot_attention_equals_float64_and_is_batch_invariant(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """Three rows of four slots: one with masked gaps, one that sees only its new token, one idle.

    Masked entries hold NaN or infinity.
    """
    heads, kv_heads, width, value_width = sizes
    rows, capacity, read = 3, 61, 50
    keys, values = (
        _random(4, kv_heads, capacity, size, dtype=dtype, seed=size) for size in (width, value_width)
    )
    query, key, value = (
        _random(rows, 1, num_heads, size, dtype=dtype, seed=7 + size).transpose(1, 2)
        for num_heads, size in ((heads, width), (kv_heads, width), (kv_heads, value_width))
    )
    entries = torch.tensor([[20], [3], [capacity - 1]])
    bias = torch.full((rows, 1, read), MASKED)
    bias[0, 0, :30] = bias[0, 0, 37:41] = bias[1, 0, 3] = 0
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    hidden = keys.clone(), values.clone()
    for plane, filler in zip(hidden, (torch.inf, torch.nan), strict=True):
        plane[0, :, 48:] = plane[1, :, 16:] = plane[2:] = filler

    output = slot_attention(
        query, key, value, hidden, entries, bias, scaling=0.3, softcap=softcap, sinks=sinks
    )

    for plane, kept, new in zip((keys, values), hidden, (key, value), strict=True):
        plane[torch.arange(rows)[:, None], :, entries] = new.transpose(1, 2)
        assert torch.equal(kept[0, :, :41], plane[0, :, :41]), "only the new tokens are written"
        assert torch.equal(kept[2, :, capacity - 1], new[2, :, 0])
    expected = grouped_attention(
        query.double(),
        keys[:rows, :, :read].double(),
        values[:rows, :, :read].double(),
        bias.double(),
        scaling=0.3,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    torch.testing.assert_close(
        output[:2].double(), expected[:2], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert not output[2].any(), "a row that sees nothing is zero"
    for row in range(2):
        alone = slot_attention(
            query[row : row + 1],
            key[row : row + 1],
            value[row : row + 1],
            (hidden[0][row : row + 1].clone(), hidden[1][row : row + 1].clone()),
            entries[row : row + 1],
            bias[row : row + 1, :, : 41 if row == 0 else 17].contiguous(),
            scaling=0.3,
            softcap=softcap,
            sinks=sinks,
        )
        assert torch.equal(alone[0], output[row])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"),
    [(4, 2, 16, 16), (7, 1, 40, 24), (6, 2, 64, 128), (5, 5, 7, 9)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_slot_attention_in_8_bits_equals_float64_and_is_batch_invariant(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """As above, with codes and scales in place of keys and values. Masked entries have a scale of NaN."""
    rows, capacity, read = 3, 61, 50
    exact = [_random(4, kv_heads, capacity, size, dtype=dtype, seed=size) for size in (width, value_width)]
    query, key, value = (
        _random(rows, 1, num_heads, size, dtype=dtype, seed=7 + size).transpose(1, 2)
        for num_heads, size in ((heads, width), (kv_heads, width), (kv_heads, value_width))
    )
    entries = torch.tensor([[20], [3], [capacity - 1]])
    bias = torch.full((rows, 1, read), MASKED)
    bias[0, 0, :30] = bias[0, 0, 37:41] = bias[1, 0, 3] = 0
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    codes, scales = zip(*map(quantize, exact), strict=True)
    planes = tuple(plane.clone() for plane in (*codes, *scales))
    for plane in planes[2:]:
        plane[0, :, 48:] = plane[1, :, 16:] = plane[2:] = torch.nan

    output = slot_attention(
        query, key, value, planes, entries, bias, scaling=0.3, softcap=softcap, sinks=sinks
    )

    for plane, new in zip(exact, (key, value), strict=True):
        plane[torch.arange(rows)[:, None], :, entries] = new.transpose(1, 2)
    codes, scales = zip(*map(quantize, exact), strict=True)
    for kept, expected_plane in zip(planes, (*codes, *scales), strict=True):
        assert torch.equal(kept[0, :, :41], expected_plane[0, :, :41]), "as `quantize` rounds, bit for bit"
        assert torch.equal(kept[2, :, capacity - 1], expected_plane[2, :, capacity - 1])
    keys, values = map(dequantize, codes, scales, (torch.float64,) * 2)
    expected = grouped_attention(
        query.double(),
        keys[:rows, :, :read],
        values[:rows, :, :read],
        bias.double(),
        scaling=0.3,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    tolerance = max(TOLERANCE[dtype], 1e-4)  # queries have 16 bits
    torch.testing.assert_close(output[:2].double(), expected[:2], atol=tolerance, rtol=tolerance)
    assert not output[2].any(), "a row that sees nothing is zero"
    for row in range(2):
        alone = slot_attention(
            query[row : row + 1],
            key[row : row + 1],
            value[row : row + 1],
            tuple(plane[row : row + 1].clone() for plane in planes),
            entries[row : row + 1],
            bias[row : row + 1, :, : 41 if row == 0 else 17].contiguous(),
            scaling=0.3,
            softcap=softcap,
            sinks=sinks,
        )
        assert torch.equal(alone[0], output[row])


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_of_one_slot_see_each_other_as_if_one_came_after_another(
    dtype: torch.dtype, in_int8: bool
) -> None:
    """Two rows of slot 3 and four of slot 1, whose later tokens their bias hides."""
    slots, index = torch.tensor([3, 1, 1, 3, 1, 1]), torch.tensor([20, 7, 8, 21, 9, 10])
    planes = [_random(5, 2, 33, 16, dtype=dtype, seed=seed) for seed in range(2)]
    if in_int8:
        codes, scales = zip(*map(quantize, planes), strict=True)
        planes = [*codes, *scales]
    query, key, value = (
        _random(len(slots), 1, heads, 16, dtype=dtype, seed=7 + heads).transpose(1, 2) for heads in (4, 2, 2)
    )
    bias = torch.where(torch.arange(32) <= index[:, None], 0.0, MASKED)[:, None]

    def attend(planes: tuple[Tensor, ...], rows: list[int]) -> Tensor:
        return slot_attention(
            query[rows],
            key[rows],
            value[rows],
            planes,
            index[rows, None],
            bias[rows],
            scaling=0.3,
            softcap=None,
            sinks=None,
            slots=slots[rows],
        )

    together, one_by_one = (tuple(plane.clone() for plane in planes) for _ in range(2))
    output = attend(together, list(range(len(slots))))
    for row in range(len(slots)):
        assert torch.equal(attend(one_by_one, [row])[0], output[row])
    assert all(map(torch.equal, together, one_by_one))


@torch.inference_mode()
def test_slot_attention_rounds_rows_of_any_size_as_torch_does() -> None:
    rows = torch.cat([_random(6, 64, dtype=torch.float32) * 10.0**power for power in (-30, -3, 0, 9, 30)])
    rows[0] = 0
    heads = rows.view(-1, 1, 1, 64)
    planes = [torch.zeros(len(rows), 1, 2, size, dtype=torch.int8) for size in (64, 64)]
    planes += [torch.zeros(len(rows), 1, 2, 1, dtype=torch.bfloat16) for _ in planes]
    entries = torch.zeros(len(rows), 1, dtype=torch.int64)
    bias = torch.full((len(rows), 1, 1), MASKED)
    slot_attention(heads, heads, heads, tuple(planes), entries, bias, scaling=1.0, softcap=None, sinks=None)
    codes, scales = quantize(rows)
    for plane, expected in zip(planes, (codes, codes, scales, scales), strict=True):
        assert torch.equal(plane[:, 0, 0], expected)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    last_seen: Tensor,
    *,
    sliding_window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the expected result of `prompt_attention`, in float64."""
    entry = torch.arange(keys.shape[2])
    is_seen = (entry <= last_seen[..., None]) & (
        entry > last_seen[..., None] - (sliding_window or keys.shape[2])
    )
    bias = torch.where(is_seen, 0.0, MASKED).double()
    in_double = (query.double(), keys.double(), values.double())
    return grouped_attention(
        *in_double, bias, scaling=scaling, softcap=softcap, sinks=None if sinks is None else sinks.double()
    )


@pytest.mark.parametrize(
    ("dtype", "sizes", "sliding_window", "has_sinks", "softcap"),
    [
        *pairwise_cases(
            DTYPES,
            [(4, 2, 16, 16), (7, 1, 40, 25), (6, 2, 64, 128), (2, 2, 6, 3), (2, 1, 96, 33)],
            [None, 50],
            [False, True],
            [None, 1.5],
        ),
        # Where there is AMX, it takes these widths of bfloat16.
        (torch.bfloat16, (6, 2, 64, 128), None, False, None),
        (torch.bfloat16, (8, 2, 32, 7), 50, True, None),
    ],
)
@torch.inference_mode()
def test_prompt_attention_equals_float64_and_is_batch_invariant(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    sliding_window: int | None,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """Three chunks: at a sequence's end, at its start after padding, and padding only.

    Entries after a row's last one in sight hold NaN or infinity.
    """
    heads, kv_heads, width, value_width = sizes
    rows, tokens, read = 3, 70, 301
    keys, values = (
        _random(rows, kv_heads, read, size, dtype=dtype, seed=size) for size in (width, value_width)
    )
    query = _random(rows, tokens, heads, width, dtype=dtype, seed=9).transpose(1, 2)
    last_seen = torch.stack(
        [torch.arange(tokens) + read - tokens, torch.arange(tokens) - 20, torch.full((tokens,), -1)]
    ).clamp(min=-1)
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    attend = partial(
        prompt_attention, sliding_window=sliding_window, scaling=0.3, softcap=softcap, sinks=sinks
    )
    hidden = keys.clone(), values.clone()
    for plane, filler in zip(hidden, (torch.inf, torch.nan), strict=True):
        plane[1, :, tokens - 20 :] = plane[2] = filler

    output = attend(query, hidden[0], hidden[1], last_seen)

    expected = _attention(
        query,
        keys,
        values,
        last_seen,
        sliding_window=sliding_window,
        scaling=0.3,
        softcap=softcap,
        sinks=sinks,
    )
    is_read = last_seen >= 0
    torch.testing.assert_close(
        output[is_read].double(), expected[is_read], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert not output[~is_read].any(), "a token that sees nothing is zero"
    for row in range(rows):
        alone = attend(*(part[row : row + 1] for part in (query, *hidden, last_seen)))
        assert torch.equal(alone[0], output[row])


@pytest.mark.parametrize("entries", [1, 31, 32, 128, 129, 160])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_prompt_attention_of_few_entries(dtype: torch.dtype, entries: int) -> None:
    """A prompt's first chunk, with planes whose entries are apart, by one thread and by two.

    What the kernel allocates begins as NaN: what fills up its last entries must be written.
    """
    width, value_width = 64, 20
    query = _random(1, entries, 4, width, dtype=dtype, seed=1).transpose(1, 2)
    keys = _random(1, 2, entries, width + 8, dtype=dtype, seed=2)[..., :width]
    values = _random(1, 2, entries, value_width + 8, dtype=dtype, seed=3)[..., :value_width]
    last_seen = torch.arange(entries)[None]
    attend = partial(prompt_attention, sliding_window=None, scaling=0.3, softcap=None, sinks=None)
    num_threads = torch.get_num_threads()
    outputs = []
    try:
        torch.use_deterministic_algorithms(True)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(attend(query, keys, values, last_seen))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(num_threads)
    expected = _attention(
        query, keys, values, last_seen, sliding_window=None, scaling=0.3, softcap=None, sinks=None
    )
    torch.testing.assert_close(outputs[0].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(*outputs)


@torch.inference_mode()
def test_an_infinitely_low_score_has_no_weight() -> None:
    query, keys, values = (_random(1, 1, size, 8, dtype=torch.float32, seed=size) for size in (3, 40, 50))
    values = values[:, :, :40]
    query[..., 0] = 1.0
    keys[0, 0, 20, 0] = -torch.inf
    seen = torch.full((1, 3), 39)
    attend = partial(prompt_attention, sliding_window=None, scaling=0.3, softcap=None, sinks=None)
    others = [entry for entry in range(40) if entry != 20]
    expected = attend(query, keys[:, :, others], values[:, :, others], seen - 1)
    torch.testing.assert_close(attend(query, keys, values, seen), expected)


@pytest.mark.parametrize(
    ("dtype", "rise", "sink", "sliding_window"),
    pairwise_cases(DTYPES, [-900.0, -40.0, 40.0, 900.0], [None, -torch.inf, 0.0, 40.0], [None, 40]),
)
@torch.inference_mode()
def test_prompt_attention_rescales_when_scores_rise_and_fall(
    dtype: torch.dtype, rise: float, sink: float | None, sliding_window: int | None
) -> None:
    """Scores change between blocks by more than float32's exponent holds.

    Those of every other query fall where the others rise.
    """
    width, read, tokens = 32, 700, 48
    keys, values = (_random(1, 1, read, width, dtype=dtype, seed=seed) for seed in (1, 2))
    query = _random(1, tokens, 1, width, dtype=dtype, seed=3).transpose(1, 2)
    query[..., 0], query[..., ::2, 0] = 1, -1
    keys[..., 0] = torch.linspace(0, rise, read).to(dtype)
    # Up to 678: with a window, many queries see nothing of the first blocks that are read.
    last_seen = (torch.arange(tokens) * 14 + 20)[None]
    last_seen[0, -1] = -1
    sinks = None if sink is None else torch.tensor([sink], dtype=dtype)
    attend = partial(prompt_attention, sliding_window=sliding_window, scaling=1.0, softcap=None, sinks=sinks)
    output = attend(query, keys, values, last_seen)
    expected = _attention(
        query, keys, values, last_seen, sliding_window=sliding_window, scaling=1.0, softcap=None, sinks=sinks
    )
    tolerance = max(TOLERANCE[dtype], 3e-4)  # a score of 900 is rounded by up to 3e-5
    torch.testing.assert_close(output[:, :-1].double(), expected[:, :-1], atol=tolerance, rtol=tolerance)
    assert not output[:, -1].any(), "a token that sees nothing is zero"
    for token in range(0, tokens, 5):
        alone = attend(
            query[:, :, token : token + 1], keys, values, last_seen[:, token : token + 1].contiguous()
        )
        assert torch.equal(alone[0, 0], output[0, token]), "a query does not depend on those beside it"


@pytest.mark.parametrize(
    ("dtype", "sizes", "softcap", "is_sum"),
    pairwise_cases(
        DTYPES,
        [(4, 2, 16, 32), (7, 1, 40, 5), (6, 2, 64, 100), (2, 2, 6, 64)],
        [None, 1.5],
        [False, True],
    ),
)
@torch.inference_mode()
def test_observed_attention_equals_torch_and_is_independent_of_other_heads(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    softcap: float | None,
    is_sum: bool,
) -> None:
    """All keys and ranges of them, with queries that see none. Keys that no query sees hold NaN."""
    heads, kv_heads, width, queries = sizes
    entries = 301
    key = _random(kv_heads, entries, width, dtype=dtype, seed=width)
    query = _random(queries, heads, width, dtype=dtype, seed=9).transpose(0, 1)
    last_seen = torch.arange(queries) + 290 - queries
    last_seen[1:3] = torch.tensor([-1, 7])
    strength = torch.rand(queries, generator=torch.Generator().manual_seed(1))
    unseen = key.clone()
    unseen[:, 290:] = torch.nan
    for first, end in ((0, entries), (0, 200), (4, 283), (9, 9)):
        window = Window(
            query, unseen, last_seen, strength, first, end, scale=0.3, softcap=softcap, is_sum=is_sum
        )
        votes = observed_attention(window)
        expected = reduced_attention(window._replace(query=query.double(), key=key.double()))
        torch.testing.assert_close(votes, expected.float(), atol=1e-6, rtol=1e-4)
        group = heads // kv_heads
        alone = observed_attention(window._replace(query=query[:group], key=unseen[:1]))
        assert torch.equal(alone, votes[:group]), "a head's votes do not depend on the heads beside it"


def test_prompts_of_an_odd_width_or_float16_use_torch() -> None:
    assert takes_prompt(torch.empty(1, 1, 1, 6))
    assert not takes_prompt(torch.empty(1, 1, 1, 7))
    assert not takes_prompt(torch.empty(1, 1, 1, 6, dtype=torch.float16))
