"""A layer as a function of its tensors and weights, traced once for all layers of the same structure."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from backends.torch_backend.compiled.trace import GraphSource, InputSpec, trace
from backends.torch_backend.forward.stand_in import LayerCall

_LAYER_INDEX = "layer_idx"  # the attribute in which transformers' modules keep their layer's index
_SIMPLE = (bool, int, float, str, type(None))


class TracedCache:
    """The cache of a layer while it is traced.

    Its update returns its arguments: the traced attention writes the cache.
    """

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value


def is_wrapped(output: object) -> bool:
    """Return whether a layer returns its hidden states as a tuple's only item, as a few types do."""
    return isinstance(output, tuple) and len(output) == 1


class LayerFunction:
    """A layer with its weights among its inputs."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        named = dict(layer.named_parameters()) | dict(layer.named_buffers())
        self._names = list(named)
        self.weights = [weight.detach() for weight in named.values()]

    def structure(self, inputs: Sequence[InputSpec]) -> Hashable:
        """Return a value that is equal for layers with the same graph, if they are called with such inputs.

        Modules of the same types with the same simple attributes are taken to compute the same. The layer's
        index may differ: `trace` fails where it is used.
        """
        modules = []
        for name, module in self._layer.named_modules():
            attributes = tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, _SIMPLE) and key != _LAYER_INDEX
            )
            modules.append((name, type(module), *attributes))
        specs = (*inputs, *map(InputSpec.of, self.weights))
        return tuple(modules), tuple(self._names), specs

    def trace(
        self,
        call: LayerCall,
        call_inputs: Sequence[InputSpec],
        cache_inputs: Sequence[InputSpec],
        cache: Callable[..., TracedCache],
    ) -> GraphSource:
        """Return the graph of a call.

        Its inputs are the call's tensors, the tensors of which `cache` makes the layer's cache, and the
        weights. Hidden states are taken out of a tuple. Raises GraphError.
        """
        cache_start = len(call_inputs)
        weights_start = cache_start + len(cache_inputs)

        def run(*tensors: Tensor) -> object:
            replaced = call.replaced(tensors[:cache_start], cache(*tensors[cache_start:weights_start]))
            weights = dict(zip(self._names, tensors[weights_start:], strict=True))
            output = torch.func.functional_call(
                self._layer, weights, replaced.args, dict(replaced.kwargs), tie_weights=False
            )
            return output[0] if is_wrapped(output) else output

        with _without_index(self._layer):
            return trace(run, [*call_inputs, *cache_inputs, *map(InputSpec.of, self.weights)])


class _UnusableIndex:
    """A layer's index while it is traced. It can be passed on, but not used: other layers share the graph."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the layer uses its index")

    __eq__ = __hash__ = __bool__ = __index__ = _refuse


@contextmanager
def _without_index(layer: nn.Module) -> Iterator[None]:
    indexed = [
        (module, vars(module)[_LAYER_INDEX]) for module in layer.modules() if _LAYER_INDEX in vars(module)
    ]
    try:
        for module, _ in indexed:
            setattr(module, _LAYER_INDEX, _UnusableIndex())
        yield
    finally:
        for module, index in indexed:
            setattr(module, _LAYER_INDEX, index)
