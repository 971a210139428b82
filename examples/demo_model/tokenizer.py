"""The demo model's tokenizer: byte-level BPE over the made-up text, with a chat template.

It is trained on every form of every word, so that names and values are single tokens. Other text splits into
shorter tokens, at worst into bytes, so that every string survives encoding and decoding.
"""

import random

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from commands.eval.tasks import words
from examples.demo_model import corpus
from examples.training.tokenizer import train_tokenizer

BOS, EOS, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message['role'] ~ ': system, user and assistant are known') }}
    {%- endif %}
    {{- '<|' ~ message['role'] ~ '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def single_tokens() -> list[str]:
    """The pieces of text that must be one token each."""
    spaced = (
        *words.NAMES,
        *words.ADJECTIVES,
        *corpus.NOUNS,
        *words.PLACES,
        *words.THINGS,
        *words.DEEDS,
        *words.TIMES,
    )
    return [*(f" {word}" for word in spaced), *words.ADJECTIVES, *words.NAMES]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer. Each call returns the same one."""
    fast = train_tokenizer(
        _training_lines(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        bos=BOS,
        eos=EOS,
        pad=PAD,
        roles=(SYSTEM, USER, ASSISTANT),
        chat_template=CHAT_TEMPLATE,
    )
    split = [text for text in single_tokens() if len(fast.encode(text, add_special_tokens=False)) != 1]
    if split:
        raise RuntimeError(f"expected each word to be one token, but {len(split)} are not: {split[:10]}")
    return fast


def _training_lines() -> list[str]:
    rng = random.Random("tokenizer")
    lines = single_tokens() * 2
    for _ in range(200):
        text = corpus.write_training_text(rng, num_facts=32, num_fillers=32, num_questions=32)
        lines += [text.document, *(line for exchange in text.exchanges for line in exchange)]
    lines += [line for exchange in corpus.SMALL_TALK for line in exchange] * 2
    lines += list(corpus.SYSTEM_PROMPTS) * 2
    return lines
