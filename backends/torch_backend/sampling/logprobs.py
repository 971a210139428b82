"""Chosen tokens with their log-probabilities, on the device and on the way from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from backends.interface import Draw, SampledToken


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row; `top_ids` and `top_logprobs` are [row, alternative], most likely first."""

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def leave_device(self) -> "Sampled":
        """Return a copy that is on its way to the host's memory; it is there when the device has come so far. On a CPU it is there."""
        return Sampled(
            self.token_ids.to("cpu", non_blocking=True),
            *map(_leave, (self.logprobs, self.top_ids, self.top_logprobs)),
        )

    def to_host(self, num_logprobs: Mapping[int, int | None]) -> dict[int, SampledToken]:
        """Return the tokens of these rows, each with as many alternatives as it asked for; None: without log-probabilities."""
        token_ids = self.token_ids.tolist()
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return {row: SampledToken(token_ids[row]) for row in num_logprobs}
        logprobs, top_ids, top_logprobs = (
            self.logprobs.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
        )
        return {
            row: SampledToken(token_ids[row])
            if number is None
            else SampledToken(
                token_ids[row],
                logprobs[row],
                tuple(zip(top_ids[row][:number], top_logprobs[row][:number], strict=True)),
            )
            for row, number in num_logprobs.items()
        }


def _leave(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to("cpu", non_blocking=True)


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> Sampled:
    """Return the log-probabilities of `token_ids` [row] and of the most likely tokens under `logits` [row, token]."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Sampled(token_ids, logprobs.gather(1, token_ids[:, None])[:, 0], top.indices, top.values)


def steps_to_host(steps: Sequence[Sampled], draws: Mapping[int, Draw]) -> dict[int, tuple[SampledToken, ...]]:
    """Return the tokens of these rows over several steps."""
    columns = [
        step.to_host({row: draw.num_logprobs(number) for row, draw in draws.items()})
        for number, step in enumerate(steps)
    ]
    return {row: tuple(column[row] for column in columns) for row in draws}
