"""`kept_tokens`: which tokens of a prompt its slot held once it was read."""

from base64 import b64encode
from collections.abc import Sequence
from typing import NotRequired

import numpy as np
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from backends.interface import KeptTokens


class KeptTokensField(TypedDict):
    """`tokens` are the texts of the prompt's tokens, and `mean` the share of layers and heads that hold each.

    `heads` [layer][kv_head] are bitmaps in base64: bit i % 8 of byte i // 8 says whether token i is held.
    """

    tokens: list[str]
    mean: list[float]
    heads: NotRequired[list[list[str]]]


def kept_tokens(texts: Sequence[str], kept: KeptTokens, *, has_heads: bool) -> KeptTokensField:
    bitmaps = [head for heads in kept.heads for head in heads]
    packed = np.frombuffer(b"".join(bitmaps), np.uint8).reshape(len(bitmaps), -1)
    held = np.unpackbits(packed, axis=1, count=kept.num_tokens, bitorder="little")  # [layer and head, token]
    field: KeptTokensField = {"tokens": list(texts), "mean": held.mean(axis=0).round(4).tolist()}
    if has_heads:
        field["heads"] = [[b64encode(head).decode() for head in heads] for heads in kept.heads]
    return field
