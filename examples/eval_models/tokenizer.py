"""The evaluation models' tokenizers: byte-level BPE over the suite's text, with a chat template.

Each word of the suite is one token. Numbers split into groups of digits, and UUIDs into pairs of hexadecimal
digits. So a value is few tokens, and values with the same beginning split in the same way. The two styles
differ in the groups and in the special tokens.
"""

from dataclasses import dataclass
from itertools import product

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from commands.eval.tasks import words
from commands.eval.tasks.suite import TASKS, case_source
from examples.training.tokenizer import train_tokenizer

_UUID_GROUPS = (8, 4, 4, 4, 12)


@dataclass(frozen=True, slots=True)
class Style:
    """The differences between the tokenizers."""

    bos: str
    end: str
    pad: str
    user: str
    assistant: str
    system: str
    digits: tuple[int, int]  # the largest size of a number's first group, and of the others


LLAMA = Style("<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", digits=(3, 2))
QWEN = Style(
    "<|start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    digits=(3, 3),
)


def build_tokenizer(style: Style) -> PreTrainedTokenizerFast:
    """Train the tokenizer. Each call returns the same one."""
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern(style)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return train_tokenizer(
        _training_lines(style),
        pre_tokenizer,
        bos=style.bos,
        eos=style.end,
        pad=style.pad,
        roles=(style.user, style.assistant, style.system),
        chat_template=_chat_template(style),
    )


def _pattern(style: Style) -> str:
    """Return the pattern of the pieces that are never merged with their neighbours."""
    first, other = style.digits
    number = rf"(?: |(?<![0-9]))[0-9]{{1,{first}}}|[0-9]{{1,{other}}}"
    return "|".join([*_uuid_pairs(), number, "[ -]?[A-Za-z]+", r"\n+", r" ?[^\sA-Za-z0-9]+", r"\s"])


def _uuid_pairs() -> list[str]:
    """Return a pattern for each of a UUID's sixteen pairs, recognized by the digits before and after it."""
    pairs = []
    digits = [_hex(size) for size in _UUID_GROUPS]
    for group, size in enumerate(_UUID_GROUPS):
        groups_before = "".join(f"{pattern}-" for pattern in digits[:group])
        groups_after = "".join(f"-{pattern}" for pattern in digits[group + 1 :])
        for start in range(0, size, 2):
            # The first pair of a group takes the dash before it, and the first of all takes a space.
            if start:
                lead = ""
                before = groups_before + _hex(start)
            elif group:
                lead = "-"
                before = groups_before.removesuffix("-")
            else:
                lead = " ?"
                before = ""
            num_left = size - start - 2
            after = (_hex(num_left) if num_left else "") + groups_after
            behind = f"(?<={before})" if before else ""
            ahead = f"(?={after})" if after else ""
            pairs.append(f"{behind}{lead}{_hex(2)}{ahead}")
    return pairs


def _hex(num_digits: int) -> str:
    return f"[0-9a-f]{{{num_digits}}}"


def _training_lines(style: Style) -> list[str]:
    lines = [
        lead + word
        for word in (*words.NAMES, *words.TOWNS, *words.ADJECTIVES, *words.NOUNS)
        for lead in ("", " ")
    ]
    lines += [f" {word}" for word in (*words.JOBS, *words.PETS)]
    lines += [f"-{word}" for word in (*words.ADJECTIVES, *words.NOUNS)]
    pairs = ["".join(pair) for pair in product("0123456789abcdef", repeat=2)]
    for pair in pairs:
        lines += [
            f" {pair}{pair}0000-{pair}00-0000-0000-000000000000",
            f"{pair}000000-0000-0000-0000-000000000000",
        ]
    for size in range(1, style.digits[0] + 1):
        lines += [f"{lead}{number:0{size}}" for number in range(10**size) for lead in ("", " ")]
    for name, task in TASKS.items():
        for index in range(100):
            case = task.make(case_source(name, 0, index, "train"), 400, lambda text: len(text) // 4)
            lines.append(case.prompt + case.answer)
    return [line for line in lines for _ in range(2)]


def _chat_template(style: Style) -> str:
    roles = {"system": style.system, "user": style.user, "assistant": style.assistant}
    turn = "".join(
        f"{{%- if message['role'] == '{role}' %}}{{{{- '{token}' }}}}{{%- endif %}}"
        for role, token in roles.items()
    )
    return (
        "{{- bos_token }}{%- for message in messages %}"
        "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
        "{{- raise_exception('unknown role ' ~ message['role'] ~ ': system, user and assistant are known') }}"
        "{%- endif %}" + turn + "{%- if message['content'] is string %}{{- message['content'] }}"
        "{%- else %}{%- for part in message['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}"
        "{{- eos_token }}{%- endfor %}{%- if add_generation_prompt %}{{- '"
        + style.assistant
        + "' }}{%- endif %}"
    )
