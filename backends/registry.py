"""The backends that can be served: those of this project, and those that installed packages register.

A package registers a backend by an entry point in the group `snapserve.backends`. Its name is the choice of
`--backend`, and its object is a `BackendEntry`.
"""

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from backends import fake_entry
from backends.config import BackendConfig, ConfiguredBackend
from backends.entry import BackendEntry
from backends.options import OptionGroup
from backends.sn40l import entry as sn40l_entry
from backends.torch_backend import entry as torch_entry

ENTRY_POINTS: Final = "snapserve.backends"
BUILT_IN: Final[Mapping[str, BackendEntry[Any]]] = {
    "torch": torch_entry.ENTRY,
    "fake": fake_entry.ENTRY,
    "sn40l": sn40l_entry.ENTRY,
}


class RegistryError(ValueError):
    """An installed package registers a backend that cannot be used."""


@functools.cache
def backend_entries() -> Mapping[str, BackendEntry[Any]]:
    """Return the backends by name. Raises `RegistryError`."""
    entries = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINTS):
        origin = f"backend {point.name!r} of {point.value}"
        if point.name in entries:
            raise RegistryError(f"{origin}: there is a backend of this name already")
        try:
            entry = point.load()
        except Exception as error:
            raise RegistryError(f"{origin} cannot be imported: {error!r}") from error
        if not isinstance(entry, BackendEntry):
            raise RegistryError(f"{origin} must be a BackendEntry, got {type(entry).__name__}")
        entries[point.name] = entry
    return entries


def configure_backend(
    name: str, base: BackendConfig, options: Mapping[str, OptionGroup]
) -> ConfiguredBackend[Any]:
    """Return a backend, configured by its entry in `options`, which are by backends' names.

    Raises KeyError for an unknown name, and ValueError for options that contradict each other.
    """
    entry = backend_entries()[name]
    return entry.configure(base, options[name], lambda other: configure_backend(other, base, options))
