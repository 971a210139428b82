"""Speculative decoding on 16 sockets and on 8 H100.

The acceptance is not published. For each pair of models it is fitted on the speedup with 5 drafts, and the
speedups with 9 follow. A verification of k drafts is timed as a batch of k + 1 times the sequences, over the
same cache in all.
"""

from collections.abc import Mapping
from functools import partial

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Machines, Null, Value
from backends.sn40l.evidence.measures import model_of, seconds_of
from backends.sn40l.step.deployment import Execution
from backends.sn40l.step.speculation import expected_tokens

_CONTEXT = 4096
_PAIRS = {
    "70B with 1B": ("llama-3.1-70b", "llama-3.2-1b"),
    "70B with 8B": ("llama-3.1-70b", "llama-3.1-8b"),
    "405B with 3B": ("llama-3.1-405b", "llama-3.2-3b"),
}
_CELLS = (("5 drafts", 5, 1), ("9 drafts", 9, 1), ("9 drafts, batch 16", 9, 16))
_SHARE = "drafts' share of a step, 8 H100"


def values(published: Mapping[str, float]) -> dict[str, Value]:
    """Return our values by the figures' names."""
    found: dict[str, Value] = {
        f"{pair}, {cell}": partial(_speedup, *models, published[f"{pair}, 5 drafts"], num_drafts, batch)
        for pair, models in _PAIRS.items()
        for cell, num_drafts, batch in _CELLS
    }
    return found | {_SHARE: _draft_share}


def nulls(published: Mapping[str, float]) -> dict[str, tuple[Null, ...]]:
    """Return the speedup with 5 drafts for those with 9, and the share by the bytes of weights."""
    small, large = (model_of(name).weight_bytes for name in ("llama-3.1-8b", "llama-3.1-70b"))
    found: dict[str, tuple[Null, ...]] = {
        f"{pair}, {cell}": (("the speedup with 5 drafts", published[f"{pair}, 5 drafts"]),)
        for pair in _PAIRS
        for cell, _, _ in _CELLS[1:]
    }
    return found | {_SHARE: (("weights alone", 100 * 9 * small / (9 * small + large)),)}


def _draft_share(machines: Machines) -> float:
    draft, target = (
        seconds_of(machines["dgx-h100"], name, 8, Execution.FUSED, batch, _CONTEXT // batch)
        for name, batch in (("llama-3.1-8b", 1), ("llama-3.1-70b", 10))
    )
    return 100 * 9 * draft / (9 * draft + target)


def _speedup(
    target: str, draft: str, fitted: float, num_drafts: int, batch: int, machines: Machines
) -> float:
    machine = machines["sn40l"]
    # Bisection: the speedup grows with the acceptance.
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if _speedup_at(machine, target, draft, middle, 5, 1) < fitted:
            low = middle
        else:
            high = middle
    return _speedup_at(machine, target, draft, high, num_drafts, batch)


def _speedup_at(
    machine: Machine, target: str, draft: str, acceptance: float, num_drafts: int, batch: int
) -> float:
    plain = _seconds(machine, target, Execution.FUSED, batch)
    drafts = num_drafts * _seconds(machine, draft, Execution.LOOPED, batch)
    verification = _seconds(machine, target, Execution.LOOPED, batch, num_drafts + 1)
    return expected_tokens(acceptance, num_drafts) * plain / (drafts + verification)


def _seconds(machine: Machine, name: str, execution: Execution, batch: int, num_tokens: int = 1) -> float:
    return seconds_of(machine, name, 16, execution, batch * num_tokens, _CONTEXT // num_tokens)
