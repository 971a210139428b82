"""What a draft's shortened prompts cost in right answers and save in time, through the served path.

Usage: `python -m bench.speculative_prefill --model TARGET --draft DRAFT [--out FILE] [--length 4096]
[--cases 25] [--tasks NAME …] [--keep 0.5 0.25 0.125] [--settings NAME …]`. All settings answer the same cases
of `snapserve eval ruler`, or of `eval prose` with the answer's first words, as raw text, greedily and cold:
nothing is stored between requests.

`whole` reads the whole prompt. `draft` and `look-ahead` are the server's. The baselines choose among the same
chunks of the draft's tokens, with the same sentences around them, and the same beginning and end kept: `bm25`
by the words of the question, `newest` the last ones, and `random` ones, a control that must lose.
`snapstream` reads the whole prompt into a slot of policy snapstream with that share of the prompt's entries,
and `both` the draft's choice of twice that share into such a slot. All others use slots that hold all.

`kept` is the score of the text that the model reads, as if it were the answer: whether what a right answer
needs was kept. It does not depend on what the model can do.
"""

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from commands.eval.completer import http_client
from commands.eval.engine import engine
from commands.eval.errors import EvalError
from commands.eval.options import ProseOptions
from commands.eval.prompts import load_tokenizer
from commands.eval.prose.haystack import load_haystacks
from commands.eval.prose.prompts import ProsePromptWriter
from commands.eval.prose.tasks import PROSE_TASKS
from commands.eval.scoring import score
from commands.eval.statistics import mean_interval, mean_of_means
from commands.eval.tasks.case import Case, LengthError, prompt_parts
from commands.eval.tasks.suite import TASKS, case_source
from commands.shared.progress import ProgressLine
from server.generation.speculative_prefill import num_kept_chunks, shortening
from server.options.command_line import OptionError
from server.options.models import model_path
from server.text.shortening import Passage, Shortening
from server.text.tokenizer import FramedText, Tokenizer

WHOLE = "whole"
SERVED = {"draft": "tail", "look-ahead": "look-ahead"}  # --speculative-prefill-queries of a setting
_WORD = re.compile(r"\w+")
_MAX_TOKENS_RATIO = 1.5  # of an answer's limit and the perfect answer, as in `snapserve eval ruler`
_EXTRA_TOKENS = 8
_MAX_ANSWER = 512
_MIN_LENGTH = 128  # of `eval prose`
_K1 = 1.5  # BM25's usual numbers
_B = 0.75


@dataclass(frozen=True, slots=True)
class Answer:
    """One case's answer. `num_read` are the prompt's tokens that the model read."""

    score: float
    kept: float  # the score of the prompt that the model read
    num_read: int
    ttft: float  # seconds


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one setting at one share, by task."""

    setting: str
    keep: float | None
    answers: Mapping[str, list[Answer]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.setting if self.keep is None else f"{self.setting} {self.keep:g}"

    @property
    def scores(self) -> list[list[float]]:
        return [[100 * answer.score for answer in answers] for answers in self.answers.values()]

    @property
    def all_answers(self) -> list[Answer]:
        return [answer for answers in self.answers.values() for answer in answers]


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of a call."""

    model: str
    draft: str
    length: int
    num_cases: int
    tasks: Sequence[str]
    keep: Sequence[float]
    settings: Sequence[str]
    serve_options: Sequence[str] = ()
    seed: int = 0


def chunk_words(short: Shortening, text: str) -> list[list[str]]:
    """Return the words of each chunk, in small letters."""
    return [_WORD.findall(text[first:last].lower()) for first, last in short.chunks]


def bm25(chunks: Sequence[Sequence[str]], question: Sequence[str]) -> list[float]:
    """Return the score of each chunk's words for those of a question (Robertson and Zaragoza 2009)."""
    counts = [Counter(chunk) for chunk in chunks]
    mean_length = sum(map(len, chunks)) / len(chunks) or 1.0
    scores = [0.0] * len(chunks)
    for word in set(question):
        num_with = sum(word in count for count in counts)
        weight = math.log(1 + (len(chunks) - num_with + 0.5) / (num_with + 0.5))
        for index, count in enumerate(counts):
            length = 1 - _B + _B * len(chunks[index]) / mean_length
            scores[index] += weight * count[word] * (_K1 + 1) / (count[word] + _K1 * length)
    return scores


def scores_of(setting: str, short: Shortening, case: Case, text: str, source: random.Random) -> list[float]:
    """Return a baseline's score of each chunk."""
    num_chunks = len(short.chunks)
    match setting:
        case "newest":
            return [float(index) for index in range(num_chunks)]
        case "random":
            return [source.random() for _ in range(num_chunks)]
        case _:
            return bm25(chunk_words(short, text), _WORD.findall(case.question.lower()))


BASELINES = ("bm25", "newest", "random")
SNAPSTREAM, BOTH = "snapstream", "both"
SETTINGS = (WHOLE, *SERVED, *BASELINES, SNAPSTREAM, BOTH)


def shortened_prompt(setting: str, case: Case, framed: FramedText, keep: float, source: random.Random) -> str:
    """Return the prompt of a case with the chunks that a baseline keeps."""
    text = case.prompt
    passages = (Passage(text, may_be_cut=True, is_question=True),)
    unscored = shortening(passages, framed, (), keep)
    short = shortening(passages, framed, scores_of(setting, unscored, case, text, source), keep)
    num_kept = num_kept_chunks(short.num_chunks, keep, len(framed.token_ids))
    return short.texts(num_kept)[0]


class Measurement:
    """Asks one server all cases in all settings that it serves."""

    def __init__(self, plan: Plan, cases: Mapping[str, Sequence[Case]]) -> None:
        self._plan = plan
        self._cases = cases
        self._tokenizer = load_tokenizer(plan.model)
        self._draft_tokenizer = load_tokenizer(plan.draft)
        self._num_sent = 0

    async def rows(self) -> list[Row]:
        """Return the rows of all settings. Raises `EvalError`."""
        rows: list[Row] = []
        queries = dict.fromkeys(SERVED.get(setting, "tail") for setting in self._plan.settings)
        for query in queries:
            settings = [name for name in self._plan.settings if SERVED.get(name, "tail") == query]
            async with engine(self._options(query)) as url, http_client(None) as http:
                for setting in settings:
                    shares = (None,) if setting == WHOLE else self._plan.keep
                    rows += [await self._row(http, url, setting, keep) for keep in shares]
        return sorted(rows, key=lambda row: self._plan.settings.index(row.setting))

    def _options(self, queries: str) -> tuple[str, ...]:
        most = str(self._plan.length + _MAX_ANSWER)
        pools = ["full:slots=1,name=full"]
        if {SNAPSTREAM, BOTH} & set(self._plan.settings):
            pools += [
                f"snapstream:slots=1,capacity={round(keep * self._plan.length)},name={keep:g}"
                for keep in self._plan.keep
            ]
        return (
            *("--model", self._plan.model, "--speculative-prefill-model", self._plan.draft),
            *("--speculative-prefill-queries", queries, "--speculative-prefill-threshold", "1"),
            *("--pool", *pools, "--max-model-len", most),
            *("--prefix-cache-bytes", "0"),
            *self._plan.serve_options,
        )

    async def _row(self, http: httpx.AsyncClient, url: str, setting: str, keep: float | None) -> Row:
        row = Row(setting, keep, {name: [] for name in self._cases})
        progress = ProgressLine(sys.stderr, row.label, sum(map(len, self._cases.values())))
        try:
            for name, cases in self._cases.items():
                for index, case in enumerate(cases):
                    fields, prompt = self._request(setting, keep, case, random.Random(f"{name}/{index}"))
                    row.answers[name].append(await self._ask(http, url, case, {"prompt": prompt, **fields}))
                    progress(True)
        finally:
            progress.close()
        return row

    def _request(
        self, setting: str, keep: float | None, case: Case, source: random.Random
    ) -> tuple[dict[str, Any], str]:
        if setting == WHOLE or keep is None:
            return {"speculative_prefill": False, "pool": "full"}, case.prompt
        pool = f"{keep:g}" if setting in (SNAPSTREAM, BOTH) else "full"
        if setting == SNAPSTREAM:
            return {"speculative_prefill": False, "pool": pool, "question": case.question}, case.prompt
        if setting in SERVED or setting == BOTH:
            share = min(1.0, 2 * keep) if setting == BOTH else keep
            fields = {"speculative_prefill": True, "speculative_prefill_keep": share, "pool": pool}
            return {**fields, "question": case.question}, case.prompt
        framed = self._draft_tokenizer.encode_framed(case.prompt, in_template=False)
        prompt = shortened_prompt(setting, case, framed, keep, source)
        return {"speculative_prefill": False, "pool": pool}, prompt

    async def _ask(self, http: httpx.AsyncClient, url: str, case: Case, fields: Mapping[str, Any]) -> Answer:
        """Stream one answer. The draft has scored nothing like it: its salt is new."""
        self._num_sent += 1
        num_tokens = len(self._tokenizer.encode(case.answer, add_special_tokens=False))
        body = {
            **fields,
            "return_token_ids": True,
            "max_tokens": int(_MAX_TOKENS_RATIO * num_tokens) + _EXTRA_TOKENS,
            "temperature": 0,
            "cache_salt": str(self._num_sent),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.monotonic()
        ttft: float | None = None
        text, usage = "", None
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise EvalError(f"{url} answers HTTP {response.status_code} {response.text}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise EvalError(f"{url} answers {chunk}")
                if chunk["choices"] and ttft is None:
                    ttft = time.monotonic() - start
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk["usage"] or usage
        if usage is None or ttft is None:
            raise EvalError(f"{url} ended an answer early")
        read, num_read = fields["prompt"], usage["prompt_tokens"]
        if "speculative_prefill" in usage:
            token_ids = usage["speculative_prefill"]["read_token_ids"]
            read, num_read = self._tokenizer.decode(token_ids), len(token_ids)
        return Answer(score(case, text), score(case, read), num_read, ttft)


def write_cases(plan: Plan, tokenizer: Tokenizer) -> dict[str, list[Case]]:
    """Return the cases of each task, of about `length` tokens of the model that answers.

    Raises `LengthError`, `OptionError`.
    """
    prose = ProseOptions(length=plan.length, seed=plan.seed, chat_template=False, answer_prefix=True)
    writer = ProsePromptWriter(tokenizer, load_haystacks(prose.haystack), prose)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def make(name: str, index: int) -> Case:
        if name in TASKS:
            return TASKS[name].make(case_source(name, plan.seed, index), plan.length, count)
        case = writer.write(PROSE_TASKS[name], index).case
        context, question, answer_prefix = prompt_parts(
            case.context.rstrip(), case.question, case.answer_prefix
        )
        return replace(case, context=context, question=question, answer_prefix=answer_prefix)

    return {name: [make(name, index) for index in range(plan.num_cases)] for name in plan.tasks}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: right answers with 95 % intervals, tokens read, and TTFT."""
    names = list(rows[0].answers)
    lines = [
        f"| setting | mean, % | kept, % | tokens read | median TTFT, s | {' | '.join(names)} |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in rows:
        low, high = mean_interval(row.scores)
        answers = row.all_answers
        cells = [
            row.label,
            f"{mean_of_means(row.scores):.1f} ({low:.0f} to {high:.0f})",
            f"{100 * statistics.fmean(answer.kept for answer in answers):.1f}",
            f"{statistics.fmean(answer.num_read for answer in answers):.0f}",
            f"{statistics.median(answer.ttft for answer in answers):.2f}",
            *(f"{statistics.fmean(scores):.0f}" for scores in row.scores),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan(arguments: Sequence[str] | None) -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="the model that answers")
    parser.add_argument("--draft", required=True, help="the model that scores")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--cases", type=int, default=25, help="of each task")
    parser.add_argument(
        "--tasks", nargs="+", choices=(*TASKS, *PROSE_TASKS), default=tuple(TASKS), metavar="NAME"
    )
    parser.add_argument("--keep", nargs="+", type=float, default=(0.5, 0.25, 0.125), metavar="SHARE")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for all answers as JSON")
    parser.add_argument("--serve-options", nargs=argparse.REMAINDER, default=[], help="of snapserve serve")
    options = parser.parse_args(arguments)
    if options.length < _MIN_LENGTH:
        parser.error(f"--length must be at least {_MIN_LENGTH}")
    try:
        model, draft = model_path(options.model), model_path(options.draft)
    except ValueError as error:
        parser.error(f"each model must be {error}")
    plan = Plan(
        model,
        draft,
        options.length,
        options.cases,
        options.tasks,
        options.keep,
        options.settings,
        options.serve_options,
        options.seed,
    )
    return plan, options.out


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0, or 1 for what cannot be measured."""
    plan, out = _plan(arguments)
    try:
        cases = write_cases(plan, load_tokenizer(plan.model))
        rows = asyncio.run(Measurement(plan, cases).rows())
    except (EvalError, LengthError, OptionError, httpx.HTTPError) as error:
        print(f"bench.speculative_prefill: {error}", file=sys.stderr)
        return 1
    if out is not None:
        out.write_text(json.dumps({"plan": asdict(plan), "rows": [asdict(row) for row in rows]}, indent=1))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
