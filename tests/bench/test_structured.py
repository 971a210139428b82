"""Random schemas are valid, use the listed keywords, and are equal for equal seeds."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]

from bench.structured.random_schemas import KEYWORDS, random_schema
from bench.structured.survey import Findings


def keywords(schema: Any, *, is_map: bool = False) -> set[str]:
    """Return the keywords in a schema, or in a mapping of names to schemas."""
    if isinstance(schema, list):
        return set().union(*(keywords(item) for item in schema))
    if not isinstance(schema, dict):
        return set()
    found = set() if is_map else set(schema)
    for name, value in schema.items():
        if is_map or name not in ("enum", "const"):
            found |= keywords(
                value, is_map=not is_map and name in ("properties", "patternProperties", "$defs")
            )
    return found


def test_random_schemas_use_exactly_the_listed_keywords() -> None:
    schemas = [random_schema(seed) for seed in range(400)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert set().union(*map(keywords, schemas)) == set(KEYWORDS)
    assert schemas == [random_schema(seed) for seed in range(400)]


def test_findings_list_shares_refusals_and_violations() -> None:
    findings = Findings()
    findings.reasons.update(["stop", "stop", "length", "refused"])
    findings.refusals["no"] += 1
    findings.violations.append("  seed 3: bad")
    assert str(findings).splitlines() == [
        "4 answers: stop 2 (50.0%), length 1 (25.0%), refused 1 (25.0%); 1 violations",
        "  refused 1 ×: no",
        "  seed 3: bad",
    ]
