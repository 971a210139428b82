"""The published figures, and the same quantities from this model.

Sources are public papers and talks. "(secondary)" marks a figure from notes of others. A figure's note says
what its source leaves open, such as a context length. `evidence` says which of them test the model.
"""

from collections.abc import Mapping
from dataclasses import replace

from backends.sn40l.evidence import published_calls, published_decode, published_r1, published_speculation
from backends.sn40l.evidence.figures import Figure

_RESERVE = "the reserve and powers of two were chosen with it in view"
_FOLLOWS: Mapping[str, str] = {
    "R1 128k: gain": "both of its cells are fitted",
    "R1 32k full: rate": "the cell R1 128k→32k",
    "R1 prefill: SnapStream": "the shares of selection and ring",
    "R1 prefill: attention": "the rest of a sum with three fitted shares",
    **{
        f"R1 {cell}: batch": _RESERVE
        for cell in ("128k full", "128k→32k", "64k full", "64k→16k", "32k full", "32k→8k")
    },
    "share of peak, 8B": "8B on 16 sockets, fitted",
    "share of peak, least": "8B on 16 sockets, fitted",
    "looping, 8B": "8B on 16 sockets, fitted",
    "over DGX H100, best": "the quotient of two fitted rates",
    "8B on 8 H100, of peak": "8B on 8 H100, fitted",
    "8B on an A100, one request": "stream_efficiency was chosen with it in view",
    "8 → 16 sockets, best": "what is compared was chosen with it in view",
    "Qwen2.5-72B looping, large batch": "that only loops stream ahead was chosen with it in view",
    "fusion at prefill, launches": "the number of operators was chosen with it in view",
    **{
        f"{pair}, 5 drafts": "it fits the acceptance of this pair"
        for pair in ("70B with 1B", "70B with 8B", "405B with 3B")
    },
}

MACHINES = ("sn40l", "dgx-h100", "a100")
"""The machines of published figures."""

LEFT_OUT: Mapping[str, str] = {
    "457 and 129 tokens/s of 70B and 405B": "the number of drafts and the acceptance are not published",
    "BatchStreaming, ScheduleOffloading": "not modelled: gains of samples that overlap within a layer",
    "composition of experts, 3.7×, 2.7×, 1.5×, 2.3×": "routing between models is not modelled",
    "FlashFFTConv, 13×": "no model's layer",
    "DDR to HBM, 31× of a DGX A100": "a quotient of two data sheets",
    "MiniMax TTFT 0.25, 0.89, 22.3 s": "of four H200 with a share of transfer that is not published",
    "accuracy": "no time",
}
"""Published figures that the model does not compute, and why."""


def published_figures() -> tuple[Figure, ...]:
    """Return every published figure that the model covers."""
    figures = (
        *published_decode.model_figures(),
        *published_r1.decode_figures(),
        *published_r1.prefill_figures(),
        *published_decode.looping_figures(),
        *published_decode.decode_figures(),
        *published_decode.vllm_figures(),
        *published_calls.orchestration_figures(),
        *published_calls.memory_figures(),
        *published_speculation.speculation_figures(),
    )
    unknown = _FOLLOWS.keys() - {figure.key for figure in figures}
    assert not unknown, f"no figures: {unknown}"
    return tuple(replace(figure, follows=_FOLLOWS.get(figure.key, "")) for figure in figures)
