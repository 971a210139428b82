"""The deployments and cache policies that the options select."""

from backends.sn40l.backend import default_deployment
from backends.sn40l.deployment import Deployment, Execution
from backends.sn40l.hardware import Machine, load_machine
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from commands.simulate.options import MachineOptions
from server.options.command_line import OptionError


def deployment_of(
    options: MachineOptions, num_sockets: int | None = None, *, loops: bool = True
) -> Deployment:
    """Return the deployment on `num_sockets` sockets (None: all). Raises `OptionError` for too many."""
    max_sockets = load_machine(options.machine).max_sockets
    if num_sockets is not None and num_sockets > max_sockets:
        raise OptionError(
            f"--sockets must be from 1 to {max_sockets}, the number of --machine {options.machine}, "
            f"got {num_sockets}"
        )
    return default_deployment(
        options.model, options.machine, num_sockets or max_sockets, loops=loops, uses_ddr=options.uses_ddr
    )


def policy_of(name: PolicyName, slot_capacity: int) -> PolicyOptions:
    """Return a policy with slots of `slot_capacity` entries. The policy full keeps every token instead.

    Raises `OptionError` for a policy that the simulator does not model.
    """
    if name is PolicyName.SPARSE:
        raise OptionError(
            f"policy {name} is not simulated: its steps read few of the tokens that a slot holds"
        )
    return PolicyOptions(name, slot_capacity=None if name is PolicyName.FULL else slot_capacity)


def default_executions(machine: Machine) -> tuple[Execution, ...]:
    """Return the executions that a sweep compares: those without spilling that the machine supports."""
    return (Execution.FUSED, Execution.LOOPED) if machine.loops_layers else (Execution.FUSED,)
