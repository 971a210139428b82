"""A deployment: a model, the sockets of a machine, and the division of a layer into kernel calls."""

import enum
from dataclasses import dataclass

from backends.sn40l.description.hardware import Machine
from backends.sn40l.description.model_config import Attention, Model
from cache.policy import CachePolicy


class Execution(enum.StrEnum):
    """How a decoder layer becomes kernel calls."""

    OPERATORS = "operators"  # one call for each operator; intermediate results go through HBM
    FUSED = "fused"  # a layer is as few calls as the machine allows
    LOOPED = "looped"  # the calls of all layers are one (arXiv 2410.23668)


class DeploymentError(ValueError):
    """The machine does not support the execution."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `num_sockets` sockets of each of `num_nodes` nodes, which have equal shares of its layers.

    A step passes the nodes one after another, and no other step overlaps with it.

    With `host_launched`, the host starts each call. With `uses_ddr`, weights can overflow into DDR, with
    `slots_in_ddr`, slots can. HBM holds the weights of the models `beside` it, too.
    """

    model: Model
    machine: Machine
    num_sockets: int
    execution: Execution = Execution.FUSED
    host_launched: bool = False
    uses_ddr: bool = False
    slots_in_ddr: bool = False
    beside: tuple[Model, ...] = ()
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_sockets <= self.machine.max_sockets:
            raise DeploymentError(
                f"the machine has 1 to {self.machine.max_sockets} sockets, got {self.num_sockets}"
            )
        if not 1 <= self.num_nodes <= len(self.model.layers):
            raise DeploymentError(
                f"{len(self.model.layers)} layers have 1 to as many nodes, got {self.num_nodes}"
            )
        if self.num_nodes > 1 and not self.machine.node_bandwidth:
            raise DeploymentError("the machine has no node_bandwidth, so its nodes cannot share layers")
        if self.execution is Execution.LOOPED and not self.machine.loops_layers:
            raise DeploymentError(
                "only a machine with static graphs can loop over its layers' kernels: execution must be "
                "operators or fused"
            )
        if self.execution is Execution.LOOPED and self.host_launched:
            raise DeploymentError("a loop over layers is launched by the device, not by the host")

    @property
    def num_all_sockets(self) -> int:
        return self.num_sockets * self.num_nodes

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
    """A static decode graph: `batch` slots of `capacity` entries, live or not.

    `num_exact` is how many of a slot's entries are in the type of the cache; None: all. The others are in a
    store of 4 bits a value: a step scores all of them, and attends to the best `num_attended`. Layers with a
    sliding window have no store.
    """

    batch: int
    capacity: int
    num_exact: int | None = None
    num_attended: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.capacity < 1:
            raise DeploymentError(
                f"a decode graph needs at least one slot of one entry, got {self.batch} of {self.capacity}"
            )

    @classmethod
    def of(cls, policy: CachePolicy, batch: int, capacity: int | None = None) -> "DecodeShape":
        """Return the shape of a policy's slots, or of the first `capacity` entries of each."""
        entries = policy.capacity if capacity is None else capacity
        if policy.store is None:
            return cls(batch, entries)
        return cls(batch, entries, policy.layout.capacity, policy.store.num_attended)

    def num_stored(self, attention: Attention) -> int:
        """Return how many entries of a layer are in a store."""
        if self.num_exact is None or attention.window is not None:
            return 0
        return max(0, self.capacity - self.num_exact)

    def num_chosen(self, attention: Attention) -> int:
        """Return how many entries of a layer's store a step attends to."""
        return min(self.num_stored(attention), self.num_attended)

    def layer_bytes(self, model: Model, attention: Attention) -> float:
        """Return the bytes of one slot in a layer."""
        num_stored = self.num_stored(attention)
        num_exact = attention.num_entries(self.capacity) - num_stored
        return num_exact * attention.cache_width * model.precision.cache + num_stored * attention.stored_bytes

    def sequence_bytes(self, model: Model) -> float:
        """Return the bytes of one slot, all layers."""
        return sum(count * self.layer_bytes(model, layer.attention) for layer, count in model.kinds)
