"""Where the question of a prose case is, and the messages of the conversation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class QuestionPosition(StrEnum):
    """Where the question is in the user's message. Instructions end the message in every case."""

    LAST = "last"  # after the document
    FIRST = "first"  # before the document
    MIDDLE = "middle"  # between two sentences of the document


class Turns(StrEnum):
    """The turns of the conversation before the answer."""

    ONE = "one"  # the document and the question in one message
    SEVERAL = "several"  # the document, a short exchange about something else, then the question


INSTRUCTIONS = (
    "Answer with the value only.",
    "Do not explain how you found it.",
    "Use the exact spelling of the text.",
    "If the text gives a number, copy every digit.",
    "Do not repeat the question.",
    "Write the answer on one line.",
    "Take the answer from the text above and not from your general knowledge.",
    "Most of the text has nothing to do with the question, so pass over it.",
    "Do not summarise the document.",
    "Use no bullet points, headings or other formatting.",
    "Please do not add greetings or polite phrases.",
    "If several values seem possible, choose the one that the text states directly.",
    "Keep hyphens, dots and currency signs as they are.",
    "Answer in English.",
    "Do not translate names of people and places.",
    "Check your answer against the text once more before you write it.",
    "There is always exactly one right answer to each question.",
    "Your answer will be compared with the right one by a program, so additional words are of no use.",
    "Leave out the reasons for your answer, even if they seem interesting.",
    "Do not guess when you can look it up in the text.",
    "Never invent a value that the text does not contain.",
    "When you have written the answer, stop.",
    "Thank you for reading such a long document with care.",
)
"""Instructions after a question. The first always comes first."""

_PREAMBLE = "Read the following text. A question about it has to be answered."
_FROM_TEXT = "Answer the question from the following text."
_MARKED = "[Question about this text: {question} Answer it after the end of the text.]"
_ACKNOWLEDGEMENT = "I have read the text. What would you like to know?"
_UNRELATED = (
    ("Before we come to that: how many days does a leap year have?", "A leap year has 366 days."),
    ("First something else: what is the capital of Portugal?", "The capital of Portugal is Lisbon."),
    ("One moment. How do I spell the plural of leaf?", "The plural of leaf is leaves."),
    ("By the way, at what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of a case: everything but the document, its facts and the question."""

    position: QuestionPosition
    instructions: str
    exchange: tuple[str, str] | None  # the unrelated question and its answer; None is a single turn

    def messages(self, sentences: Sequence[str], question: str) -> list[Message]:
        """Return the messages up to the answer.

        An empty `question` leaves the question and all after it out. It needs position `last`.
        """
        document = "".join(sentences).rstrip()
        if self.exchange is not None:
            aside, reply = self.exchange
            return [
                _user(f"{_PREAMBLE}\n\n{document}"),
                _assistant(_ACKNOWLEDGEMENT),
                _user(aside),
                _assistant(reply),
                _user(_paragraphs(_request(question), self.instructions) if question else ""),
            ]
        if self.position is QuestionPosition.LAST:
            rest = _paragraphs(_request(question), self.instructions) if question else ""
            return [_user(f"{_PREAMBLE}\n\n{document}\n\n{rest}")]
        if self.position is QuestionPosition.FIRST:
            return [_user(_paragraphs(_request(question), _FROM_TEXT, document, self.instructions))]
        half = len(sentences) // 2
        before = "".join(sentences[:half]).rstrip()
        after = "".join(sentences[half:]).rstrip()
        marked = _MARKED.format(question=question)
        return [_user(_paragraphs(_PREAMBLE, before, marked, after, self.instructions))]


def draw_layout(
    rng: random.Random,
    position: QuestionPosition,
    turns: Turns,
    num_trailing: int,
    count_tokens: Callable[[str], int],
) -> Layout:
    """Return a layout with instructions of about `num_trailing` tokens, in an order drawn from `rng`."""
    instructions = cut_instructions(rng, num_trailing, count_tokens)
    exchange = rng.choice(_UNRELATED)
    return Layout(position, instructions, exchange if turns is Turns.SEVERAL else None)


def cut_instructions(rng: random.Random, num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return as many instructions as have at most `num_tokens` tokens, and at least one unless that is 0."""
    first, *others = INSTRUCTIONS
    rng.shuffle(others)
    if num_tokens == 0:
        return ""
    text = first
    for sentence in others:
        longer = f"{text} {sentence}"
        if count_tokens(longer) > num_tokens:
            break
        text = longer
    return text


def _request(question: str) -> str:
    return f"Question: {question}"


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
