"""The published figures, and the same quantities from this model.

Twelve of them fit one parameter each. All others are held out.

Sources are public papers and talks. "(secondary)" marks a figure from notes of others. A figure's note says
what its source leaves open, such as a context length.
"""

from dataclasses import replace

from backends.sn40l import published_calls, published_decode, published_r1
from backends.sn40l.figures import Figure

# Implied by a fitted figure (the same cell of table 5, the same measurement in another unit, the rest of a
# sum), or by the model's form, which was chosen with these figures in view.
_IMPLIED = (
    "R1 128k: gain",
    "R1 32k full: rate",
    "R1 prefill: SnapStream",
    "share of peak, 8B",
    "share of peak, least",
    "looping, 8B",
    "8B on 8 H100, of peak",
    "Qwen2.5-72B looping, large batch",
    "fusion at prefill, launches",
)


def published_figures() -> tuple[Figure, ...]:
    """Return every published figure that the model covers."""
    figures = (
        *published_decode.model_figures(),
        *published_r1.decode_figures(),
        *published_r1.prefill_figures(),
        *published_decode.looping_figures(),
        *published_decode.decode_figures(),
        *published_calls.orchestration_figures(),
        *published_calls.memory_figures(),
    )
    return tuple(replace(figure, is_implied=True) if figure.key in _IMPLIED else figure for figure in figures)
