"""How much each layer looks things up, found by reading random tokens twice.

In the second reading nothing but the first tells what comes next. Heads that look up what stood before attend there to the token that
followed this one the first time (induction heads: Olsson et al., arXiv 2209.11895). Heads that look for something else find nothing in
random tokens, and rest on the first one (attention sinks: Xiao et al., arXiv 2309.17453); so do heads of no use. It is known here how the
model attends, not what is made of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from backends.torch_backend.model.attention import HIDDEN, AttentionOptions, grouped_attention
from backends.torch_backend.model.probe import PassingLayer

_NUM_TOKENS = 128  # read twice
_REST = 0.75  # what attention counts that rests: of such heads, it is not known whether they would look up anything


class LookUp(NamedTuple):
    """Shares, 0 to 1, of a layer's attention."""

    found: float  # goes to what followed the same token before
    rests: float  # rests on the first token

    @property
    def score(self) -> float:
        """How much kept entries are worth to the layer."""
        return self.found + _REST * self.rests


def measure_look_up(model: PreTrainedModel, num_layers: int, max_model_len: int) -> list[LookUp]:
    """Return how much each layer's heads look up, on the average.

    The first token is the model's own for beginnings, where it has one. Sequences of fewer than four tokens and that one give zeros.
    """
    bos, vocab_size = getattr(model.config, "bos_token_id", None), model.config.vocab_size
    first = [bos] if isinstance(bos, int) and 0 <= bos < vocab_size else []
    num_tokens = min(_NUM_TOKENS, (max_model_len - len(first)) // 2)
    if num_tokens < 2:
        return [LookUp(0.0, 0.0)] * num_layers
    once = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    cache = _LookupCache(num_layers, num_tokens)
    ids = torch.cat([torch.tensor(first, dtype=torch.long), once, once])[None].to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    with torch.inference_mode():
        model.base_model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, slot_cache=cache
        )
    return cache.measured


class _LookupCache(Cache):
    """Attends as the model does, and watches where to."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        super().__init__(layers=[PassingLayer() for _ in range(num_layers)])  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.measured = [LookUp(0.0, 0.0)] * num_layers

    def store(self, layer: int, latents: Tensor) -> Tensor:  # noqa: ARG002
        return latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention; values that each stand for one token have it tell its weights as well."""
        length, index = query.shape[2], torch.arange(query.shape[2], device=query.device)
        is_seen = index <= index[:, None]
        if options.sliding_window is not None:
            is_seen &= index > index[:, None] - options.sliding_window
        bias = torch.zeros(1, length, length, device=query.device).masked_fill_(~is_seen, HIDDEN)
        each = torch.eye(length, dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)
        scaling, softcap, sinks, both = (
            options.scaling,
            options.softcap,
            options.sinks,
            torch.cat([value, each], dim=3),
        )
        mixed = grouped_attention(
            query, key, both, bias, scaling=scaling, softcap=softcap, sinks=sinks, is_causal=True
        )
        output, weights = (
            mixed[..., : value.shape[3]],
            mixed[0, ..., value.shape[3] :],
        )  # the latter [query, head, key]
        second = index[-self._num_tokens :]
        found, rests = weights[second, :, second - self._num_tokens + 1], weights[second, :, 0]
        self.measured[layer] = LookUp(float(found.float().mean()), float(rests.float().mean()))
        return output
