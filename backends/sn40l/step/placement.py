"""Places a deployment: weights and slots in HBM, overflowing weights in DDR, activations in SRAM.

What does not fit is refused, with the bytes that are missing. Amounts are those of the busiest socket.
"""

import math
from dataclasses import dataclass, replace

from backends.sn40l.description.model_config import Attention, Model
from backends.sn40l.step.deployment import DecodeShape, Deployment


class DoesNotFitError(ValueError):
    """A tier is too small. `missing` is in bytes a socket."""

    def __init__(self, tier: str, needed: float, available: float, parts: str) -> None:
        self.tier = tier
        self.needed = needed
        self.available = available
        self.missing = needed - available
        super().__init__(
            f"does not fit into {tier}: {parts} need {needed / 1e9:.2f} GB a socket, "
            f"{available / 1e9:.2f} GB are free, "
            f"{self.missing / 1e9:.2f} GB are missing"
        )


@dataclass(frozen=True, slots=True)
class Tier:
    """One memory of a socket."""

    name: str
    capacity: float
    parts: tuple[tuple[str, float], ...]

    @property
    def used(self) -> float:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class Placement:
    """A deployment's parts in the memories of one socket.

    Each sequence's attention is split over `sockets_per_sequence` sockets.
    """

    sockets_per_sequence: int
    tiers: tuple[Tier, ...]
    ddr_weight_share: float  # of all weights, those that stream from DDR
    ddr_slot_share: float  # of all slots


def num_sequences(batch: int, num_sockets: int, sockets_per_sequence: int) -> int:
    """Return how many sequences' attention the busiest socket has a part in."""
    return math.ceil(batch * sockets_per_sequence / num_sockets)


def slots_share(
    attention: Attention, shape: DecodeShape, num_sockets: int, sockets_per_sequence: int
) -> float:
    """Return the share of all slots on the busiest socket. Cache heads are repeated instead of split."""
    heads = math.ceil(attention.num_kv_heads / sockets_per_sequence) / attention.num_kv_heads
    return heads * num_sequences(shape.batch, num_sockets, sockets_per_sequence) / shape.batch


def slot_bytes(model: Model, shape: DecodeShape, num_sockets: int, sockets_per_sequence: int) -> float:
    """Return the bytes of slots on the busiest socket."""
    return shape.batch * sum(
        count
        * shape.layer_bytes(model, layer.attention)
        * slots_share(layer.attention, shape, num_sockets, sockets_per_sequence)
        for layer, count in model.kinds
    )


def place(deployment: Deployment, shape: DecodeShape, sockets_per_sequence: int) -> Placement:
    """Return the placement. Raises DoesNotFitError."""
    model = deployment.model
    machine = deployment.machine
    num_sockets = deployment.num_sockets
    activations = (
        2 * 2.0 * shape.batch * (model.hidden_size + model.vocab_size / num_sockets)
    )  # double-buffered, 16 bits
    spilled = max(0.0, activations - machine.sram_capacity) if machine.spills_activations else 0.0
    if activations - spilled > machine.sram_capacity:
        raise DoesNotFitError(
            "SRAM", activations, machine.sram_capacity, f"activations of {shape.batch} sequences"
        )
    reserve = machine.hbm_reserve * machine.hbm_capacity
    weights = model.weight_bytes / deployment.num_all_sockets
    beside = sum(other.weight_bytes for other in deployment.beside) / deployment.num_all_sockets
    slots = slot_bytes(model, shape, num_sockets, sockets_per_sequence) / deployment.num_nodes
    available = machine.hbm_capacity - reserve - spilled - beside
    overflow = max(0.0, weights + slots - available)
    in_ddr = min(weights, overflow) if deployment.uses_ddr else 0.0
    moved = min(slots, overflow - in_ddr) if deployment.slots_in_ddr else 0.0
    kept = weights - in_ddr
    slots -= moved
    if kept + slots > available:
        raise DoesNotFitError(
            "HBM",
            kept + beside + slots,
            available + beside,
            f"weights and {shape.batch} slots of {shape.capacity} entries",
        )
    if in_ddr + moved > machine.ddr_capacity:
        parts = "weights and slots that HBM cannot hold"
        raise DoesNotFitError("DDR", in_ddr + moved, machine.ddr_capacity, parts)
    tiers = (
        Tier("SRAM", machine.sram_capacity, (("activations", activations - spilled),)),
        Tier(
            "HBM",
            machine.hbm_capacity,
            (
                ("weights", kept),
                ("other models", beside),
                ("slots", slots),
                ("activations", spilled),
                ("reserve", reserve),
            ),
        ),
        Tier("DDR", machine.ddr_capacity, (("weights", in_ddr), ("slots", moved))),
    )
    return Placement(sockets_per_sequence, tiers, in_ddr / weights, moved / (slots + moved))


def switch_seconds(deployment: Deployment) -> float:
    """Return how long the model's weights take from DDR into HBM, in place of another model's."""
    machine = deployment.machine
    return deployment.model.weight_bytes / (deployment.num_all_sockets * machine.ddr_bandwidth)


def fitting(deployment: Deployment, shape: DecodeShape) -> tuple[Placement, ...]:
    """Return the placements that fit, one for each split of attention.

    If none fits, raises the DoesNotFitError of the one that misses least.
    """
    placements: list[Placement] = []
    refusals: list[DoesNotFitError] = []
    for sockets_per_sequence in deployment.sequence_splits:
        try:
            placements.append(place(deployment, shape, sockets_per_sequence))
        except DoesNotFitError as refusal:
            refusals.append(refusal)
    if not placements:
        raise min(refusals, key=lambda refusal: refusal.missing)
    return tuple(placements)


def max_batch(deployment: Deployment, slot: DecodeShape, limit: int = 4096) -> int:
    """Return the largest number of slots like those of `slot` that fit, or 0.

    Static graphs have a power of two, as the published ones.
    """
    if deployment.machine.rounds_slots:
        candidates = [2**power for power in range(int(math.log2(limit)) + 1)]
        return max(
            (batch for batch in candidates if _fits(deployment, replace(slot, batch=batch))), default=0
        )
    # Bisection: if a batch fits, so does every smaller one.
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(deployment, replace(slot, batch=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(deployment: Deployment, shape: DecodeShape) -> bool:
    try:
        fitting(deployment, shape)
    except DoesNotFitError:
        return False
    return True
