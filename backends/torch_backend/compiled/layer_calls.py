"""A layer as a function of its tensors and weights, traced once for all layers of the same structure."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from backends.torch_backend.compiled.trace import GraphSource, InputSpec, trace
from backends.torch_backend.forward.stand_in import LayerCall

_NUMBER = "layer_idx"
_SIMPLE = (bool, int, float, str, type(None))


class TracedCache:
    """The cache that a layer meets while it is traced: its update leaves all to the attention."""

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value


class LayerFunction:
    """A layer with its weights among its inputs."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        named = dict(layer.named_parameters()) | dict(layer.named_buffers())
        self._names, self.weights = list(named), [weight.detach() for weight in named.values()]

    def structure(self, inputs: Sequence[Tensor]) -> Hashable:
        """Return all that tells one layer's graph from another's, but for what they do with their numbers."""
        modules = [
            (
                name,
                type(module),
                *(
                    (key, value)
                    for key, value in vars(module).items()
                    if isinstance(value, _SIMPLE) and key != _NUMBER
                ),
            )
            for name, module in self._layer.named_modules()
        ]
        return (
            tuple(modules),
            tuple(self._names),
            tuple((tensor.shape, tensor.dtype) for tensor in (*inputs, *self.weights)),
        )

    def trace(
        self,
        call: LayerCall,
        given: Sequence[InputSpec],
        own: Sequence[InputSpec],
        cache: Callable[..., TracedCache],
    ) -> GraphSource:
        """Return the graph of a call, whose inputs are the call's tensors, `own`, of which the `cache` it meets is made, and the weights.

        Raises GraphError.
        """
        first_own, first_weight = len(given), len(given) + len(own)

        def run(*tensors: Tensor) -> object:
            replaced = call.replaced(tensors[:first_own], cache(*tensors[first_own:first_weight]))
            weights = dict(zip(self._names, tensors[first_weight:], strict=True))
            return torch.func.functional_call(
                self._layer, weights, replaced.args, dict(replaced.kwargs), tie_weights=False
            )

        with _unnumbered(self._layer):
            return trace(run, [*given, *own, *map(InputSpec.of, self.weights)])


class _Unknown:
    """A layer's number while its graph is traced, which must hold for others too: it can be handed on, and nothing else."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the layer asks for its number")

    __eq__ = __hash__ = __bool__ = __index__ = _refuse


@contextmanager
def _unnumbered(layer: nn.Module) -> Iterator[None]:
    numbered = [(module, vars(module)[_NUMBER]) for module in layer.modules() if _NUMBER in vars(module)]
    try:
        for module, _ in numbered:
            setattr(module, _NUMBER, _Unknown())
        yield
    finally:
        for module, number in numbered:
            setattr(module, _NUMBER, number)
