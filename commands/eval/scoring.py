"""How right an answer is, from 0 to 1: RULER's string matches, and the overlap of JSON records."""

import json
import re
from typing import TypeAlias

from commands.eval.tasks.case import Case, Scoring

Triple: TypeAlias = tuple[object, str, str]


def score(case: Case, answer: str) -> float:
    """Return the score of what a model wrote after the case's prompt."""
    if case.scoring is Scoring.RECORDS:
        return _overlap(_triples(" ".join(case.references)), _triples(answer))
    found = [reference.lower() in answer.lower() for reference in case.references]
    return float(any(found)) if case.scoring is Scoring.PART else sum(found) / len(found)


def _overlap(wanted: set[Triple], given: set[Triple]) -> float:
    """Return intersection over union."""
    return len(wanted & given) / len(wanted | given)


def _triples(text: str) -> set[Triple]:
    """Return (entry, field, value) of every flat JSON object in a text; one that was cut short or is broken counts for nothing."""
    records = (_record(match.group()) for match in re.finditer(r"\{[^{}]*\}", text))
    return {
        (str(record.get("entry")), str(field), str(value))
        for record in records
        for field, value in record.items()
    }


def _record(text: str) -> dict[str, object]:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
