"""Machines as data: the compute, memories and links of one socket, and the cost of a kernel call.

Every number of a machine file has its source. An unpublished number is an assumption or is fitted by
`calibration`, and has a range. This module knows no models and no kernels.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any


class MachineFileError(ValueError):
    """A machine file lacks a number, or has an impossible one."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its source. An unpublished number has the range `low` to `high`."""

    value: float
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def is_published(self) -> bool:
        return self.low is None


@dataclass(frozen=True, slots=True)
class Machine:
    """Numbers of one socket, in bytes, seconds and operations. A node has 1 to `max_sockets` equal ones.

    `*_efficiency` are the shares of a peak that real kernels reach. A call takes `launch` and `drain`, in
    which nothing streams, and `host_launch` more if the host starts it instead of the device.
    """

    max_sockets: int
    compute_units: int
    compute_unit_rate: float  # BF16 operations a second
    memory_units: int  # of the SRAM
    memory_unit_capacity: float
    sram_bandwidth: float  # of all units together: what streams from HBM passes them
    hbm_capacity: float
    hbm_bandwidth: float
    ddr_capacity: float
    ddr_bandwidth: float
    link_bandwidth: float  # out of a socket, to all others together
    launch: float
    drain: (
        float  # the pipeline runs dry and fills again: at a call's end, or where a router's choice is awaited
    )
    host_launch: float
    collective_latency: float  # of an all-reduce, what its overlap with computing does not hide
    stream_efficiency: float  # of `hbm_bandwidth`, within a kernel
    gather_efficiency: float  # of `hbm_bandwidth`, for gathered rows and passes over scores
    gemm_efficiency: float
    prefill_attention_efficiency: float
    decode_attention_efficiency: float
    pipeline_fill: float  # sequences' worth of time to fill the attention pipeline of a fused decode kernel
    hbm_reserve: float  # share of HBM for programs, arguments, activations and landing prompts
    attention_tile: int  # queries and keys of a block in prefill
    kernels_per_layer: (
        int  # calls into which a decoder layer is fused (an expert layer on a static machine needs one more)
    )
    loops_layers: bool  # the calls of all layers can be one loop
    overlaps_streams: bool  # any kernel computes while its data streams, not only one in a loop
    overlaps_stages: bool  # products and attention of a layer run at once, not one after the other
    reads_possible_experts: bool  # a step reads every expert that its batch could choose, not those it chose
    pads_decode: bool  # a decode step takes the time of all slots at full capacity, however few are live
    pads_prefill: bool  # a chunk takes the time of its static shape, however few tokens it has
    rounds_slots: bool  # the number of slots is a power of two
    spills_activations: bool  # activations that the SRAM cannot hold go through HBM, instead of not fitting
    node_bandwidth: float = 0.0  # out of a socket, to another node; 0: not known
    node_latency: float = 0.0  # of a transfer to another node
    cache_efficiency: float = 1.0  # of the rate at which weights are read, for entries of slots
    price: float = 0.0  # dollars an hour; 0: not known
    power: float = 0.0  # watts, with its share of the node; 0: not known

    @property
    def matrix_rate(self) -> float:
        return self.compute_units * self.compute_unit_rate

    @property
    def sram_capacity(self) -> float:
        return self.memory_units * self.memory_unit_capacity


@dataclass(frozen=True, slots=True)
class MachineFile:
    """A machine with the sources of its numbers."""

    name: str
    title: str
    machine: Machine
    quantities: dict[str, Quantity]

    def changes(self, factors: Sequence[float] = ()) -> tuple[dict[str, Any], ...]:
        """Return changes of one unpublished number each: to the ends of its range, or by factors.

        Prices and watts enter no time, and are left out.
        """
        return tuple(
            {key: value}
            for key, quantity in self.quantities.items()
            if quantity.low is not None and quantity.high is not None and key not in ("price", "power")
            for value in (
                [factor * quantity.value for factor in factors] if factors else (quantity.low, quantity.high)
            )
        )


_DATA = "data/machines"


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines in this package."""
    folder = files(__package__).joinpath(_DATA)
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    )


def load_machine_file(name_or_path: str) -> MachineFile:
    """Load a machine by its name or from a TOML file. Raises MachineFileError."""
    if name_or_path.endswith(".toml"):
        return _parse(Path(name_or_path).stem, Path(name_or_path).read_text())
    if name_or_path not in machine_names():
        raise MachineFileError(
            f"no machine {name_or_path!r}: there are {', '.join(machine_names())}, and paths of .toml files"
        )
    return _parse(name_or_path, files(__package__).joinpath(_DATA, f"{name_or_path}.toml").read_text())


def load_machine(name_or_path: str) -> Machine:
    """As `load_machine_file`, without the sources."""
    return load_machine_file(name_or_path).machine


_MAY_BE_ZERO = frozenset(
    {
        "ddr_capacity",
        "launch",
        "drain",
        "host_launch",
        "collective_latency",
        "pipeline_fill",
        "hbm_reserve",
        "node_bandwidth",
        "node_latency",
        "price",
        "power",
    }
)
_FLAGS = (
    "loops_layers",
    "overlaps_streams",
    "overlaps_stages",
    "reads_possible_experts",
    "pads_decode",
    "pads_prefill",
    "rounds_slots",
    "spills_activations",
)
_OPTIONAL = frozenset({"node_bandwidth", "node_latency", "cache_efficiency", "price", "power"})

_WHOLE = ("max_sockets", "compute_units", "memory_units", "attention_tile", "kernels_per_layer")


def _parse(name: str, text: str) -> MachineFile:
    """Return the machine of a file. A file with `base` has only what differs from that machine."""
    data = tomllib.loads(text)
    title = str(data.pop("title", name))
    base = data.pop("base", None)
    try:
        inherited = dict(load_machine_file(str(base)).quantities) if base is not None else {}
    except RecursionError as error:
        raise MachineFileError(f"machine {name}: its base must not be itself, got {base}") from error
    types = {field.name: field.type for field in fields(Machine)}
    given = data.keys() | inherited.keys()
    if types.keys() - given - _OPTIONAL or given - types.keys():
        missing = types.keys() - given - _OPTIONAL
        unknown = given - types.keys()
        raise MachineFileError(f"machine {name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    quantities = inherited | {key: _quantity(name, key, entry) for key, entry in data.items()}
    values: dict[str, Any] = {key: quantity.value for key, quantity in quantities.items()}
    values |= {key: int(values[key]) for key in _WHOLE} | {key: bool(values[key]) for key in _FLAGS}
    return MachineFile(name, title, Machine(**values), quantities)


def _quantity(machine: str, key: str, entry: Any) -> Quantity:
    """Return a number of a file. Raises MachineFileError."""
    try:
        quantity = Quantity(**entry)
    except TypeError as error:
        raise MachineFileError(
            f"machine {machine}: {key} needs a value and a source, and has {entry}"
        ) from error
    value = quantity.value
    ends = (quantity.low, quantity.high)
    numbers = (value, *(end for end in ends if end is not None))
    if not isinstance(quantity.source, str) or not all(_is_number(number) for number in numbers):
        raise MachineFileError(f"machine {machine}: {key} needs a value and a source, and has {entry}")
    if key in _FLAGS and value not in (0, 1):
        raise MachineFileError(f"machine {machine}: {key} must be 0 or 1, got {value}")
    is_zero = value == 0 and (key in _MAY_BE_ZERO or key in _FLAGS)
    if not (0 < value < math.inf or is_zero) or (key in _WHOLE and value != int(value)):
        kind = "whole number" if key in _WHOLE else "number"
        raise MachineFileError(f"machine {machine}: {key} must be a {kind} above 0, got {value}")
    if (quantity.low is None) != (quantity.high is None):
        raise MachineFileError(f"machine {machine}: {key} must have both low and high, or neither")
    return quantity


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
