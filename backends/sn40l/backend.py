"""The SN40L as a backend: an inner backend's tokens with a deployment's time."""

from collections.abc import Sequence

from backends.clock import Clock
from backends.interface import Backend
from backends.sn40l.cost_model import DeploymentCost
from backends.sn40l.deployment import Deployment, Execution
from backends.sn40l.hardware import load_machine
from backends.sn40l.model_config import load_model
from backends.timed import Fault, TimedBackend


def default_deployment(model: str, machine: str, num_sockets: int, *, loops: bool = True, uses_ddr: bool = False) -> Deployment:
    """Return a deployment by names, with its layers looped where the machine can. Raises ValueErrors that name what is wrong."""
    described = load_machine(machine)
    execution = Execution.LOOPED if loops and described.is_static else Execution.FUSED
    return Deployment(load_model(model), described, num_sockets, execution, uses_ddr=uses_ddr)


def simulated_backend(inner: Backend, deployment: Deployment, clock: Clock, faults: Sequence[Fault] = ()) -> TimedBackend:
    """Return `inner` with the time that its slots would take on `deployment`. Raises DoesNotFitError."""
    return TimedBackend(inner, DeploymentCost(deployment, inner.spec.pools[0]), clock, faults)
