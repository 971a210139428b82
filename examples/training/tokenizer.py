"""Training of byte-level BPE tokenizers, which are complete in bytes."""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 16384  # tokens


def train_tokenizer(
    lines: Iterable[str],
    pre_tokenizer: PreTokenizer,
    *,
    bos: str,
    eos: str,
    pad: str,
    roles: Sequence[str],
    chat_template: str,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer. Equal arguments give equal tokenizers.

    `roles` are the special tokens that open a turn.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    specials = (pad, bos, eos, *roles)
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,  # never reached: merging ends when each piece of the text is one token
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=list(roles),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    fast.chat_template = chat_template
    return fast
