"""Bytes of tokens, against the tokenizers' own decoders."""

import pytest
from transformers import PreTrainedTokenizerFast

from server.text.vocabulary import Vocabulary
from tests.server.text.tokenizers import TEXTS, byte_level, id_of, metaspace, sentencepiece, text_of

KINDS = [byte_level(), sentencepiece(), sentencepiece(strips_space=False), metaspace()]


@pytest.mark.parametrize("tokenizer", KINDS)
def test_tokens_bytes_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary(tokenizer)
    for text in TEXTS:
        first, *rest = tokenizer.encode(text, add_special_tokens=False)
        joined = vocabulary.first_token_bytes(first) + b"".join(map(vocabulary.token_bytes, rest))
        assert joined.decode() == text_of(tokenizer, [first, *rest])


def test_byte_level_tokens_that_are_parts_of_characters() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    for byte, char in ((0x20, "Ġ"), (0xE2, "â"), (0x80, "Ģ"), (0xAD, "Ń"), (0x0A, "Ċ"), (0x41, "A")):
        assert vocabulary.token_bytes(id_of(tokenizer, char)) == bytes([byte])


def test_every_byte_token_is_its_byte() -> None:
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer)
    for byte in range(256):
        assert vocabulary.token_bytes(id_of(tokenizer, f"<0x{byte:02X}>")) == bytes([byte])


def test_leading_space_belongs_to_the_token_except_at_the_start() -> None:
    tokenizer = metaspace()
    vocabulary = Vocabulary(tokenizer)
    token, token_id = next(
        (token, token_id)
        for token, token_id in tokenizer.get_vocab().items()
        if token.startswith("▁") and len(token) > 1
    )
    text = token[1:].encode()
    assert vocabulary.token_bytes(token_id) == b" " + text
    assert vocabulary.first_token_bytes(token_id) == text


@pytest.mark.parametrize("tokenizer", KINDS)
def test_ids_without_a_token_add_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    assert Vocabulary(tokenizer).token_bytes(len(tokenizer) + 5) == b""


def test_special_tokens() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    end = id_of(tokenizer, "<|end|>")
    assert end in vocabulary.special_token_ids
    assert vocabulary.token_text(end) == "<|end|>"
