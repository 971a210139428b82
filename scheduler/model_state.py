"""The runtime state of one of the backend's models: its free scratches and its stored prompts."""

from dataclasses import dataclass

from backends.interface import BackendSpec, PrefixArchive
from cache.free_list import FreeList
from scheduler.prefix_reuse import PrefixReuse


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    spec: BackendSpec
    scratches: FreeList
    prefixes: PrefixReuse


def model_states(spec: BackendSpec, archive: PrefixArchive | None) -> tuple[ModelState, ...]:
    """Return the states of a backend's models. The archive is that of the one that answers."""
    states: list[ModelState] = []
    first_pool = 0
    for model in spec.models:
        prefixes = PrefixReuse(model, None if states else archive, first_pool)
        states.append(ModelState(model, FreeList(model.scratch.num_scratch), prefixes))
        first_pool += len(model.pools)
    return tuple(states)
