"""Published figures of speculative decoding on 16 sockets and on 8 H100.

The acceptance is not published. For each pair of models it is fitted on the speedup with 5 drafts, and the
speedups with 9 follow. A verification of k drafts is timed as a batch of k + 1 times the sequences, over the
same cache in all.
"""

from backends.sn40l.description.hardware import Machine
from backends.sn40l.evidence.figures import Figure, Machines, bind, value
from backends.sn40l.evidence.measures import model_of, seconds_of
from backends.sn40l.step.deployment import Execution
from backends.sn40l.step.speculation import expected_tokens

DATAFLOW = "successor of arXiv 2410.23668 (secondary)"
_CONTEXT = 4096
_PAIRS = (  # target, draft, and speedups with 5 drafts, 9 drafts, and 9 drafts at batch 16
    ("70B with 1B", "llama-3.1-70b", "llama-3.2-1b", 3.5, 4.7, 3.8),
    ("70B with 8B", "llama-3.1-70b", "llama-3.1-8b", 2.8, 3.5, 2.6),
    ("405B with 3B", "llama-3.1-405b", "llama-3.2-3b", 4.0, 6.1, 5.1),
)


def speculation_figures() -> tuple[Figure, ...]:
    source = f"{DATAFLOW}, table 4"
    note = "over fused, not looped, without drafts; 4k"
    unmodelled = "a verification is bound by products, whose efficiency was fitted on prefill"
    figures: list[Figure] = []
    for name, target, draft, few, many, batched in _PAIRS:
        constant = (("the speedup with 5 drafts", few),)
        for label, num_drafts, batch, published in (
            ("5 drafts", 5, 1, few),
            ("9 drafts", 9, 1, many),
            ("9 drafts, batch 16", 9, 16, batched),
        ):
            compute = bind(_speedup, target, draft, few, num_drafts, batch)
            nulls = constant if num_drafts == 9 else ()
            miss = unmodelled if num_drafts == 9 else ""
            figures.append(
                value(
                    f"{name}, {label}",
                    source,
                    "×",
                    published,
                    0.10,
                    compute,
                    note=note,
                    miss=miss,
                    nulls=nulls,
                )
            )
    return (*figures, _draft_share())


def _draft_share() -> Figure:
    def share(machines: Machines) -> float:
        draft, target = (
            seconds_of(machines["dgx-h100"], name, 8, Execution.FUSED, batch, _CONTEXT // batch)
            for name, batch in (("llama-3.1-8b", 1), ("llama-3.1-70b", 10))
        )
        return 100 * 9 * draft / (9 * draft + target)

    small, large = (model_of(name).weight_bytes for name in ("llama-3.1-8b", "llama-3.1-70b"))
    by_bytes = 100 * 9 * small / (9 * small + large)
    return value(
        "drafts' share of a step, 8 H100",
        DATAFLOW,
        "%",
        72,
        0.10,
        share,
        note="9 drafts of an 8B for a 70B",
        miss="the sources do not say how drafts are launched",
        nulls=(("weights alone", by_bytes),),
    )


def _speedup(
    machines: Machines, target: str, draft: str, fitted: float, num_drafts: int, batch: int
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
