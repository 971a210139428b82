"""The options of a draft model that shortens long prompts."""

import enum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from backends.options import OptionGroup, Shown, Tokens
from server.options.models import Model


class DraftQueries(enum.StrEnum):
    """The tokens whose attention scores a prompt."""

    TAIL = "tail"  # the prompt's last ones and those of the question
    LOOK_AHEAD = "look-ahead"  # the prompt's last one and the first ones that the draft would answer


def _whole(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("a share of at most 1, or a whole number of tokens")
    return value


Keep = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    AfterValidator(_whole),
    Shown("SHARE|TOKENS", expected="a share of at most 1, or a whole number of tokens"),
]


class SpeculativePrefill(OptionGroup):
    """A draft that reads long prompts first, so that the model reads only what matters of them."""

    title: ClassVar[str] = "Speculative prefill"

    speculative_prefill_model: Annotated[
        Model | None, Shown("MODEL", default="none: nothing is shortened")
    ] = None
    """Small model that reads long prompts first and drops what their question does not need, before --model
    reads the rest. It may be of another family."""
    speculative_prefill_threshold: Tokens = 4096
    """Tokens from which on a prompt is shortened."""
    speculative_prefill_keep: Keep = 0.25
    """What is kept of a prompt: a share of its chunks, or the most tokens that --model reads."""
    speculative_prefill_queries: DraftQueries = DraftQueries.TAIL
    """Whose attention scores the prompt: tail is that of its last tokens and of the question, look-ahead that
    of the first 8 tokens that the draft would answer."""
