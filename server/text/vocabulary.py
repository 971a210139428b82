"""The bytes that each token of a tokenizer adds to a text.

A token of a byte-level vocabulary, or a byte token of a SentencePiece one, may be a part of a character,
which its text alone does not show. The bytes come from the tokenizer's own decoder, once for each token. Only
the spelling of a lone byte depends on the kind of tokenizer.
"""

import codecs
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens of a tokenizer. Ids without a token (a model's vocabulary is often padded) add nothing."""

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
        """Return the text of tokens, with the special ones, as a text from its start."""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only for a batch
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that has already begun."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds at the start of a text, where some tokenizers drop a space."""
        text = self.decode([token_id])
        return self.token_bytes(token_id) if REPLACEMENT in text else text.encode()

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds, with U+FFFD for bytes that form no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def texts(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text that each token completes. Joined, they are the text of the tokens."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.token_bytes(token_id)) for token_id in token_ids]

    def _find_bytes(self, token_id: int) -> bytes:
        # Decoded behind another token: at a text's start, some tokenizers drop the token's space.
        anchor = self.decode(self._anchor)
        text = self.decode([*self._anchor, token_id])
        added = text[len(anchor) :] if text.startswith(anchor) else self.decode([token_id])
        return self._spelt_bytes(token_id, added) if REPLACEMENT in added else added.encode()

    def _spelt_bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that is not whole characters, from its spelling in the vocabulary."""
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(spelling, str)  # a list only for a list of ids
        byte_token = _BYTE_TOKEN.fullmatch(spelling)
        if byte_token is not None:
            return bytes([int(byte_token[1], 16)])
        alphabet = _byte_alphabet()
        if all(char in alphabet for char in spelling):
            return bytes(alphabet[char] for char in spelling)
        return text.encode()

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to decode before another one, so that this one is not at the start of a text."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))[-1:]


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the most characters of a text that one token can stand for, or None if that is not known.

    It is known where a tokenizer drops nothing: byte pairs of all bytes, and no normalizer but one that
    replaces characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = tokenizer.added_tokens_decoder.values()
    if backend is None or any(token.lstrip or token.rstrip for token in added):
        return None
    parts = json.loads(backend.to_str())
    model = parts["model"]
    has_all_bytes = bool(model.get("byte_fallback")) or '"ByteLevel"' in json.dumps(parts["pre_tokenizer"])
    if model["type"] != "BPE" or not has_all_bytes or not _keeps_length(parts["normalizer"]):
        return None
    return max(len(token) for token in tokenizer.get_vocab())


def _keeps_length(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer makes no text shorter."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return True
        case {"type": "Sequence", "normalizers": list(several)}:
            return all(map(_keeps_length, several))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return len(content) >= len(pattern)
    return False


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level vocabularies, since GPT-2, spell them with.

    Printable Latin-1 characters represent themselves. The other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
