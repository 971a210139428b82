"""Which blocks of a prompt are restored instead of read, and which are stored for later prompts.

The backend holds the blocks; here they are numbers. A prompt's stored blocks are looked up anew for each step
until its first chunk is scheduled, and that step restores them. So nothing has to be pinned: within a step,
answers are stored first, then blocks are restored, then chunks are read and stored.
"""

from collections.abc import Iterable, Sequence

from backends.interface import (
    BackendSpec,
    PrefixArchive,
    PrefixSpec,
    PromptPooling,
    SlotStore,
    StoredBlock,
)
from cache.prefix_index import PrefixIndex, block_keys
from scheduler.prefill import Prefill
from scheduler.request import Request
from scheduler.stats import PrefixStats

# Bytes of an archive that one turn of the engine's loop loads. They delay decode by some 30 ms.
_LOADED_AT_ONCE = 32 << 20
_NOTHING = PrefixSpec(num_blocks=0, block_tokens=1, block_bytes=0)


class PrefixReuse:
    """The stored blocks of a model, whose pools are numbered from `first_pool` on.

    Without a store, nothing is found or stored.
    """

    def __init__(self, spec: BackendSpec, archive: PrefixArchive | None = None, first_pool: int = 0) -> None:
        self._archive = archive
        self._pools = dict(enumerate(spec.pools, first_pool))
        self._scratch = spec.scratch.layout
        prefixes = spec.prefixes or _NOTHING
        self._block_tokens = prefixes.block_tokens
        self._max_loads = max(_LOADED_AT_ONCE // max(prefixes.block_bytes, 1), 1)
        self._is_on = prefixes.num_blocks > 0
        self._index = PrefixIndex(prefixes.num_blocks)
        self._slot_stores: list[SlotStore] = []
        # The numbers of what the step under way or the next one writes. If it fails, these blocks hold
        # nothing that can be relied on.
        self._writing: dict[bytes, int] = {}
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    def admit(self, prefill: Prefill) -> None:
        """Find out which blocks the prompt has."""
        if self._is_on and not self._reads_rounded(prefill):
            request = prefill.requests[0]
            end = self._storable_end(prefill)
            token_ids = request.add.prompt_token_ids[:end]
            prefill.block_keys = block_keys(request.add.cache_salt, token_ids, self._block_tokens)

    def match(self, prefills: Sequence[Prefill]) -> list[Prefill]:
        """Let each prompt that has not begun begin behind its stored blocks.

        Returns the prompts that can be read on now. The others have more blocks in the archive, some of which
        each call loads.
        """
        if not self._is_on:
            return list(prefills)
        new = [prefill for prefill in prefills if not prefill.has_begun]
        loading = self._load(new) if self._archive is not None else []
        # After all loads, which may evict blocks.
        for prefill in new:
            prefill.restore(self._index.match(self._restorable_keys(prefill)), self._block_tokens)
        return [prefill for prefill in prefills if prefill not in loading]

    def begin(self, prefill: Prefill) -> None:
        """Note that a prompt's first chunk is scheduled."""
        prefill.begin()
        if self._is_on and not prefill.is_retried:
            self._num_queried_tokens += prefill.requests[0].num_prefill_tokens
            self._num_hit_tokens += prefill.num_computed_tokens

    def store(self, prefill: Prefill, end: int) -> tuple[StoredBlock, ...]:
        """Return the blocks to store of a prompt's first `end` tokens, once they are read.

        All rows of a batch must have been matched before.
        """
        if end > self._storable_end(prefill) or self._reads_rounded(prefill):
            return ()  # the scratch has evicted entries, so the others are no longer in order
        return self._store(prefill.block_keys[: end // self._block_tokens])

    def store_answer(self, request: Request) -> None:
        """Store what a sequence that ends has in its slot, if it still holds every token.

        The next step does so, before anything else can be written to the slot.
        """
        if not self._is_on or request.slot is None or not self._holds_all(request):
            return
        token_ids = request.written_token_ids
        keys = block_keys(request.add.cache_salt, token_ids, self._block_tokens)
        blocks = self._store(keys)
        if blocks:
            end = (blocks[-1].index + 1) * self._block_tokens
            self._slot_stores.append(
                SlotStore(request.add.pool, request.slot, request.num_prefill_tokens, token_ids[:end], blocks)
            )

    def take_slot_stores(self) -> tuple[SlotStore, ...]:
        """Return what the next step stores of slots."""
        stores = tuple(self._slot_stores)
        self._slot_stores.clear()
        return stores

    def update(self) -> None:
        """Note that the step under way has written its blocks."""
        if self._archive is not None:
            for key, number in self._writing.items():
                if self._index.holds(key, number):
                    self._archive.save(key, number)
        self._writing.clear()

    def fail(self) -> None:
        """Forget the blocks that the step under way was to write."""
        self._index.forget(self._writing)
        self._writing.clear()
        self._slot_stores.clear()

    def reset(self) -> None:
        """Forget all blocks. Prompts that have begun go on."""
        self._index.clear()
        if self._archive is not None:
            self._archive.reset()
        self._slot_stores.clear()
        self._writing.clear()

    def stats(self) -> PrefixStats:
        return PrefixStats(
            self._num_queried_tokens,
            self._num_hit_tokens,
            self._index.num_evicted,
            self._index.num_used,
            None if self._archive is None else self._archive.stats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every number is free or one block's."""
        self._index.check_integrity()

    def _store(self, keys: Sequence[bytes]) -> tuple[StoredBlock, ...]:
        numbers = self._index.store(keys)
        self._writing |= {keys[index]: number for index, number in numbers.items()}
        return tuple(StoredBlock(number, index) for index, number in numbers.items())

    def _load(self, prefills: Iterable[Prefill]) -> list[Prefill]:
        """Load some blocks of the archive; return the prompts that may have more there.

        Each block of a prompt is looked for once, so that prompts that evict each other's blocks go on.
        """
        num_left = self._max_loads
        loading = []
        for prefill in prefills:
            keys = self._restorable_keys(prefill)
            start = max(prefill.num_sought_blocks, len(self._index.match(keys)))
            prefill.num_sought_blocks = start
            while prefill.num_sought_blocks < len(keys) and num_left > 0:
                index = prefill.num_sought_blocks
                is_loaded = self._load_block(keys[: index + 1])
                prefill.num_sought_blocks = index + 1 if is_loaded else len(keys)
                num_left -= is_loaded
            if prefill.num_sought_blocks < len(keys):
                loading.append(prefill)
        return loading

    def _load_block(self, keys: Sequence[bytes]) -> bool:
        """Load a sequence's last block, behind those in memory; return whether it is there now."""
        assert self._archive is not None
        numbers = self._index.store(keys)
        # No number that the next step writes: it would overwrite what is loaded.
        has_room = list(numbers) == [len(keys) - 1] and not set(numbers.values()) & set(
            self._writing.values()
        )
        if has_room and self._archive.load(keys[-1], numbers[len(keys) - 1]):
            return True
        self._index.forget(keys[index] for index in numbers)
        return False

    def _restorable_keys(self, prefill: Prefill) -> tuple[bytes, ...]:
        return prefill.block_keys[: self._restorable_tokens(prefill) // self._block_tokens]

    def _reads_rounded(self, prefill: Prefill) -> bool:
        """Return whether the prompt is read in a slot in 8 bits: blocks hold what is exact."""
        return prefill.scratch is None and self._pools[prefill.requests[0].add.pool].kv_cache_dtype.is_rounded

    def _storable_end(self, prefill: Prefill) -> int:
        """Return up to where a prompt's keys and values depend on nothing behind them."""
        length = prefill.requests[0].num_prefill_tokens
        if prefill.scratch is None:
            return length
        # What is read after an eviction sees a context that the prompt's end has chosen.
        return self._scratch.num_held(length)

    def _restorable_tokens(self, prefill: Prefill) -> int:
        """Return how many of a prompt's first tokens need not be read."""
        request = prefill.requests[0]
        add = request.add
        length = request.num_prefill_tokens
        if add.num_prompt_logprobs is not None or add.pooling is PromptPooling.MEAN:
            return 0  # these need the hidden states of all tokens
        if prefill.scratch is None:
            return length - 1
        policy = self._pools[add.pool].policy
        observes = add.importance is not None or (add.needs_slot and policy.must_choose(length))
        num_observing = policy.scorer.observation_window if policy.scorer is not None and observes else 1
        num_held = self._scratch.num_held(length)
        # The last tokens' queries vote on what is kept, and a full scratch evicts behind a chunk.
        return max(0, min(length - num_observing, length - 1 if num_held == length else num_held - 1))

    def _holds_all(self, request: Request) -> bool:
        """Return whether the slot holds every token of the sequence, in each layer."""
        pool = self._pools[request.add.pool]
        num_tokens = request.num_computed_tokens
        return (
            not pool.kv_cache_dtype.is_rounded
            and num_tokens >= request.num_prefill_tokens  # the prompt was read
            and num_tokens <= pool.max_exact_tokens
            # A step that failed may have written one more.
            and pool.policy.is_exact(request.num_prefill_tokens, num_tokens + request.is_retried)
        )
