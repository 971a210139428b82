"""A sequence read and continued by a transformers model whose attention sees only the reference slots.

The model's own layers make queries, keys and values. The reference's attention function, in place of the
model's, holds them in `Slot`s and reads them one head at a time.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tests.reference.recipe import Recipe
from tests.reference.slot import Slot, Token
from tests.reference.votes import attention_received, candidates, chunked, next_best, reduced, top

_ATTENTION = "plain_reference"


class Layer:
    """One layer of a sequence: a slot for each KV head, and the scores by which its kept tokens were
    chosen.
    """

    def __init__(
        self,
        recipe: Recipe,
        scores: list[Tensor],
        kept: list[list[int]],
        slots: list[Slot],
        received: list[list[Tensor]] | None = None,
    ) -> None:
        self.recipe = recipe
        self.received = (
            received or []
        )  # by KV head and query head, the attention that each candidate received
        self.scores = scores
        self.kept = kept
        self.slots = slots


class _States(DynamicCache):
    """The states of recurrent layers. Attention's keys and values are in the reference's slots instead."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Sequence:
    """A prompt and its greedy continuation. `logits` has a row for every token that was or could be drawn."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, prompt: list[int]) -> None:
        self._model = model
        self._recipe = recipe
        self.layers: dict[int, Layer] = {}
        self.tokens: list[int] = []
        self._num_tokens = len(prompt)
        self._states = _States(config=model.config)
        self._first_index = 0  # of the tokens under way
        self._prompt_states: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by layer, while the echo is read
        self.prompt_logits = self._read_prompt(prompt)  # [token, vocabulary]
        self.logits = [self.prompt_logits[-1]]

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def states(self, layer: int) -> list[Tensor]:
        """Return the states of a recurrent layer."""
        held: Any = self._states.layers[layer]
        return [
            *held.conv_states.values(),
            *(each for each in held.recurrent_states.values() if each is not None),
        ]

    def extend(self, num_tokens: int) -> list[int]:
        """Draw `num_tokens` more tokens greedily and return all drawn; slots hold all of them but the
        last.
        """
        for _ in range(num_tokens):
            self._predict()
            self.tokens.append(int(self.logits[-1].argmax()))
        return self.tokens

    def follow(self, token_ids: list[int]) -> None:
        """Continue with these tokens instead of drawing any."""
        for token_id in token_ids:
            self._predict()
            self.tokens.append(token_id)

    def _predict(self) -> None:
        if self.tokens:
            self.logits.append(self._forward(self.tokens[-1:], self._num_tokens)[-1])
            self._num_tokens += 1

    def _read_prompt(self, prompt: list[int]) -> Tensor:
        logits = self._forward(prompt, 0)
        if self._recipe.num_echoed > 0:
            states = copy.deepcopy(self._states)
            self._forward(prompt[: self._recipe.num_echoed], len(prompt))
            self._states = states
        return logits

    @torch.no_grad()
    def _forward(self, token_ids: list[int], first_index: int) -> Tensor:
        positions = torch.arange(first_index, first_index + len(token_ids))
        self._first_index = first_index
        output = self._model(
            input_ids=torch.tensor([token_ids]),
            position_ids=positions[None],
            past_key_values=self._states,
            use_cache=True,
            reference_sequence=self,
        )
        logits: Tensor = output.logits[0]
        return logits

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        has_latents: bool = False,
    ) -> Tensor:
        """Hold a layer's keys and values [kv_head, token, width]; return what its queries [head, token,
        width] read.

        Where keys and values are made of latents, all heads keep the same tokens.
        """
        if layer_index in self.layers:
            return self._read_slots(self.layers[layer_index], query, key, value, scaling, softcap)
        recipe = self._recipe.of_layer(layer_index) if window is None else Recipe.sliding(window)
        leading = self._recipe.leading_layer
        leader = (
            self.layers[leading] if leading is not None and layer_index > leading and window is None else None
        )
        group, num_new = len(query) // len(key), query.shape[1]
        if layer_index in self._prompt_states:
            # The tokens under way are the echo, which sees the whole prompt.
            prompt = self._prompt_states[layer_index]
            query, key, value = (torch.cat(pair, 1) for pair in zip(prompt, (query, key, value), strict=True))
            echo = num_new
        else:
            echo = 0
        if self._recipe.num_echoed == 0 or echo > 0:
            self.layers[layer_index] = _pack(
                recipe, query, key, value, scaling, softcap, has_latents, leader, echo
            )
        else:
            self._prompt_states[layer_index] = query, key, value
        return torch.stack(
            [
                _causal(query[head], key[head // group], value[head // group], scaling, window, softcap)[
                    -num_new:
                ]
                for head in range(len(query))
            ]
        )

    def _read_slots(
        self, layer: Layer, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
    ) -> Tensor:
        index, group = self._first_index, len(query) // len(key)
        attended = []
        for kv_head, slot in enumerate(layer.slots):
            slot.append(Token(index, key[kv_head, 0], value[kv_head, 0]))
            queries = query[kv_head * group : (kv_head + 1) * group, 0]
            best = _best_stored(slot.stored, queries, scaling, softcap, layer.recipe.num_attended)
            attended.append(slot.held() + best)
        return torch.stack(
            [read(query[head, 0], attended[head // group], scaling, softcap) for head in range(len(query))]
        )[:, None]


def load_reference(path: Path) -> PreTrainedModel:
    """Load a checkpoint with the reference's attention in place of its own."""
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=_ATTENTION
    )
    return model


def _no_mask(*_: Any, **__: Any) -> None:
    """The reference masks by itself."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001
    scaling: float,
    reference_sequence: Sequence,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    has_latents = hasattr(module, "kv_lora_rank")
    mixed = reference_sequence.attend(
        module.layer_idx, query[0], key[0], value[0], scaling, sliding_window, softcap, has_latents
    )
    return mixed.transpose(0, 1)[
        None
    ].contiguous(), None  # as transformers' own functions do, and some models need


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _pack(
    recipe: Recipe,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    has_latents: bool,
    leader: Layer | None,
    num_echoed: int,
) -> Layer:
    num_tokens, group = key.shape[1] - num_echoed, len(query) // len(key)
    chosen = candidates(recipe, num_tokens)
    scores, kept, slots, received = [], [], [], []
    for kv_head in range(len(key)):
        best, lent = list(chosen), []
        if chosen and recipe.num_kept > 0:
            voters = range(len(query)) if has_latents else range(kv_head * group, (kv_head + 1) * group)
            received.append(
                [
                    _received(recipe, query[head], key[head // group], scaling, softcap, num_echoed)
                    for head in voters
                ]
            )
        if len(chosen) > recipe.num_kept > 0:
            own = reduced(recipe, received[-1])
            for of_leader in leader.received if leader else ():
                own = torch.maximum(
                    own, reduced(recipe, [_resized(votes, len(chosen)) for votes in of_leader])
                )
            scores.append(chunked(recipe, own))
            best = top(scores[-1], chosen, recipe.num_kept)
            lent = next_best(scores[-1], chosen, recipe.num_kept, recipe.num_lent)
        kept.append(best[: recipe.num_kept])
        prompt = [Token(index, key[kv_head, index], value[kv_head, index]) for index in range(num_tokens)]
        slots.append(Slot(recipe, prompt, kept[-1], lent))
    return Layer(recipe, scores, kept, slots, received)


def _received(
    recipe: Recipe, query: Tensor, key: Tensor, scaling: float, softcap: float | None, num_echoed: int
) -> Tensor:
    """Return the attention that the prompt's window and the echo behind it pay to every candidate."""
    length = len(key) - num_echoed
    own = attention_received(recipe, query[:length], key[:length], scaling, softcap)
    if num_echoed == 0:
        return own
    of_echo = attention_received(
        recipe, query, key, scaling, softcap, length, num_voting=num_echoed, num_echoed=num_echoed
    )
    return own + of_echo if recipe.query_reduction == "sum" else torch.maximum(own, of_echo)


def _best_stored(
    stored: list[Token], queries: Tensor, scaling: float, softcap: float | None, num_attended: int | None
) -> list[Token]:
    """Return the stored tokens that get the largest share of any query's attention among them."""
    if not stored:
        return []
    keys = torch.stack([token.key for token in stored])
    shares = torch.stack([_capped(keys @ query * scaling, softcap).softmax(0) for query in queries]).amax(0)
    return [stored[index] for index in shares.argsort(descending=True)[:num_attended].tolist()]


def _resized(votes: Tensor, num_candidates: int) -> Tensor:
    """Return votes on more or fewer candidates. Tokens that the leader holds anyway received none."""
    return torch.cat([votes, votes.new_zeros(num_candidates)])[:num_candidates]


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """Full causal attention of one head, over all tokens or the last `window` of them."""
    rows = []
    for position in range(len(query)):
        first = 0 if window is None else max(0, position - window + 1)
        weights = _capped(key[first : position + 1] @ query[position] * scaling, softcap).softmax(0)
        rows.append(weights @ value[first : position + 1])
    return torch.stack(rows)


def read(query: Tensor, held: list[Token], scaling: float, softcap: float | None) -> Tensor:
    """Return one query's mix of the values held."""
    weights = _capped(torch.stack([token.key for token in held]) @ query * scaling, softcap).softmax(0)
    return weights @ torch.stack([token.value for token in held])
