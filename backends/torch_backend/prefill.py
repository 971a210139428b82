"""One prefill step: read a batch's chunks, fill the slots of complete prompts, and draw first tokens."""

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.interface import (
    BackendSpec,
    Importance,
    KeptTokens,
    PrefillBatch,
    PrefillRow,
    PromptPooling,
    SampledToken,
)
from backends.torch_backend.forward.plan import ForwardPass, ahead_pass, prefill_pass, voting_pass
from backends.torch_backend.pending import Outcome
from backends.torch_backend.pool import ALL_ENTRIES, TorchPool
from backends.torch_backend.prefix_store import PrefixStore
from backends.torch_backend.sampling.logprobs import log_probabilities, steps_to_host
from backends.torch_backend.sampling.sampler import check_token_ids
from cache.importance import chunk_means, token_importance

_SCORED_AT_ONCE = 64  # prompt tokens whose log-probabilities are in memory together


class Prefill:
    """Reads batches of chunks for all pools of a backend."""

    def __init__(self, model: PreTrainedModel, spec: BackendSpec, prefixes: PrefixStore | None) -> None:
        self._model = model
        self._prefixes = prefixes
        self._device = model.device
        self._spec = spec
        self._scratch = spec.scratch.layout

    def run(self, pool: TorchPool, batch: PrefillBatch) -> Outcome:
        """Read a batch. Raises ValueError for a token id outside the vocabulary."""
        for row in batch.rows:
            targets = row.score.target_ids if row.score is not None else ()
            check_token_ids(row.token_ids + targets, self._spec.vocab_size)
        restore_time = sum(self._begin_chunk(pool, row) for row in batch.rows)
        outcome = replace(self._read(pool, batch), restore_time=restore_time)
        for row in batch.rows:
            if row.stored_blocks and self._prefixes is not None:
                self._prefixes.store(pool, row)
            if row.ahead:
                self._evict(pool, row)
        return outcome

    def _begin_chunk(self, pool: TorchPool, row: PrefillRow) -> float:
        """Restore the stored blocks of a new prompt, and clear the rest of its slot or scratch.

        Counts the chunk's tokens, and those restored, for the penalties. Returns the seconds of restoring; on
        a GPU those of launching the copies.
        """
        restore_time = 0.0
        if row.is_first:
            pool.sampler.begin(row.slots)
            num_restored = len(row.restored_token_ids)
            for layer in pool.cache.layers:
                if row.scratch is None:
                    layer.clear_slot(row.slots[0], num_restored, pool.written[row.slots[0]])
                else:
                    layer.clear_scratch(row.scratch, num_restored)
            if row.scratch is None:
                pool.written[row.slots[0]] = num_restored
            if row.restored_blocks and self._prefixes is not None:
                start = time.perf_counter()
                self._prefixes.restore(pool, row)
                restore_time = time.perf_counter() - start
                pool.sampler.read_prompt(row.slots, row.restored_token_ids)
        if row.scratch is None:
            pool.will_write(row.slots[0], row.start + len(row.token_ids))
        pool.sampler.read_prompt(row.slots, row.token_ids)
        return restore_time

    def _read(self, pool: TorchPool, batch: PrefillBatch) -> Outcome:
        """Read the chunks; fill the slots of prompts that end with them, and draw their first tokens."""
        forward_pass = prefill_pass(batch, pool.kinds, self._scratch, self._device)
        nothing: tuple[tuple[SampledToken, ...], ...] = ((),) * len(batch.rows)
        if batch.rows[0].pooling is not None:
            return Outcome(nothing, hidden=self._pooled(pool, batch, forward_pass))
        logits = self._logits(pool, batch, forward_pass)
        kept: list[KeptTokens | None] = [None] * len(batch.rows)
        for index, row in enumerate(batch.rows):
            if row.is_last and row.slots:
                if row.echo:
                    self._read_votes(pool, row)
                chosen = self._fill_slots(pool, row)
                if row.returns_kept:
                    kept[index] = _kept_tokens(pool, row, chosen)
        if batch.rows[0].importance is not None:
            return Outcome(nothing, nothing, importance=self._importance(pool, batch, logits))
        if logits is None:
            return Outcome(nothing, nothing)
        # Not strict: logits have all rows of the batch's shape. Those after the last chunk are padding.
        scores = tuple(
            self._scores(row, row_logits) for row, row_logits in zip(batch.rows, logits, strict=False)
        )
        return Outcome(self._first_tokens(pool, batch, logits[:, -1]), scores, kept=tuple(kept))

    def _logits(self, pool: TorchPool, batch: PrefillBatch, forward_pass: ForwardPass) -> Tensor | None:
        """Read the chunks; return the logits [row, token, vocabulary] of all tokens or of each row's last.

        None where no row needs any.
        """
        arguments = forward_pass.arguments(pool.cache)
        if any(row.score for row in batch.rows):
            num_logits = 0  # all
        elif any(row.draws or (row.is_last and row.importance) for row in batch.rows):
            num_logits = 1
        else:
            self._model.base_model(**arguments)
            return None
        logits: Tensor = self._model(**arguments, logits_to_keep=num_logits).logits
        return logits

    def _fill_slots(self, pool: TorchPool, row: PrefillRow) -> list[Tensor | None]:
        """Put a prompt that was read to its end into all its slots.

        Returns what `CacheLayer.pack` returns of each layer, and nothing for a prompt that fits its slot.
        """
        for slot in row.slots:
            pool.will_write(slot, pool.written[row.slots[0]] if row.scratch is None else ALL_ENTRIES)
        if row.scratch is None:
            for layer in pool.cache.layers:
                layer.slots.set_centres(row.slots[0], row.num_prompt_tokens)
                layer.slots.copy(row.slots[0], row.slots[1:])
            return []
        num_evicted = row.num_prompt_tokens - self._scratch.num_held(row.num_prompt_tokens)
        return [
            layer.pack(row.scratch, row.slots, row.num_prompt_tokens, num_evicted)
            for layer in pool.cache.layers
        ]

    def _evict(self, pool: TorchPool, row: PrefillRow) -> None:
        """Read the tokens that vote, and evict what they attend to least from the full scratch."""
        assert row.scratch is not None, "only a scratch evicts"
        length = row.num_prompt_tokens
        end = row.start + len(row.token_ids)
        num_evicted = self._scratch.num_evicted(end, length) - self._scratch.num_evicted(row.start, length)
        self._read_votes(pool, row)
        for layer in pool.cache.layers:
            layer.evict(row.scratch, self._scratch.num_held(length), num_evicted, end)

    def _read_votes(self, pool: TorchPool, row: PrefillRow) -> None:
        """Read the row's echo and its tokens ahead, which vote on the tokens that its scratch holds."""
        max_position = self._spec.max_model_len - 1
        votes = voting_pass(row, pool.kinds, self._scratch, max_position, self._device)
        self._model.base_model(**votes.arguments(pool.cache))

    def _first_tokens(
        self, pool: TorchPool, batch: PrefillBatch, logits: Tensor
    ) -> tuple[tuple[SampledToken, ...], ...]:
        """Draw from the logits [row, vocabulary] of the prompts' last tokens, once for each slot of a row."""
        draws = {slot: draw for row in batch.rows for slot, draw in zip(row.slots, row.draws, strict=False)}
        if not draws:
            return ((),) * len(batch.rows)
        # The sampler's state is by slot, so its logits are too. Idle slots take row 0, and their draws are
        # dropped.
        row_of = [0] * pool.spec.num_slots
        for index, row in enumerate(batch.rows):
            for slot in row.slots:
                row_of[slot] = index
        slot_logits = logits[torch.tensor(row_of, device=self._device)]
        sampled = pool.sampler.sample(slot_logits, pool.sampler.plan(draws))
        tokens = steps_to_host([sampled], draws)
        return tuple(tuple(tokens[slot][0] for slot in row.slots) if row.draws else () for row in batch.rows)

    def _pooled(
        self, pool: TorchPool, batch: PrefillBatch, forward_pass: ForwardPass
    ) -> tuple[tuple[float, ...], ...]:
        """Return each row's pooled hidden state: a sum or the last one, in float32 since sums may be long."""
        output = self._model.base_model(**forward_pass.arguments(pool.cache))
        hidden = output.last_hidden_state.float()  # [row, token, hidden], chunks aligned to the right
        vectors = []
        for row, states in zip(batch.rows, hidden, strict=False):
            chunk = states[len(states) - len(row.token_ids) :]
            vector = chunk.sum(0) if row.pooling is PromptPooling.MEAN else chunk[-1]
            vectors.append(tuple(vector.tolist()))
        return tuple(vectors)

    def _importance(
        self, pool: TorchPool, batch: PrefillBatch, logits: Tensor | None
    ) -> tuple[tuple[float, ...], ...]:
        """Return the importance of the chunks of each prompt that ends with its row, and () for the others.

        `logits` [row, 1, vocabulary] are those of the rows' last tokens.
        """
        found: list[tuple[float, ...]] = []
        for index, row in enumerate(batch.rows):
            if row.importance is None or not row.is_last:
                found.append(())
                continue
            if row.importance.num_ahead == 0:
                if row.echo:
                    self._read_votes(pool, row)
                importance = self._voted(pool, row)
            else:
                assert logits is not None, "a prompt that ends has logits"
                importance = self._look_ahead(pool, row, row.importance, logits[index, -1])
            found.append(tuple(chunk_means(importance, row.importance.chunk_tokens).tolist()))
        return tuple(found)

    def _look_ahead(self, pool: TorchPool, row: PrefillRow, wanted: Importance, logits: Tensor) -> Tensor:
        """Return the mean importance for the prompt's last token and for those that follow it greedily."""
        assert row.scratch is not None, "a draft has no slots"
        limits = self._scratch.num_entries, self._spec.max_model_len - 1
        steps = [self._voted(pool, row)]
        while len(steps) < wanted.num_ahead:
            token_id = int(logits.argmax())
            if token_id in wanted.stop_token_ids:
                break
            for layer in pool.cache.layers:
                layer.forget_votes(row.scratch)
            ahead = ahead_pass(row, token_id, len(steps) - 1, pool.kinds, limits, self._device)
            logits = self._model(**ahead.arguments(pool.cache), logits_to_keep=1).logits[0, -1]
            steps.append(self._voted(pool, row))
        return torch.stack(steps).mean(0)

    def _voted(self, pool: TorchPool, row: PrefillRow) -> Tensor:
        """Return each prompt token's importance, from the votes of all layers so far."""
        assert row.scratch is not None, "a draft has no slots"
        votes = (layer.votes(row.scratch, row.num_prompt_tokens) for layer in pool.cache.layers)
        return token_importance(layer for layer in votes if layer is not None)

    def _scores(self, row: PrefillRow, logits: Tensor) -> tuple[SampledToken, ...]:
        """Return the log-probabilities of a chunk's targets from right-aligned logits [token, vocabulary]."""
        if row.score is None:
            return ()
        targets = row.score.target_ids
        num_top = row.score.num_top
        logits = logits[logits.shape[0] - len(row.token_ids) :]
        scored: list[SampledToken] = []
        # A part at a time: the log-probabilities of a whole chunk over a large vocabulary would be gigabytes.
        for first in range(0, len(targets), _SCORED_AT_ONCE):
            part = torch.tensor(targets[first : first + _SCORED_AT_ONCE], device=self._device)
            found = log_probabilities(logits[first : first + len(part)], part, num_top)
            scored += found.to_host(dict.fromkeys(range(len(part)), num_top)).values()
        return tuple(scored)


def _kept_tokens(pool: TorchPool, row: PrefillRow, chosen: list[Tensor | None]) -> KeptTokens:
    """Return what a row's slots hold. `chosen` is by layer, and empty where the prompt fits."""
    num_tokens = row.num_prompt_tokens
    layers = pool.cache.layers
    holding = [index for index, layer in enumerate(layers) if layer.holds_entries]
    full = [index for index in holding if layers[index].kind.sliding_window is None]
    held = (
        layers[index].held(num_tokens, chosen[index])
        if chosen
        else torch.ones(layers[index].num_kv_heads, num_tokens, dtype=torch.bool)
        for index in full or holding
    )
    bitmaps = (np.packbits(heads.cpu().numpy(), axis=1, bitorder="little") for heads in held)
    return KeptTokens(num_tokens, tuple(tuple(head.tobytes() for head in heads) for heads in bitmaps))
