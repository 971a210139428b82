"""A CPU recorder with the rules of a CUDA graph: it replays tensor operations, not the Python code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from backends.torch_backend.cuda_graphs import Recordable

# Numbers that go from the device to the host, shapes that depend on them, and data that comes from the host.
_WAITING = (
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "nonzero_numpy",
    "_unique2",
    "masked_select",
    "lift_fresh",
    "equal",
)

Operation = tuple[Callable[..., object], Sequence[object], Mapping[str, object], object]


class _Trace(TorchDispatchMode):
    """Writes down the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class ReplayRecorder:
    """Records steps, and counts them and their replays."""

    def __init__(self) -> None:
        self.records: list[list[Operation]] = []
        self.num_replayed = 0

    @property
    def num_recorded(self) -> int:
        return len(self.records)

    def __call__(self, step: Recordable) -> Recordable:
        with _Trace() as trace:
            step()
        self.records.append(trace.operations)

        def replay() -> None:
            self.num_replayed += 1
            _replay(trace.operations)

        return replay


def readers(operations: Sequence[Operation], tensor: Tensor) -> list[str]:
    """Return the operations that compute with the tensor's memory, without views of it and writes to it."""
    return [
        func.__name__
        for func, *arguments, result in operations
        if _holds(arguments, tensor) and not _holds(result, tensor)
    ]


def _holds(tree: object, tensor: Tensor) -> bool:
    memory = tensor.untyped_storage().data_ptr()
    leaves = (
        leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and not leaf.is_mkldnn
    )  # oneDNN hides its memory
    return any(leaf.untyped_storage().data_ptr() == memory for leaf in leaves)


def _replay(operations: Sequence[Operation]) -> None:
    """Run the operations again: what one of them made anew is handed on, everything else is where it was."""
    made: dict[int, Tensor] = {}

    def current(tensor: Tensor) -> Tensor:
        return made.get(id(tensor), tensor)

    for func, args, kwargs, result in operations:
        again = func(
            *tree_map_only(torch.Tensor, current, args), **tree_map_only(torch.Tensor, current, kwargs)
        )
        for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
            if isinstance(old, Tensor):
                made[id(old)] = new
