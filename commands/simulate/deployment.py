"""The deployments and cache policies that options ask for."""

from backends.sn40l.backend import default_deployment
from backends.sn40l.deployment import Deployment
from backends.sn40l.hardware import load_machine
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from commands.simulate.options import MachineOptions
from server.options.command_line import OptionError


def deployment_of(
    options: MachineOptions, num_sockets: int | None = None, *, loops: bool = True
) -> Deployment:
    """Return the deployment on so many sockets, or on all. Raises `OptionError` for more than the machine has."""
    most = load_machine(options.machine).max_sockets
    if num_sockets is not None and num_sockets > most:
        raise OptionError(
            f"--sockets must be from 1 to {most}, which is what --machine {options.machine} has, got {num_sockets}"
        )
    return default_deployment(
        options.model, options.machine, num_sockets or most, loops=loops, uses_ddr=options.uses_ddr
    )


def policy_of(name: PolicyName, slot_capacity: int) -> PolicyOptions:
    """Return a policy with slots of this size, or of any length where it holds everything."""
    return PolicyOptions(name, slot_capacity=None if name is PolicyName.FULL else slot_capacity)
