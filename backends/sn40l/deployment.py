"""A deployment: a model, the sockets of a machine, and the division of a layer into kernel calls."""

import enum
from dataclasses import dataclass

from backends.sn40l.hardware import Machine
from backends.sn40l.model_config import Model


class Execution(enum.StrEnum):
    """How a decoder layer becomes kernel calls."""

    OPERATORS = "operators"  # one call for each operator; intermediate results go through HBM
    FUSED = "fused"  # a layer is as few calls as the machine allows
    LOOPED = "looped"  # the calls of all layers are one (arXiv 2410.23668)


class DeploymentError(ValueError):
    """The machine does not support the execution."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `num_sockets` sockets.

    With `host_launched`, the host starts each call. With `uses_ddr`, weights can overflow into DDR.
    """

    model: Model
    machine: Machine
    num_sockets: int
    execution: Execution = Execution.FUSED
    host_launched: bool = False
    uses_ddr: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_sockets <= self.machine.max_sockets:
            raise DeploymentError(
                f"the machine has 1 to {self.machine.max_sockets} sockets, got {self.num_sockets}"
            )
        if self.execution is Execution.LOOPED and not self.machine.loops_layers:
            raise DeploymentError("only a machine with static graphs can loop over its layers' kernels")
        if self.execution is Execution.LOOPED and self.host_launched:
            raise DeploymentError("a loop over layers is launched by the device, not by the host")

    @property
    def sequence_splits(self) -> tuple[int, ...]:
        """The possible sizes of a group of sockets that splits one sequence's attention heads.

        The sequences are distributed over such groups.
        """
        return tuple(count for count in range(1, self.num_sockets + 1) if self.num_sockets % count == 0)

    @property
    def call_seconds(self) -> float:
        """The overhead of a kernel call, in seconds."""
        host = self.machine.host_launch if self.host_launched else 0.0
        return self.machine.launch + self.machine.drain + host


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A static decode graph: `batch` slots of `capacity` entries, live or not."""

    batch: int
    capacity: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.capacity < 1:
            raise DeploymentError(
                f"a decode graph needs at least one slot of one entry, got {self.batch} of {self.capacity}"
            )
