"""The SN40L as a backend: an inner backend's tokens with a deployment's time."""

import math
from dataclasses import dataclass

from backends.clock import Clock, PacedClock, VirtualClock
from backends.interface import Backend, PrefixSpec
from backends.sn40l.description.hardware import load_machine
from backends.sn40l.description.model_config import load_model
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.deployment import Deployment, Execution
from backends.timed import Fault, SimulatedStore, TimedBackend


def default_deployment(
    model: str, machine: str, num_sockets: int, *, loops: bool = True, uses_ddr: bool = False
) -> Deployment:
    """Return a deployment by names, with looped layers if the machine supports them.

    Raises ValueErrors that name the wrong value.
    """
    described = load_machine(machine)
    execution = Execution.LOOPED if loops and described.loops_layers else Execution.FUSED
    return Deployment(load_model(model), described, num_sockets, execution, uses_ddr=uses_ddr)


def simulated_store(
    deployment: Deployment, num_bytes: int | None, block_tokens: int, max_blocks: int | None = None
) -> SimulatedStore | None:
    """Return a store of the simulated model's blocks in the machine's DDR, of `num_bytes` (None: all of it).

    Each socket copies its share of a block. None where the machine has no DDR, or no block has room.
    """
    block_bytes = math.ceil(deployment.model.cache_bytes(block_tokens))
    num_sockets, machine = deployment.num_all_sockets, deployment.machine
    room = int(num_sockets * machine.ddr_capacity)
    num_blocks = (room if num_bytes is None else min(room, num_bytes)) // block_bytes
    if max_blocks is not None:
        num_blocks = min(num_blocks, max_blocks)
    if num_blocks == 0:
        return None
    spec = PrefixSpec(num_blocks, block_tokens, block_bytes)
    return SimulatedStore(spec, num_sockets * machine.ddr_bandwidth)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The simulated deployment. Its time passes `time_scale` times as fast as real time; None never waits."""

    model: str = "llama-3.1-8b"
    machine: str = "sn40l"
    num_sockets: int = 16
    loops: bool = True
    uses_ddr: bool = False
    time_scale: float | None = 1.0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        pace = "without waiting" if self.time_scale is None else f"{self.time_scale:g} times as fast"
        faults = "".join(f", {fault}" for fault in self.faults)
        return f"{self.model} on {self.num_sockets} sockets of {self.machine}, {pace}{faults}"

    def clock(self) -> Clock:
        """Return the clock that the scheduler and the backend must share."""
        return VirtualClock() if self.time_scale is None else PacedClock(self.time_scale)

    def backend(self, inner: Backend, clock: Clock) -> TimedBackend:
        """Return `inner` with the deployment's time. Raises DoesNotFitError if the slots do not fit."""
        deployment = default_deployment(
            self.model, self.machine, self.num_sockets, loops=self.loops, uses_ddr=self.uses_ddr
        )
        held, store = inner.spec.prefixes, None
        if held is not None:
            # The inner backend has room for as many blocks as it holds itself.
            num_bytes = held.num_blocks * held.block_bytes
            store = simulated_store(deployment, num_bytes, held.block_tokens, held.num_blocks)
        return TimedBackend(inner, DeploymentCost(deployment, *inner.spec.pools), clock, self.faults, store)
