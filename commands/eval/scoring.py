"""The score of an answer, from 0 to 1: RULER's string matches, or the overlap of JSON records."""

import json
import re
from typing import TypeAlias

from commands.eval.tasks.case import Case, Scoring

Triple: TypeAlias = tuple[object, str, str]


def score(case: Case, answer: str) -> float:
    """Return the score of an answer to the case's prompt."""
    if case.scoring is Scoring.RECORDS:
        return _overlap(_triples(" ".join(case.references)), _triples(answer))
    found = [reference.lower() in answer.lower() for reference in case.references]
    return float(any(found)) if case.scoring is Scoring.PART else sum(found) / len(found)


def _overlap(expected: set[Triple], found: set[Triple]) -> float:
    """Return intersection over union. `expected` is not empty."""
    return len(expected & found) / len(expected | found)


def _triples(text: str) -> set[Triple]:
    """Return the (entry, field, value) triples of all flat JSON objects in a text.

    An object's entry is the value of its field `entry` or `person`. Invalid JSON is ignored.
    """
    records = (_record(match.group()) for match in re.finditer(r"\{[^{}]*\}", text))
    return {
        (str(record.get("entry", record.get("person"))), str(field), str(value))
        for record in records
        for field, value in record.items()
    }


def _record(text: str) -> dict[str, object]:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
