"""The kernel that steps Mamba-2's states against the plain version."""

from pathlib import Path

import pytest
import torch

from backends.torch_backend.model.recurrent import advance_states as plain_advance
from backends.torch_backend.native.kernels import advance_states, kernels_are_supported, load_kernels

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

ROWS = 3
HEADS = 6


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("channels", "numbers"), [(5, 24), (64, 128)])
def test_states_and_outputs_are_those_of_the_plain_version(
    channels: int, numbers: int, num_groups: int
) -> None:
    generator = torch.Generator().manual_seed(channels)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    before = random(ROWS + 1, HEADS, channels, numbers)
    # In memory as a convolution's outputs are: a row's writes and reads side by side.
    both = random(ROWS, 2, num_groups, numbers)
    inputs = [random(ROWS, HEADS).sigmoid(), random(ROWS, HEADS, channels), both[:, 0], both[:, 1]]
    before[1] = torch.nan
    for each in inputs:
        each[1] = torch.nan
    is_live = torch.tensor([True, False, True])
    expected, found = before.clone(), before.clone()
    plain = plain_advance(expected, is_live, *inputs)
    output = advance_states(found, is_live, *inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(output[is_live], plain[is_live], atol=1e-4, rtol=1e-4)
    assert not output[1].any()
    assert torch.equal(found[ROWS], before[ROWS])
    alone = before[2:3].clone()
    of_row = advance_states(alone, is_live[2:], *(each[2:] for each in inputs))
    assert torch.equal(of_row[0], output[2])
    assert torch.equal(alone[0], found[2])
