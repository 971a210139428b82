"""The index of stored prefixes against a plain model, and the keys of blocks."""

from hypothesis import given
from hypothesis import strategies as st

from cache.prefix_index import PrefixIndex, block_keys

TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(TOKENS, TOKENS, st.sampled_from("ab"), st.sampled_from("ab"), st.integers(1, 4))
def test_keys_are_equal_for_equal_prefixes_of_one_salt_only(
    first: list[int], second: list[int], salt: str, other: str, size: int
) -> None:
    keys = block_keys(salt, first, size)
    others = block_keys(other, second, size)
    assert len(keys) == len(first) // size
    for index, (key, other_key) in enumerate(zip(keys, others, strict=False)):
        end = (index + 1) * size
        assert (key == other_key) == (salt == other and first[:end] == second[:end])
    assert len({*keys}) == len(keys)


def test_keys_tell_tokens_apart_that_look_alike_when_joined() -> None:
    assert block_keys("a", (1, 23), 2) != block_keys("a", (12, 3), 2)
    assert block_keys("", (2**40,), 1) != block_keys("", (0,), 1)


class PlainIndex:
    """Which prefixes are stored, with the time of their last use: the oldest leaf is evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.used: dict[tuple[int, ...], int] = {}
        self.now = 0

    def match(self, tokens: tuple[int, ...]) -> int:
        self.now += 1
        length = 0
        while length < len(tokens) and tokens[: length + 1] in self.used:
            length += 1
            self.used[tokens[:length]] = self.now
        return length

    def store(self, tokens: tuple[int, ...]) -> list[int]:
        length = self.match(tokens)
        new = []
        for index in range(length, len(tokens)):
            if len(self.used) == self.num_blocks:
                leaves = [
                    prefix
                    for prefix in self.used
                    if not any(other[:-1] == prefix for other in self.used)
                    and tokens[: len(prefix)] != prefix
                ]
                if not leaves:
                    break
                oldest = min(self.used[leaf] for leaf in leaves)
                candidates = [leaf for leaf in leaves if self.used[leaf] == oldest]
                assert len(candidates) == 1, candidates
                del self.used[candidates[0]]
            self.used[tokens[: index + 1]] = self.now
            new.append(index)
        return new


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(["match", "store"]), TOKENS.map(tuple)), max_size=30),
)
def test_the_index_is_the_plain_one(num_blocks: int, calls: list[tuple[str, tuple[int, ...]]]) -> None:
    index = PrefixIndex(num_blocks)
    plain = PlainIndex(num_blocks)
    contents: dict[int, bytes] = {}
    for name, tokens in calls:
        keys = block_keys("", tokens, 1)
        if name == "match":
            numbers = index.match(keys)
            assert len(numbers) == plain.match(tokens)
            assert [contents[number] for number in numbers] == list(keys[: len(numbers)])
        else:
            new = index.store(keys)
            assert list(new) == plain.store(tokens)
            assert [*new.values()] == sorted(new.values())
            contents |= {number: keys[position] for position, number in new.items()}
        index.check_integrity()
        assert index.num_used == len(plain.used)


def test_blocks_are_forgotten_and_their_numbers_given_again() -> None:
    index = PrefixIndex(3)
    keys = block_keys("", (1, 2, 3), 1)
    assert index.store(keys) == {0: 0, 1: 1, 2: 2}
    index.forget(keys[1:])
    index.forget(keys[1:])
    assert index.match(keys) == (0,)
    assert sorted(index.store(keys).values()) == [1, 2]
    index.clear()
    assert (index.match(keys), index.num_used, index.num_evicted) == ((), 0, 0)
    index.check_integrity()
