"""Prompts of prose cases: facts between the sentences of a document, in the requested layout."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from commands.eval.options import Pack, ProseOptions
from commands.eval.prompts import Prompt, num_common
from commands.eval.prose.haystack import Haystack, draw_start
from commands.eval.prose.layout import Message, draw_layout
from commands.eval.prose.tasks import Facts, ProseTask
from commands.eval.tasks.case import Case
from commands.eval.tasks.filler import depths
from commands.eval.tasks.fitting import fit
from commands.eval.tasks.suite import case_source
from server.options.command_line import OptionError
from server.text.tokenizer import Tokenizer

# The length limit of an answer, relative to a sentence with the value: a model may use other words.
_MAX_LENGTH_RATIO = 2
_EXTRA_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prompt with a document of `size` sentences and the facts."""

    task: str
    size: int
    document: Sequence[str]
    prompt: Sequence[Message]


class ProsePromptWriter:
    """Writes cases as prompts of at most `options.length` tokens, with special tokens and the template."""

    def __init__(self, tokenizer: Tokenizer, haystacks: Sequence[Haystack], options: ProseOptions) -> None:
        self._tokenizer = tokenizer
        self._haystacks = haystacks
        self._options = options

    def write(self, task: ProseTask, index: int) -> Prompt:
        """Return a prompt.

        Raises `LengthError` for a length too short for the task, `OptionError` for a haystack too short for
        the length.
        """
        options = self._options
        rng = case_source(f"prose/{task.name}", options.seed, index)
        haystack = rng.choice(self._haystacks)
        facts = task.draw(rng, haystack.text)
        at_depths = depths(rng, len(facts.statements))
        start = draw_start(haystack, rng)
        layout = draw_layout(
            rng, options.question_position, options.turns, options.trailing_tokens, self._count
        )
        prefix = facts.answer_prefix if options.answer_prefix else ""

        def write(size: int) -> _Draft:
            document = _hidden(haystack.stretch(start, size), facts.statements, at_depths)
            return _Draft(task.name, size, document, layout.messages(document, facts.question))

        draft = fit(write, options.length, lambda messages: len(self._encode(messages, prefix)))
        if draft.size > len(haystack.sentences):
            raise OptionError(
                f"--haystack {haystack.name} must have enough text for --length {options.length}, "
                f"got {len(haystack.sentences)} sentences"
            )
        token_ids = self._encode(draft.prompt, prefix)
        known = facts.question if options.pack is Pack.BEFORE_ANSWER else ""
        prefilled = self._encode(layout.messages(draft.document, known), None)
        # Decode reads at least one token of the prompt: the token that prefill itself samples has not been
        # read from the packed slot.
        num_prefill_tokens = min(num_common(token_ids, prefilled), len(token_ids) - 1)
        case = Case(
            task.name,
            "".join(draft.document),
            facts.question,
            prefix,
            facts.answer,
            facts.references,
            facts.scoring,
        )
        # A question that is unknown when the slot is packed must not help to pack it.
        is_known = options.chat_template and options.pack is Pack.BEFORE_ANSWER
        question = draft.prompt[-1]["content"] if is_known else None
        return Prompt(
            array("i", token_ids), num_prefill_tokens, self._max_tokens(facts), case, question=question
        )

    def _max_tokens(self, facts: Facts) -> int:
        sentence = f"{facts.answer_prefix} {facts.answer}"
        return _MAX_LENGTH_RATIO * self._count(sentence) + _EXTRA_TOKENS

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode(self, messages: Sequence[Message], answer_prefix: str | None) -> tuple[int, ...]:
        """Return the ids of a conversation and of the answer's first words. None is no answer at all."""
        if self._options.chat_template:
            chat = self._tokenizer.render_chat(
                messages, add_generation_prompt=True, continue_final_message=False
            )
            return (*chat, *self._tokenizer.encode(answer_prefix or "", add_special_tokens=False))
        (message,) = messages
        start = "" if answer_prefix is None else f"\n\nAnswer: {answer_prefix}".rstrip()
        return self._tokenizer.encode(message["content"].rstrip() + start, add_special_tokens=True)


def _hidden(sentences: Sequence[str], statements: Sequence[str], at_depths: Sequence[float]) -> list[str]:
    """Return the sentences with each statement, as a paragraph, before the sentence at its depth.

    Depths ascend.
    """
    pieces: list[str] = []
    start = 0
    for statement, depth in zip(statements, at_depths, strict=True):
        end = int(depth * (len(sentences) + 1))
        pieces += sentences[start:end]
        if pieces:
            pieces[-1] = pieces[-1].rstrip()
            pieces.append("\n\n")
        pieces.append(f"{statement}\n\n")
        start = end
    return [*pieces, *sentences[start:]]
