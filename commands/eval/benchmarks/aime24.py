"""AIME 2024: thirty problems whose answers are whole numbers from 0 to 999, in a LaTeX box."""

import re
from functools import partial

from commands.eval.benchmarks.benchmark import Question, Row, text_field

_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")
# LaTeX that changes only the look of a number: fonts, spaces, degrees, dollar signs, braces.
_FORMATTING = re.compile(
    r"\\(?:text|math|m?box|bold|bf|rm|q?quad)[a-z]*|\\[ ,;:!]|\^\s*\{?\\circ\}?|\\?\$|[{}~]"
)
_EQUALS = re.compile(r"(?<![<>!])=")
# One whole number among words and punctuation: no sign, decimal point or operator.
_NUMBER_IN_WORDS = re.compile(
    r"(?:[^\W\d_]|[\s.,:;()'])*(?<![a-zA-Z.])(\d+)(?![a-zA-Z])(?:[^\W\d_]|[\s.,:;()'°])*"
)
# A number without a decimal point, with a minus sign or a fraction bar before it. These then mark it as no
# answer.
_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212]|(?<=\d)/|\\[dt]?frac\{\d+\}\{)?(?<![\d.])\d++(?![\d.]*\d)")


class Aime24:
    name = "aime24"
    length = 36864
    max_tokens = 32768

    def question(self, row: Row) -> Question:
        answer = str(row["answer"] if "answer" in row else row["Answer"]).strip()
        if not answer.isascii() or not answer.isdecimal() or int(answer) > 999:
            raise ValueError(f"answer must be a whole number from 0 to 999, got {answer!r:.80}")
        name = row["id"] if "id" in row else row["ID"]
        problem = text_field(row, "problem", "Problem")
        return Question(str(name), _PROMPT.format(problem=problem), answer, (), partial(_score, int(answer)))


def final_number(text: str) -> int | None:
    """Return the whole number in the last box, or the last number of a text without a box.

    None if there is none.

    A box must contain exactly one number: alone, among words or after an equals sign. No part of -5, of a
    fraction or of 2^{10} is an answer.
    """
    box = _last_box(text)
    if box is None:
        number = next(reversed(_NUMBER.findall(_without_commas(text))), "")
    else:
        right_side = _EQUALS.split(_without_commas(box))[-1]
        match = _NUMBER_IN_WORDS.fullmatch(_FORMATTING.sub(" ", right_side))
        number = match[1] if match else ""
    return int(number) if number.isdecimal() and len(number) <= 9 else None


def _last_box(text: str) -> str | None:
    r"""Return the content of the \boxed{…} that is closed last. Braces may be nested."""
    content = None
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces and (start := open_braces.pop())[0] != "{":
            content = text[start.end() : brace.start()]
    return content


def _without_commas(text: str) -> str:
    """Return the text without the commas that separate thousands."""
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)


def _score(expected: int, text: str) -> float:
    return float(final_number(text) == expected)
