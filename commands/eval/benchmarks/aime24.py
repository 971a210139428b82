"""AIME 2024: thirty problems whose answers are whole numbers from 0 to 999, asked for in a box."""

import re
from functools import partial

from commands.eval.benchmarks.benchmark import Question, Row, words

_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")
_LOOKS = re.compile(r"\\(?:text|math|m?box|bold|bf|rm|q?quad)[a-z]*|\\[ ,;:!]|\^\s*\{?\\circ\}?|\\?\$|[{}~]")
_EQUALS = re.compile(r"(?<![<>!])=")
_IN_WORDS = re.compile(r"(?:[^\W\d_]|[\s.,:;()'])*(?<![a-zA-Z.])(\d+)(?![a-zA-Z])(?:[^\W\d_]|[\s.,:;()'°])*")
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
        problem = words(row, "problem", "Problem")
        return Question(str(name), _PROMPT.format(problem=problem), answer, (), partial(_score, int(answer)))


def final_number(text: str) -> int | None:
    """Return the whole number of the last box, or where there is no box the last one told; None: there is none.

    A box must hold one number, alone, in words or after an equals sign: of -5, a fraction or 2^{10} no part is the answer.
    """
    box = _last_box(text)
    if box is None:
        number = next(reversed(_NUMBER.findall(_without_commas(text))), "")
    else:
        told = _IN_WORDS.fullmatch(_LOOKS.sub(" ", _EQUALS.split(_without_commas(box))[-1]))
        number = told[1] if told else ""
    return int(number) if number.isdecimal() and len(number) <= 9 else None


def _last_box(text: str) -> str | None:
    last, opened = None, []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            last = text[start.end() : brace.start()]
    return last


def _without_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)


def _score(right: int, text: str) -> float:
    return float(final_number(text) == right)
