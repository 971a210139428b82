"""The simulated SN40L's entry in the registry: another backend's tokens, at the simulated pace."""

import enum
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from backends.clock import Clock
from backends.config import BackendConfig, ConfiguredBackend
from backends.entry import BackendEntry, OtherBackend
from backends.interface import Backend
from backends.options import Count, OptionGroup, Shown
from backends.sn40l.backend import SimulationConfig
from backends.sn40l.description.hardware import load_machine, machine_names
from backends.sn40l.description.model_config import load_model, model_names
from backends.timed import parse_fault


class InnerName(enum.StrEnum):
    """The backend whose tokens are returned."""

    TORCH = "torch"
    FAKE = "fake"


def _loadable(load: Callable[[str], object], kind: str, file: str) -> AfterValidator:
    """Return the check that `load` accepts a name or a path."""

    def check(value: str) -> str:
        try:
            load(value)
        except OSError as error:
            raise ValueError(f"{file} that can be read ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{kind} ({error})") from error
        return value

    return AfterValidator(check)


def _time_scale(value: object) -> float | None:
    """Return the pace of simulated time relative to the wall clock's; None for no waiting at all."""
    if value in (None, "virtual"):
        return None
    try:
        scale = float(str(value))
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise ValueError("a number above 0, or virtual")
    return scale


def _fault(value: str) -> str:
    parse_fault(value)
    return value


ModelName = Annotated[str, _loadable(load_model, "a model", "a config.json"), Shown("MODEL")]
MachineName = Annotated[str, _loadable(load_machine, "a machine", "a .toml file"), Shown("MACHINE")]
MODEL_TEXT = f"Model that is timed: a config.json, its folder, or {', '.join(model_names())}."
MACHINE_TEXT = f"Machine that is timed: a .toml file, or {', '.join(machine_names())}."
_DEFAULT = SimulationConfig()


class SimulationOptions(OptionGroup):
    """The options of `--backend sn40l`."""

    title: ClassVar[str] = "Simulation (`--backend sn40l`)"

    inner: InnerName = InnerName.TORCH
    """What the tokens come from."""
    simulate_model: Annotated[ModelName, Field(description=MODEL_TEXT)] = _DEFAULT.model
    simulate_machine: Annotated[MachineName, Field(description=MACHINE_TEXT)] = _DEFAULT.machine
    simulate_draft: Annotated[ModelName, Shown("MODEL")] = "llama-3.2-1b"
    """Model that is timed for --speculative-prefill-model. It takes none of the simulated memory."""
    uses_ddr: bool = _DEFAULT.uses_ddr
    """Let weights that HBM cannot hold stream from DDR."""
    sockets: Count = _DEFAULT.num_sockets
    """Sockets of the machine."""
    looping: bool = _DEFAULT.loops
    """Whether the kernels of all layers are one loop."""
    time_scale: Annotated[float | None, BeforeValidator(_time_scale), Shown("FACTOR|virtual")] = 1.0
    """How many times as fast simulated time passes; virtual for no waiting."""
    fault: Annotated[tuple[Annotated[str, AfterValidator(_fault)], ...], Shown("FAULT")] = ()
    """Faults: slow-socket=FACTOR, stalled-link=EVERY:SECONDS, failed-step=EVERY[:TIMES]."""

    def simulation(self, *, is_draft: bool = False) -> SimulationConfig:
        """Return the deployment of the model or of its draft.

        Raises ValueError for more sockets than the machine has.
        """
        most = load_machine(self.simulate_machine).max_sockets
        if self.sockets > most:
            raise ValueError(f"--sockets must be from 1 to {most}, got {self.sockets}")
        return SimulationConfig(
            model=self.simulate_draft if is_draft else self.simulate_model,
            machine=self.simulate_machine,
            num_sockets=self.sockets,
            loops=self.looping,
            uses_ddr=self.uses_ddr,
            time_scale=self.time_scale,
            faults=tuple(parse_fault(fault) for fault in self.fault),
        )


def _configure(
    base: BackendConfig, options: SimulationOptions, other: OtherBackend
) -> ConfiguredBackend[Any]:
    if base.prefix_cache_dir is not None:
        raise ValueError("prefix_cache_dir needs backend torch: the simulated machine has no disk")
    if base.prefix_cache_dtype.is_rounded:
        raise ValueError("prefix_cache_dtype must be auto with backend sn40l, which models it in bfloat16")
    if any(pool.kv_cache_dtype.is_rounded for pool in base.pools):
        raise ValueError("kv_cache_dtype must be auto with backend sn40l, which models slots in bfloat16")
    inner = other(options.inner)
    simulation = options.simulation(is_draft=base.is_draft)

    def create(config: Any, clock: Clock, vocab_size: int) -> Backend:
        backend = simulation.backend(inner.create(config, clock, vocab_size), clock)
        if base.prefix_cache_bytes and backend.spec.prefixes is None:
            backend.close()
            raise ValueError(
                "prefix_cache_bytes must be 0 or hold a block of the simulated model, on a machine with a "
                f"second memory, got {base.prefix_cache_bytes}"
            )
        return backend

    return ConfiguredBackend(
        inner.config, create, simulation.clock, simulation.time_scale or 1.0, str(simulation)
    )


ENTRY = BackendEntry(SimulationOptions, _configure)
