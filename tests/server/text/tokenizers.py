"""Small tokenizers of the kinds that language models have, built here."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The lighthouse keeper said: hello, world! Hello again, and again.",
    "  Indented\n\tcode();\n\nfor (i = 0; i < 10; i++) {}  ",
    "naïve café — coöperation, Zürich, smörgåsbord",
    "日本語の文章。中文也有。한국어도",
    "🙂🚀👩‍👩‍👧 emoji and e\u0301 combining",
]
CONTROL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FLAT_TEMPLATE = (  # no control token between header and content: merges may cross its border
    "{% for message in messages %}{{ '<|end|>' if not loop.first }}{{ message.role }}: {{ "
    "message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant:{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: bytes spelt as characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _wrapped(backend)


def sentencepiece(*, strips_space: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2 and, without the strip, Gemma: spaces spelt ▁, unknown characters as byte tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE())
    prefix = [normalizers.Prepend("▁")] if strips_space else []
    trained.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        TEXTS[:2],
        trainers.BpeTrainer(
            vocab_size=120, special_tokens=["<unk>", *CONTROL, *byte_tokens], show_progress=False
        ),
    )
    pieces = trained.get_vocab()
    merges = _merges(trained)
    backend = Backend(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = trained.normalizer
    strip = [decoders.Strip(" ", 1, 0)] if strips_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens(CONTROL)
    return _wrapped(backend)


def metaspace() -> PreTrainedTokenizerFast:
    """A unigram vocabulary whose decoder drops the first ▁."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", *CONTROL], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _wrapped(backend)


def id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of a token by its spelling."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def text_of(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Return what the tokenizer itself makes of these tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


def _merges(backend: Backend) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def _wrapped(backend: Backend) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token="<|end|>",
        extra_special_tokens=CONTROL[1:],
        chat_template=CHAT_TEMPLATE,
    )
