"""What a backend registers to be one of the choices of `--backend`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backends.config import BackendConfig, ConfiguredBackend
from backends.options import OptionGroup

OwnOptions = TypeVar("OwnOptions", bound=OptionGroup)

# Configures another backend by its name, with the options that the user set for it.
OtherBackend = Callable[[str], ConfiguredBackend[Any]]


@dataclass(frozen=True, slots=True)
class BackendEntry(Generic[OwnOptions]):
    """`options` become flags of `snapserve serve`. `configure` must not import heavy libraries.

    `configure` takes what all backends have, the values of `options`, and a function that configures another
    backend, for a backend that wraps one. It raises ValueError for options that contradict each other.
    """

    options: type[OwnOptions]
    configure: Callable[[BackendConfig, OwnOptions, OtherBackend], ConfiguredBackend[Any]]
