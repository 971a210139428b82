"""Speculative decoding: a draft proposes tokens, and the model verifies them in one step.

A verification of k drafts is timed as a batch of k + 1 times the sequences, over the same cache in all. The
draft's cache takes no memory here.
"""

from dataclasses import dataclass, replace

from backends.sn40l.description.model_config import Model
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment


@dataclass(frozen=True, slots=True)
class Speculation:
    """`num_drafts` tokens of a draft a step; each is accepted with probability `acceptance`."""

    draft: Model
    num_drafts: int
    acceptance: float

    @property
    def expected_tokens(self) -> float:
        return expected_tokens(self.acceptance, self.num_drafts)


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the expected tokens of a speculative step, if drafts are accepted independently."""
    return sum(acceptance**accepted for accepted in range(num_drafts + 1))


def token_seconds(deployment: Deployment, shape: DecodeShape, speculation: Speculation | None) -> float:
    """Return the seconds of a step, over the tokens that each sequence is expected to gain by it.

    Raises DoesNotFitError.
    """
    if speculation is None:
        return decode_seconds(deployment, shape)
    verified = speculation.num_drafts + 1
    verification = DecodeShape(shape.batch * verified, max(1, shape.capacity // verified))
    drafting = replace(deployment, model=speculation.draft, beside=())
    seconds = speculation.num_drafts * decode_seconds(drafting, shape)
    seconds += decode_seconds(deployment, verification)
    return seconds / speculation.expected_tokens
