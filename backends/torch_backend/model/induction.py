"""How much of each layer's attention is induction, measured by reading random tokens twice.

In the second reading, only the first one predicts the next token. Induction heads attend there to the token
that followed the same token the first time (Olsson et al., arXiv 2209.11895). Heads that look for something
else find nothing in random tokens, and attend to the first token (attention sinks: Xiao et al., arXiv
2309.17453); so do heads that do nothing. This module knows how the model attends, not how the scores are
used.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from backends.checkpoint import CACHE
from backends.torch_backend.files import write_whole
from backends.torch_backend.model.attention import MASKED, AttentionOptions, grouped_attention
from backends.torch_backend.model.probe import PassingLayer
from backends.torch_backend.model.recurrent import Mix, RowStates

logger = logging.getLogger(__name__)

INDUCTION_CACHE: Final = CACHE / "induction"

_FORMAT = "1"  # of stored scores; a change of how they are measured changes it
_NUM_TOKENS = 128  # read twice
# What attention to the first token counts: whether these heads would retrieve anything is not known.
_SINK_WEIGHT = 0.75


class InductionScore(NamedTuple):
    """Shares, from 0 to 1, of a layer's attention in the second reading."""

    matched: float  # to the token that followed the same token in the first reading
    sink: float  # to the first token

    @property
    def total(self) -> float:
        """What kept entries are worth to the layer."""
        return self.matched + _SINK_WEIGHT * self.sink


def induction_scores(
    model: PreTrainedModel, num_layers: int, max_model_len: int, name: str, cache: Path
) -> list[InductionScore]:
    """Return what `measure_induction` does, from a file of the folder `cache` if it was measured before.

    `name` is of the model's weights and numbers. What another processor measured, whose rounding differs, is
    accepted. The measurement takes 5 s on two cores with AVX2 for 135 M parameters in bfloat16. A folder that
    cannot be written only costs that time again.
    """
    path = cache / f"{name}-{min(max_model_len, 2 * _NUM_TOKENS + 1)}-{_FORMAT}.json"
    with suppress(OSError, ValueError, TypeError):
        stored = [InductionScore(*pair) for pair in json.loads(path.read_text())]
        if len(stored) == num_layers and _are_shares(stored):
            return stored
    measured = measure_induction(model, num_layers, max_model_len)
    if _are_shares(measured):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(measured))
        except OSError as error:
            logger.info("the layers' scores cannot be stored, so each start measures them: %s", error)
    return measured


def _are_shares(scores: Sequence[InductionScore]) -> bool:
    return all(0 <= share <= 1 for score in scores for share in score)


def measure_induction(model: PreTrainedModel, num_layers: int, max_model_len: int) -> list[InductionScore]:
    """Return the scores of the first `num_layers` layers, which store keys: each the average of its heads'.

    The first token is the model's beginning of sequence, if it has one. A `max_model_len` of less than four
    tokens, or five with that one, gives zeros.
    """
    bos = getattr(model.config, "bos_token_id", None)
    vocab_size = model.config.vocab_size
    first = [bos] if isinstance(bos, int) and 0 <= bos < vocab_size else []
    num_tokens = min(_NUM_TOKENS, (max_model_len - len(first)) // 2)
    if num_tokens < 2:
        return [InductionScore(0.0, 0.0)] * num_layers
    once = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    cache = _MeasuringCache(model.config.num_hidden_layers, num_tokens)
    ids = torch.cat([torch.tensor(first, dtype=torch.long), once, once])[None].to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    with torch.inference_mode():
        model.base_model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, slot_cache=cache
        )
    return cache.scores[:num_layers]


class _MeasuringCache(Cache):
    """Attends as the model does, and measures the attention weights."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        super().__init__(layers=[PassingLayer() for _ in range(num_layers)])  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.scores = [InductionScore(0.0, 0.0)] * num_layers

    def store(self, layer: int, latents: Tensor) -> Tensor:  # noqa: ARG002
        return latents

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return mixer(hidden, RowStates())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention, and measure it in the second reading."""
        length = query.shape[2]
        index = torch.arange(length, device=query.device)
        is_seen = index <= index[:, None]
        if options.sliding_window is not None:
            is_seen &= index > index[:, None] - options.sliding_window
        bias = torch.zeros(1, length, length, device=query.device).masked_fill_(~is_seen, MASKED)
        # With one-hot vectors beside the values, the attention's output has its weights beside the mixed
        # values.
        one_hot = torch.eye(length, dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)
        mixed = grouped_attention(
            query,
            key,
            torch.cat([value, one_hot], dim=3),
            bias,
            scaling=options.scaling,
            softcap=options.softcap,
            sinks=options.sinks,
            is_causal=True,
        )
        width = value.shape[3]
        weights = mixed[0, ..., width:]  # [query, head, key]
        second = index[-self._num_tokens :]
        matched = weights[second, :, second - self._num_tokens + 1]
        sink = weights[second, :, 0]
        self.scores[layer] = InductionScore(float(matched.float().mean()), float(sink.float().mean()))
        return mixed[..., :width]
