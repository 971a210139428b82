"""Sampled tokens with their log-probabilities, and their copy to the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from backends.interface import Draw, SampledToken


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row. `top_ids` and `top_logprobs` are [row, alternative], most likely first.

    `named_logprobs` [row, token] are those of the row's named tokens, then anything.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    named_logprobs: Tensor | None = None

    def leave_device(self) -> "Sampled":
        """Start an asynchronous copy to the host. It is complete when the device has reached it."""
        return Sampled(
            self.token_ids.to("cpu", non_blocking=True),
            *map(_leave, (self.logprobs, self.top_ids, self.top_logprobs, self.named_logprobs)),
        )

    def to_host(self, num_logprobs: Mapping[int, int | None]) -> dict[int, SampledToken]:
        """Return the tokens of these rows with their number of alternatives. None is no log-probabilities."""
        token_ids = self.token_ids.tolist()
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return {row: SampledToken(token_ids[row]) for row in num_logprobs}
        logprobs = self.logprobs.tolist()
        top_ids = self.top_ids.tolist()
        top_logprobs = self.top_logprobs.tolist()
        tokens = {}
        for row, num_top in num_logprobs.items():
            if num_top is None:
                tokens[row] = SampledToken(token_ids[row])
            else:
                top = tuple(zip(top_ids[row][:num_top], top_logprobs[row][:num_top], strict=True))
                tokens[row] = SampledToken(token_ids[row], logprobs[row], top)
        return tokens


def _leave(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to("cpu", non_blocking=True)


def log_probabilities(
    logits: Tensor, token_ids: Tensor, num_top: int, named: Tensor | None = None
) -> Sampled:
    """Return the log-probabilities of `token_ids` [row] and of the likeliest tokens of `logits`.

    Those of the tokens `named` [row, token] are returned too.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Sampled(
        token_ids,
        logprobs.gather(1, token_ids[:, None])[:, 0],
        top.indices,
        top.values,
        None if named is None else logprobs.gather(1, named),
    )


def steps_to_host(steps: Sequence[Sampled], draws: Mapping[int, Draw]) -> dict[int, tuple[SampledToken, ...]]:
    """Return the tokens of these rows over several steps."""
    columns = [
        step.to_host({row: draw.num_logprobs(index) for row, draw in draws.items()})
        for index, step in enumerate(steps)
    ]
    for index, step in enumerate(steps):
        if step.named_logprobs is None:
            continue
        named_logprobs = step.named_logprobs.tolist()
        for row, draw in draws.items():
            pairs = tuple(zip(draw.logprob_token_ids(index), named_logprobs[row], strict=False))
            columns[index][row] = replace(columns[index][row], named_logprobs=pairs)
    return {row: tuple(column[row] for column in columns) for row in draws}
