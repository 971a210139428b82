"""The generator against Random123's published known answers, and the numbers made from it."""

import pytest
import torch

from backends.torch_backend.sampling.philox import philox4x32, uniform

# Random123, tests/kat_vectors: philox 4x32 10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answer_vectors_are_met(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = _words(counter)
    k0, k1 = _words(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == _words(answer)


def test_uniform_is_even_over_the_unit_interval() -> None:
    count = 100_000
    zeros = torch.zeros(count, dtype=torch.int64)
    u = uniform(zeros + 7, zeros, torch.arange(count))
    assert u.dtype == torch.float64
    assert 0 <= float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) < 1
    counts = torch.histc(u.float(), bins=100, min=0, max=1)
    chi_square = float(((counts - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 149  # 99 degrees of freedom: exceeded once in a thousand


@pytest.mark.parametrize(
    "changed", [{"seed": 8}, {"seed": 7 + 2**40}, {"seed": -7}, {"choice": 1}, {"output_index": 1}]
)
def test_uniform_follows_each_argument(changed: dict[str, int]) -> None:
    def number(seed: int = 7, choice: int = 0, output_index: int = 0) -> float:
        return float(uniform(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([output_index])))

    assert number(**changed) != number()


@pytest.mark.parametrize("seed", [0x299F31D0A4093822, -2, 2**40])
def test_uniform_has_the_first_53_bits_for_a_seed_of_64(seed: int) -> None:
    choice, output_index = 0x85A308D3, 0x243F6A88
    arguments = [torch.tensor([number]) for number in (seed, choice, output_index)]
    c0, c1, zero = (torch.tensor([number]) for number in (output_index, choice, 0))
    key = tuple(torch.tensor([word]) for word in (seed % 2**32, seed % 2**64 >> 32))
    first, second, *_ = (int(word) for word in philox4x32((c0, c1, zero, zero), (key[0], key[1])))
    assert float(uniform(*arguments)) == ((first << 32 | second) >> 11) / 2**53
