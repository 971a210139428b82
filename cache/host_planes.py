"""Planes in a host's memory that a GPU reads and writes over the bus, by its own kernels."""

from typing import Any

import torch
from torch import Tensor


class _Pinned:
    """Pinned memory as an array of CUDA: a GPU reaches it at its own address (unified addressing)."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # held for as long as a tensor over it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._memory.numpy().__array_interface__
        return interface  # the two protocols have the same fields


def host_plane(*sizes: int, device: torch.device | str) -> Tensor:
    """Return uint8 zeros in the host's memory, as a tensor of `device`.

    For a GPU they are pinned. Its kernels and captured graphs take them as any other tensor.
    """
    if torch.device(device).type != "cuda":
        return torch.zeros(sizes, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Pinned(torch.zeros(sizes, dtype=torch.uint8, pin_memory=True)), device=device)
