"""LongBench v2 (arXiv 2412.15204): multiple choice over contexts of up to two million words.

The prompt and the extraction of answers are the authors' (github.com/THUDM/LongBench, `prompts/0shot.txt` and
`pred.py`), because they define the benchmark.
"""

import re
from functools import partial

from commands.eval.benchmarks.benchmark import Question, Row, text_field

_PROMPT = """Please read the following text and answer the question below.

<text>
{context}
</text>

What is the correct answer to this question: {question}
Choices:
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Format your response as follows: "The correct answer is (insert answer here)"."""
_FIELDS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
_ANSWERS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


class LongBenchV2:
    name = "longbench-v2"
    length = 32768
    max_tokens = 128

    def question(self, row: Row) -> Question:
        answer = text_field(row, "answer")
        if answer not in ("A", "B", "C", "D"):
            raise ValueError(f"answer must be A, B, C or D, got {answer!r:.80}")
        return Question(
            text_field(row, "_id"),
            _PROMPT.format_map({name: text_field(row, name).strip() for name in _FIELDS}),
            answer,
            (text_field(row, "difficulty"), text_field(row, "length")),
            partial(_score, answer),
            may_be_cut=True,
        )


def choice(text: str) -> str | None:
    """Return the letter that an answer names, as the authors extract it. None if there is none."""
    plain = text.replace("*", "")
    return next((match[1] for pattern in _ANSWERS if (match := pattern.search(plain))), None)


def _score(expected: str, text: str) -> float:
    return float(choice(text) == expected)
