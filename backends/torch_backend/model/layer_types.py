"""The order in which a model goes through its types of layers."""

import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel


class _InOrder(set[Any]):
    """A set that is gone through in the order of its elements' texts."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


def order_layer_types(model: PreTrainedModel) -> None:
    """Let a model go through its types of layers in the same order in every process.

    transformers' code goes through `set(config.layer_types)`, whose order depends on the process. A compiled
    graph is known by its text, which has the rotary embeddings of these types one after the other: with
    another order, a start would compile it again.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if isinstance(getattr(module, "unique_layer_types", None), set):
            module.unique_layer_types = _InOrder(module.unique_layer_types)  # type: ignore[assignment, arg-type]
        if getattr(module.config, "layer_types", None) is not None:
            # The name is looked up in the module before Python's own.
            vars(sys.modules[type(module).__module__])["set"] = _InOrder
