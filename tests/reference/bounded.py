"""A prompt read in a scratch that is too small for it, token by token, over lists of the tokens held."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.reference.recipe import Recipe
from tests.reference.sequence import Layer, Sequence, read
from tests.reference.slot import Slot, Token
from tests.reference.votes import attention_received, candidates, chunked, next_best, reduced, top


@dataclass(frozen=True)
class Voter:
    """A query head, and the tokens that it votes on."""

    query: Tensor  # [token, width], of the last tokens held
    held: list[Token]


@dataclass(frozen=True)
class Bound:
    """At most `max_tokens` are held; then up to `eviction_size` are evicted, by the votes of `num_ahead`
    tokens.
    """

    max_tokens: int
    eviction_size: int
    num_ahead: int

    def ends(self, length: int) -> list[int]:
        """Return how many tokens of a prompt have been read before each eviction, and at its end."""
        first = min(self.max_tokens, length - self.num_ahead)
        ends = [length]
        while ends[-1] > first:
            ends.append(max(ends[-1] - self.eviction_size, first))
        return ends[::-1]


class BoundedSequence(Sequence):
    """As `Sequence`, for policies that evict."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, prompt: list[int], bound: Bound) -> None:
        self._held: dict[tuple[int, int], list[Token]] = {}  # by layer and KV head
        self._bound = bound
        self._is_looking_ahead = False
        self._is_last = False
        self._is_echoing = False  # the prompt is read, and its question is read again
        self._window: dict[tuple[int, int], list[Voter]] = {}  # the prompt's last chunk, by layer and KV head
        self._num_evicted = 0
        self._length = len(prompt)
        super().__init__(model, recipe, prompt)

    def _read_prompt(self, prompt: list[int]) -> Tensor:
        logits, ends = [], self._bound.ends(len(prompt))
        for start, end, following in zip([0, *ends], ends, [*ends[1:], len(prompt)], strict=False):
            self._is_last = end == len(prompt)
            logits.append(self._forward(prompt[start:end], start))
            self._num_evicted = following - end  # as many as are read until it is full again
            echo = prompt[: self._recipe.num_echoed]
            if not self._is_last:
                ahead = prompt[-self._bound.num_ahead :]
                self._is_looking_ahead = True
                self._forward(echo + ahead, len(prompt) - len(echo + ahead))
                self._is_looking_ahead = False
            elif echo:
                self._is_echoing = True
                self._forward(echo, len(prompt))
        return torch.cat(logits)

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
        if layer_index in self.layers:
            return super().attend(layer_index, query, key, value, scaling, window, softcap)
        recipe = self._recipe.of_layer(layer_index) if window is None else Recipe.sliding(window)
        group, num_new, layer, outputs = len(query) // len(key), key.shape[1], Layer(recipe, [], [], []), []
        held = [
            self._held.get((layer_index, kv_head), [])
            + [Token(self._first_index + i, key[kv_head, i], value[kv_head, i]) for i in range(num_new)]
            for kv_head in range(len(key))
        ]
        for head, rows in enumerate(query):
            tokens = held[head // group]
            reach = window or len(tokens)
            ends = range(len(tokens) - num_new + 1, len(tokens) + 1)
            mixed = [
                read(row, tokens[:end][-reach:], scaling, softcap)
                for row, end in zip(rows, ends, strict=True)
            ]
            outputs.append(torch.stack(mixed))
        for kv_head, tokens in enumerate(held):
            heads = range(len(query)) if has_latents else range(kv_head * group, (kv_head + 1) * group)
            voters = [Voter(query[head], held[head // group]) for head in heads]
            if self._is_looking_ahead:
                self._held[layer_index, kv_head] = self._survivors(
                    recipe, tokens, num_new, voters, scaling, softcap
                )
            elif self._is_echoing:
                own = self._window[layer_index, kv_head]
                self._fill_slot(layer, tokens[:-num_new], own, voters, scaling, softcap)
            else:
                self._held[layer_index, kv_head] = tokens
                self._window[layer_index, kv_head] = voters
                if self._is_last and self._recipe.num_echoed == 0:
                    self._fill_slot(layer, tokens, voters, [], scaling, softcap)
        if self._is_echoing or (self._is_last and self._recipe.num_echoed == 0):
            self.layers[layer_index] = layer
        return torch.stack(outputs)

    def _survivors(
        self,
        recipe: Recipe,
        tokens: list[Token],
        num_new: int,
        voters: list[Voter],
        scaling: float,
        softcap: float | None,
    ) -> list[Token]:
        held = tokens[:-num_new]
        num_sink = recipe.num_sink
        if recipe.num_kept == 0:
            return held[:num_sink] + held[num_sink + self._num_evicted :]
        chosen = candidates(recipe, len(held))
        votes = [_votes(recipe, each, scaling, softcap, num_new, recipe.num_echoed) for each in voters]
        scores = chunked(recipe, reduced(recipe, votes))
        best = top(scores, chosen, len(chosen) - self._num_evicted)
        return held[:num_sink] + [held[entry] for entry in best] + held[chosen.stop :]

    def _fill_slot(
        self,
        layer: Layer,
        held: list[Token],
        voters: list[Voter],
        echo: list[Voter],
        scaling: float,
        softcap: float | None,
    ) -> None:
        recipe = layer.recipe
        chosen, best, lent = candidates(recipe, len(held)), [], []
        if recipe.num_kept > 0:
            votes = [_votes(recipe, each, scaling, softcap) for each in voters]
            if echo:
                size = recipe.num_echoed
                of_echo = [_votes(recipe, each, scaling, softcap, size, size) for each in echo]
                join = torch.add if recipe.query_reduction == "sum" else torch.maximum
                votes = [join(*pair) for pair in zip(votes, of_echo, strict=True)]
            scores = chunked(recipe, reduced(recipe, votes))
            best = top(scores, chosen, recipe.num_kept)
            lent = next_best(scores, chosen, recipe.num_kept, recipe.num_lent)
            by_token = scores.new_full((self._length - recipe.num_sink,), -torch.inf)  # −∞ for evicted tokens
            by_token[[held[entry].index - recipe.num_sink for entry in chosen]] = scores
            layer.scores.append(by_token)
        layer.kept.append([held[entry].index for entry in best])
        by_index = {token.index: token for token in held}
        lost = torch.full_like(held[0].key, torch.nan)  # so that a slot that holds one of these is noticed
        prompt = [by_index.get(index, Token(index, lost, lost)) for index in range(self._length)]
        layer.slots.append(Slot(recipe, prompt, layer.kept[-1], [held[entry].index for entry in lent]))


def _votes(
    recipe: Recipe,
    voter: Voter,
    scaling: float,
    softcap: float | None,
    num_voting: int | None = None,
    num_echoed: int = 0,
) -> Tensor:
    """Return one head's votes on the candidates. Only the last tokens have queries; the others get zeros.

    With `num_voting`, that many tokens behind those held vote, the first `num_echoed` of them as an echo.
    """
    num_missing = len(voter.held) - len(voter.query)
    queries = torch.cat([voter.query.new_zeros(num_missing, voter.query.shape[1]), voter.query])
    keys = torch.stack([token.key for token in voter.held])
    num_held = len(keys) - (num_voting or 0)
    return attention_received(recipe, queries, keys, scaling, softcap, num_held, num_voting, num_echoed)
