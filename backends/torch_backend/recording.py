"""How a step that is run again and again is recorded, so that running it costs the host one call.

A step here is a function without arguments or results, of fixed shapes, that reads and writes tensors which stay where they are and never
waits for the device.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

Step: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Step], Step]


class CudaRecorder:
    """Captures steps as CUDA graphs. They share their memory, so a step leaves nothing behind but in tensors that were there before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Return the step's replay. Raises RuntimeError for a step that waits for the device."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # libraries set themselves up, which cannot be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            step()
        return graph.replay
