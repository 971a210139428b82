"""What each token of a tokenizer adds to a text, as bytes.

A token of a byte-level vocabulary, or a byte token of a SentencePiece one, may be a part of a character; its text alone cannot say which.
The tokenizer's own decoder is asked, once for each token; nothing here depends on the kind of tokenizer except how the two families spell
a lone byte.
"""

import re
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens of a tokenizer. Ids that have no token (a model's vocabulary is often padded) add nothing."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._size = len(tokenizer)
        self.special_token_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    def __len__(self) -> int:
        return self._size

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of these tokens, special ones included, as a text of its own."""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only for a batch
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text that has already begun."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds at the start of a text, where some tokenizers drop a space."""
        text = self.decode([token_id])
        return self.token_bytes(token_id) if REPLACEMENT in text else text.encode()

    def token_text(self, token_id: int) -> str:
        """Return what a token adds to a text that has already begun, with U+FFFD for bytes that are no character by themselves."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _find_bytes(self, token_id: int) -> bytes:
        anchor = self.decode(self._anchor)
        text = self.decode([*self._anchor, token_id])
        added = text[len(anchor) :] if text.startswith(anchor) else self.decode([token_id])
        return self._spelt_bytes(token_id, added) if REPLACEMENT in added else added.encode()

    def _spelt_bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that is no whole number of characters, from how the vocabulary spells it."""
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(spelling, str)  # a list only for a list of ids
        byte_token = _BYTE_TOKEN.fullmatch(spelling)
        if byte_token is not None:
            return bytes([int(byte_token[1], 16)])
        alphabet = _byte_alphabet()
        return (
            bytes(alphabet[char] for char in spelling)
            if all(char in alphabet for char in spelling)
            else text.encode()
        )

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to stand before the one that is asked about, so that this one is not at the start of a text."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))[-1:]


def _byte_alphabet() -> dict[str, int]:
    """Return how byte-level vocabularies (GPT-2's and all since) spell bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
