"""Copying: records told in prose are to be written as JSON, all of them (after Text2JSON of arXiv 2604.08426)."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
from commands.eval.tasks.filler import depths, hide, prose
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import compounds, numbers
from commands.eval.tasks.words import NAMES, TOWNS

_STATEMENTS = (
    "Entry {entry}: the item is {item}, the maker is {maker}, the town is {town}, the price is {price}.",
    "Entry {entry} says that the item is {item}, the maker is {maker}, the town is {town} and the price is {price}.",
    "For entry {entry} the item is {item}, the maker is {maker}, the town is {town}; the price is {price}.",
)
_TOKENS_A_RECORD = 512  # of context: an answer stays short beside its prompt
_LEAST_RECORDS, _MOST_RECORDS = 2, 8


@dataclass(frozen=True, slots=True)
class ExtractionTask:
    """`num_records` records in prose; without a number, one for each 512 tokens, from 2 to 8."""

    name: str = "text2json"
    num_records: int | None = None

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        count = self.num_records or min(max(num_tokens // _TOKENS_A_RECORD, _LEAST_RECORDS), _MOST_RECORDS)
        records = Supply(_records(rng)).first(count)
        wording = rng.choice(_STATEMENTS)
        statements = [wording.format(**record) for record in records]
        at, filler = depths(rng, count), Supply(prose(rng))
        lines = tuple(json.dumps(record) for record in records)

        def write(size: int) -> Case:
            haystack = hide(filler.first(size), statements, at)
            context = f"The text below tells of several numbered entries. They are to be written as JSON afterwards.\n\n{haystack}"
            question = f"Write the {count} entries of the text above as JSON objects with the fields entry, item, maker, town and price."
            return Case(
                self.name,
                *prompted(context, question, "The entries are"),
                f" [{', '.join(lines)}]",
                lines,
                Scoring.RECORDS,
            )

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
