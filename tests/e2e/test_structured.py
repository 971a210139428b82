"""Structured output that a real model finds unlikely: random schemas and prompts, also at temperature 2."""

from bench.structured.survey import survey
from tests.e2e.process import Server


async def test_every_answer_that_stops_satisfies_its_schema(small_slot_server: Server) -> None:
    findings = await survey(small_slot_server.url, num_schemas=24, max_tokens=256)
    assert not findings.violations, findings
    assert findings.reasons["stop"] >= 10, findings
    assert findings.reasons["refused"] <= 2, findings
