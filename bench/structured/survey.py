"""Requests for random schemas, and whether the answers satisfy them."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]

from bench.structured.random_schemas import WORDS, Schema, random_schema

TEMPERATURES = (0.0, 1.0, 2.0)


@dataclass(slots=True)
class Findings:
    """The results of a survey."""

    reasons: Counter[str] = field(default_factory=Counter)  # finish reasons, and "refused"
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = sum(self.reasons.values())
        shares = [f"{reason} {count} ({count / total:.1%})" for reason, count in self.reasons.most_common()]
        refusals = [f"  refused {count} ×: {message}" for message, count in self.refusals.most_common()]
        return "\n".join(
            [
                f"{total} answers: {', '.join(shares)}; {len(self.violations)} violations",
                *refusals,
                *self.violations,
            ]
        )


async def survey(
    url: str, num_schemas: int, max_tokens: int = 256, concurrency: int = 8, first_seed: int = 0
) -> Findings:
    """Request one answer for each schema. The temperatures alternate."""
    findings = Findings()
    free = asyncio.Semaphore(concurrency)

    async def request(client: httpx.AsyncClient, seed: int) -> None:
        async with free:
            await _request(client, seed, max_tokens, findings)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client, asyncio.TaskGroup() as group:
        for seed in range(first_seed, first_seed + num_schemas):
            group.create_task(request(client, seed))
    return findings


async def _request(client: httpx.AsyncClient, seed: int, max_tokens: int, findings: Findings) -> None:
    schema = random_schema(seed)
    response = await client.post("/v1/chat/completions", json=_body(schema, seed, max_tokens))
    if response.status_code == 400:
        findings.reasons["refused"] += 1
        findings.refusals[response.json()["error"]["message"]] += 1
        return
    response.raise_for_status()
    choice = response.json()["choices"][0]
    findings.reasons[choice["finish_reason"]] += 1
    if choice["finish_reason"] == "stop":
        violation = _violation(choice["message"]["content"], schema)
        if violation is not None:
            findings.violations.append(f"  seed {seed}: {violation}")


def _body(schema: Schema, seed: int, max_tokens: int) -> dict[str, Any]:
    random = Random(seed)
    prompt = " ".join(
        random.choices([*WORDS, "Where", "is", "the", "lamp?", "{", "[1,"], k=random.randrange(1, 30))
    )
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "seed": seed,
        "temperature": TEMPERATURES[seed % len(TEMPERATURES)],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "random", "schema": schema, "strict": True},
        },
    }


def _violation(text: str, schema: Schema) -> str | None:
    """Return why an answer does not satisfy its schema, or None."""
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        checker.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {text[:200]!r}"
    return None
