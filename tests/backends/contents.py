"""Slots against the reference's, entry by entry."""

import math
from typing import Any

import torch
from torch import Tensor

from backends.torch_backend.backend import TorchBackend
from cache.policy import CachePolicy
from cache.slots import SlotCache
from tests.backends.oracle import TOLERANCE
from tests.reference.recipe import Recipe
from tests.reference.sequence import Layer, Sequence
from tests.reference.slot import Token

SCORE_TOLERANCE = 1e-4  # relative, of attention weights in float32


def recipe_of(policy: CachePolicy) -> Recipe:
    """Return a policy's settings in the reference's words."""
    scorer = policy.scorer
    sizes = Recipe(
        policy.layout.num_sink,
        policy.layout.num_recent,
        policy.layout.num_kept,
        policy.prompt_window,
        policy.lend_kept,
    )
    num_attended = policy.store.num_attended if policy.store is not None else None
    sizes = sizes.with_options(num_lent=policy.num_lent, num_attended=num_attended)
    if scorer is None:
        return sizes
    return sizes.with_options(
        observation_window=scorer.observation_window,
        observation_half_life=scorer.observation_half_life,
        least_vote=scorer.least_vote,
        num_echoed=scorer.num_echoed,
        softmax_over=scorer.softmax_domain.value,
        pooling=scorer.pooling.value,
        pooling_size=scorer.pooling_size,
        pooling_shift=scorer.pooling_shift,
        pooling_half_life=scorer.pooling_half_life,
        head_reduction=scorer.head_reduction.value,
        query_reduction=scorer.query_reduction.value,
        selection_chunk=scorer.selection_chunk,
        layer_kept=policy.layer_kept,
        leading_layer=policy.leading_layer,
    )


def assert_same_contents(backend: TorchBackend, slot: int, sequence: Sequence, *, is_packed: bool) -> None:
    """Every live entry of every layer is the reference's, and every state.

    A packed slot also says which tokens it kept.
    """
    layers = backend.pools[0].cache.layers
    assert {index for index, layer in enumerate(layers) if layer.holds_entries} == sequence.layers.keys()
    model: Any = sequence.model
    for index, layer in enumerate(layers):
        if layer.slots.states:
            for state, expected in zip(layer.slots.states, sequence.states(index), strict=True):
                torch.testing.assert_close(state[slot], expected[0], atol=TOLERANCE, rtol=0)
        if not layer.holds_entries:
            continue
        keys, values = _keys_and_values(layer.slots, slot, model.model.layers[index].self_attn)
        _assert_same_layer(
            layer.slots, slot, keys, values, sequence.layers[index], f"layer {index}", is_packed
        )


def _keys_and_values(cache: SlotCache, slot: int, attention: Any) -> tuple[Tensor, Tensor]:
    """Return what a slot holds, [head, entry, width]; of latents, what the model's own attention makes."""
    if len(cache.planes) == 2:
        return cache.planes[0][slot], cache.planes[1][slot]
    latent, rotary_key = torch.split(
        cache.planes[0][slot, None], [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1
    )
    keys, values = attention.expand_kv(latent, rotary_key)
    return keys[0].detach(), values[0].detach()


def _assert_same_layer(
    cache: SlotCache, slot: int, keys: Tensor, values: Tensor, layer: Layer, where: str, is_packed: bool
) -> None:
    assert cache.layout.capacity == layer.recipe.capacity, where
    all_kept = cache.kept_index[slot].expand(len(layer.slots), -1)  # heads that share latents share a choice
    for kv_head, expected in enumerate(layer.slots):
        if is_packed:
            kept = all_kept[kv_head].tolist()[: len(expected.kept)]
            assert kept == [token.index for token in expected.kept], (
                f"{where}, KV head {kv_head}, {_margin(layer, kv_head)}"
            )
        for entry, token in enumerate(expected.entries()):
            if token is not None:
                errors = [
                    _error(keys[kv_head, entry], values[kv_head, entry], each)
                    for each in (token, *_rivals(layer, kv_head, token))
                ]
                assert min(errors) < TOLERANCE, (
                    f"{where}, KV head {kv_head}, entry {entry}, token {token.index}"
                )


def _error(key: Tensor, value: Tensor, token: Token) -> float:
    return float(torch.cat([key - token.key, value - token.value]).abs().max())  # NaN if either has any


def _rivals(layer: Layer, kv_head: int, token: Token) -> list[Token]:
    """Return the other tokens in lent entries with equal scores but for rounding: their order is open."""
    lent = layer.slots[kv_head].lent
    if not any(each is token for each in lent):
        return []
    scores = {each.index: float(layer.scores[kv_head][each.index - layer.recipe.num_sink]) for each in lent}
    return [
        each
        for each in lent
        if each is not token
        and math.isclose(scores[each.index], scores[token.index], rel_tol=SCORE_TOLERANCE)
    ]


def _margin(layer: Layer, kv_head: int) -> str:
    """Say by how much the last token kept won over the next."""
    if not layer.scores:
        return "nothing was scored"
    best = layer.scores[kv_head].sort(descending=True).values
    return (
        f"the last one kept won by {float(best[layer.recipe.num_kept - 1] - best[layer.recipe.num_kept]):.1e}"
    )
