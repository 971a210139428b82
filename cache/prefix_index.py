"""Which blocks of prompts are stored, and which is evicted next.

A block is a fixed number of tokens whose keys and values a backend has stored under a number. Its key is a
hash over the salt and all tokens up to its end, so equal keys mean equal prefixes. There are no tensors here.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_keys(salt: str, token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Return the key of each complete block of a sequence. Different salts have no key in common."""
    digest = hashlib.sha256(salt.encode()).digest()
    keys = []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        tokens = array("q", token_ids[end - block_tokens : end])
        digest = hashlib.sha256(digest + tokens.tobytes()).digest()
        keys.append(digest)
    return tuple(keys)


class PrefixIndex:
    """The numbers, 0 to `num_blocks` − 1, of the stored blocks by their keys.

    `keys` are always those of one sequence from its first block on. When no number is free, the least
    recently used block is evicted, a sequence's last block first. So every stored block can be matched.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        self._num_blocks = num_blocks
        self._num_ever_used = 0  # the numbers below it; those above are free, too
        self._free: list[int] = []
        # Least recently used first, and each block before those that precede it in its sequences. So the
        # first has no stored successor.
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self.num_evicted = 0  # since the start

    @property
    def num_used(self) -> int:
        return len(self._numbers)

    def match(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the numbers of a sequence's stored blocks, from the first one on, and mark them as used."""
        numbers = []
        for key in keys:
            number = self._numbers.get(key)
            if number is None:
                break
            numbers.append(number)
        self._use(keys[: len(numbers)])
        return tuple(numbers)

    def store(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Give numbers to a sequence's blocks that have none, as far as there is room.

        Returns the number of each such block, by its index in the sequence. A caller that does not write all
        of them must `forget` them. The sequence's own blocks are not evicted.
        """
        num_stored = len(self.match(keys))
        own = set(keys[:num_stored])
        numbers: list[int] = []
        while num_stored + len(numbers) < len(keys) and (number := self._take(own)) is not None:
            numbers.append(number)
        # In order, because a backend copies neighbours in one piece, and evicted numbers come in reverse.
        new = dict(enumerate(sorted(numbers), start=num_stored))
        self._numbers.update((keys[index], number) for index, number in new.items())
        self._use(keys[: num_stored + len(new)])
        return new

    def holds(self, key: bytes, number: int) -> bool:
        """Return whether a block is stored under this number."""
        return self._numbers.get(key) == number

    def forget(self, keys: Iterable[bytes]) -> None:
        """Free the numbers of blocks, where they have any."""
        for key in keys:
            number = self._numbers.pop(key, None)
            if number is not None:
                self._free.append(number)

    def clear(self) -> None:
        """Free all numbers."""
        self.forget(list(self._numbers))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every number is either free or one block's."""
        numbers = sorted([*self._free, *self._numbers.values()])
        assert numbers == list(range(self._num_ever_used)), numbers
        assert self._num_ever_used <= self._num_blocks, self._num_ever_used

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._numbers.move_to_end(key)

    def _take(self, own: set[bytes]) -> int | None:
        """Return a free number, or that of a block that it evicts. None if only blocks in `own` are left."""
        if self._free:
            return self._free.pop()
        if self._num_ever_used == self._num_blocks:
            return self._evict(own)
        self._num_ever_used += 1
        return self._num_ever_used - 1

    def _evict(self, own: set[bytes]) -> int | None:
        """Return the number of the least recently used block, which is evicted. None if it is in `own`."""
        key = next(iter(self._numbers), None)
        if key is None or key in own:
            return None
        self.num_evicted += 1
        return self._numbers.pop(key)
