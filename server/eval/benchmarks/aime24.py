"""AIME 2024: thirty problems whose answers are whole numbers from 0 to 999, asked for in a box."""

import re
from functools import partial

from server.eval.benchmarks.benchmark import Question, Row, words

_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_NUMBER = re.compile(r"(?<![\d.])\d+(?![\d.]*\d)")


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
    """Return the whole number of the last box, or where there is no box the last one told; None: there is none."""
    boxes = _BOX.findall(text)
    numbers = _NUMBER.findall(_without_commas(boxes[-1] if boxes else text))
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= 9 else None


def _without_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)


def _score(right: int, text: str) -> float:
    return float(final_number(text) == right)
