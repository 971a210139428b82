"""Planes that a GPU has in the host's memory, as far as a processor can tell."""

import torch

from cache.host_planes import _Pinned, host_plane


def test_a_processor_has_ordinary_zeros() -> None:
    plane = host_plane(2, 3, device="cpu")
    assert torch.equal(plane, torch.zeros(2, 3, dtype=torch.uint8))
    assert host_plane(2, 3, device="meta").is_meta


def test_memory_is_described_as_an_array_of_cuda() -> None:
    """The fields that version 3 of the CUDA array interface demands."""
    memory = torch.zeros(2, 3, 4, dtype=torch.uint8)
    described = _Pinned(memory).__cuda_array_interface__
    assert described["data"] == (memory.data_ptr(), False)
    assert described["shape"] == (2, 3, 4)
    assert described["typestr"] == "|u1"
    assert described["version"] == 3
    assert described.get("strides") is None
