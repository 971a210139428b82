"""Extraction: all records of a prose text are to be written as JSON (after Text2JSON of arXiv 2604.08426)."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
from commands.eval.tasks.filler import depths, hide, prose
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import compounds, numbers
from commands.eval.tasks.words import NAMES, TOWNS

_STATEMENTS = (
    "Entry {entry}: the item is {item}, the maker is {maker}, the town is {town}, the price is {price}.",
    (
        "Entry {entry} says that the item is {item}, the maker is {maker}, the town is {town} "
        "and the price is {price}."
    ),
    "For entry {entry} the item is {item}, the maker is {maker}, the town is {town}; the price is {price}.",
)
_TOKENS_PER_RECORD = 512  # of context, so that an answer is short compared with its prompt
_MIN_RECORDS = 2
_MAX_RECORDS = 8


@dataclass(frozen=True, slots=True)
class ExtractionTask:
    """`num_records` records in prose. None is one record for each 512 tokens, from 2 to 8."""

    name: str = "text2json"
    num_records: int | None = None

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        fitting_count = min(max(num_tokens // _TOKENS_PER_RECORD, _MIN_RECORDS), _MAX_RECORDS)
        count = self.num_records or fitting_count
        records = Supply(_records(rng)).first(count)
        wording = rng.choice(_STATEMENTS)
        statements = [wording.format(**record) for record in records]
        positions = depths(rng, count)
        filler = Supply(prose(rng))
        lines = tuple(json.dumps(record) for record in records)
        question = (
            f"Write the {count} entries of the text above as JSON objects with the fields "
            "entry, item, maker, town and price."
        )

        def write(size: int) -> Case:
            haystack = hide(filler.first(size), statements, positions)
            context = (
                "The text below tells of several numbered entries. "
                f"They are to be written as JSON afterwards.\n\n{haystack}"
            )
            parts = prompt_parts(context, question, "The entries are")
            return Case(self.name, *parts, f" [{', '.join(lines)}]", lines, Scoring.RECORDS)

        return fit(write, num_tokens, count_tokens)


def _records(rng: random.Random) -> Iterator[dict[str, int | str]]:
    prices = numbers(rng, num_digits=4)
    for entry, (item, price) in enumerate(zip(compounds(rng), prices, strict=False), 1):
        yield {
            "entry": entry,
            "item": item,
            "maker": rng.choice(NAMES),
            "town": rng.choice(TOWNS),
            "price": int(price),
        }
