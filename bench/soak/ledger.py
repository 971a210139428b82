"""The counts of all clients: every request sent, how it ended, and the counts that the server must have.

A cancelled request may have ended in any way at the server, so it widens the allowed range of a count by one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.soak.traffic import MAX_TOKENS


class Outcome(StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    REFUSED = "refused"  # 4xx or 503
    FAILED = "failed"  # 500, or a stream that ended with an error
    CANCELLED = "cancelled"  # by the client
    LOST = "lost"  # its server was killed, or had not started again


@dataclass(slots=True)
class Ending:
    """What a client knows of a request at its end. It may have cost the engine `num_sequences` sequences."""

    kind: str
    outcome: Outcome
    status: int | None = None  # None: cancelled or lost before it arrived
    num_sequences: int = 0
    max_tokens: int = 0  # of each sequence
    finish_reasons: Counter[str] = field(default_factory=Counter)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    has_arrived: bool = True  # False: there was no server to connect to
    key: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A count of the server, and its allowed range by the clients' counts: `least` to `most`."""

    name: str
    found: float
    least: float
    most: float

    @property
    def holds(self) -> bool:
        return self.least <= self.found <= self.most


class Ledger:
    """The counts of all requests of all clients."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.by_kind: dict[str, Counter[Outcome]] = {}
        self.statuses: Counter[int] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.answered_by_key: Counter[str] = Counter()
        self.num_batches: Counter[str] = Counter()  # by the status in which they ended
        self.num_lines: Counter[str] = Counter()  # of batches, by outcome
        # What must not happen: lines of batches `lost`, `doubled` or `miscounted`, responses `missing` or
        # `endless`, and requests `broken off` by a server that lives.
        self.faults: Counter[str] = Counter()
        self._num_unreached = 0  # requests that no server has received
        self._num_unseen = 0  # requests whose status no client received
        self.num_uncertain_sequences = 0  # sequences whose end no client received
        self._num_uncertain_tokens = 0  # the most tokens of these sequences
        self._num_output_tokens = 0
        self._num_prompt_tokens = 0

    def sent(self) -> None:
        self.num_sent += 1

    def ended(self, ending: Ending) -> None:
        self.outcomes[ending.outcome] += 1
        self.by_kind.setdefault(ending.kind, Counter())[ending.outcome] += 1
        if not ending.has_arrived:
            self._num_unreached += 1
        elif ending.status is None:
            self._num_unseen += 1
        else:
            self.statuses[ending.status] += 1
        if ending.outcome is Outcome.ANSWERED:
            self.answered_by_key[ending.key] += 1
            self.finish_reasons += ending.finish_reasons
            self._num_output_tokens += ending.num_output_tokens
            self._num_prompt_tokens += ending.num_prompt_tokens
        elif ending.outcome is not Outcome.REFUSED and ending.has_arrived:
            self.uncertain_sequences(ending.num_sequences, ending.max_tokens)

    def uncertain_sequences(self, count: int, max_tokens: int) -> None:
        """Count sequences that may have run to any end."""
        self.num_uncertain_sequences += count
        self._num_uncertain_tokens += count * max_tokens

    def ended_batch(
        self, batch: Mapping[str, Any], answers: Mapping[str, Sequence[Mapping[str, Any]]], ids: Set[str]
    ) -> None:
        """Count a batch that has ended, with the lines of its files. `ids` are those of its input."""
        answered = Counter(answer["custom_id"] for lines in answers.values() for answer in lines)
        num_lines = Counter({outcome: len(lines) for outcome, lines in answers.items()})
        counts = batch["request_counts"]
        self.num_batches[batch["status"]] += 1
        self.num_lines += num_lines
        self.faults["doubled"] += answered.total() - len(answered)
        self.faults["miscounted"] += any(counts[outcome] != num_lines[outcome] for outcome in answers)
        if batch["status"] != "cancelled":
            self.faults["lost"] += len(ids - answered.keys())
        for answer in answers["completed"]:
            body = answer["response"]["body"]
            (choice,) = body["choices"]
            self.finish_reasons[choice["finish_reason"]] += 1
            self._num_prompt_tokens += body["usage"]["prompt_tokens"]
            self._num_output_tokens += body["usage"]["completion_tokens"]
        self.uncertain_sequences(len(ids) - num_lines["completed"], MAX_TOKENS)

    def checks(
        self,
        before: Mapping[str, float],
        after: Mapping[str, float],
        num_sequences: int = 0,
    ) -> list[Check]:
        """Return the checks of two results of `metrics_of`, between which all requests started and ended.

        Of the lines of batches, the server may have run `num_sequences` that this ledger does not have.
        """
        change = defaultdict(float, {name: value - before.get(name, 0.0) for name, value in after.items()})
        most_tokens = self._num_output_tokens + self._num_uncertain_tokens + num_sequences * MAX_TOKENS
        stored = after.get("stored_bytes", 0.0)
        return [
            *self._status_checks(change),
            *self._sequence_checks(change, self.num_uncertain_sequences + num_sequences),
            Check("tokens of answers", change["generation_tokens"], self._num_output_tokens, most_tokens),
            Check("tokens of prompts, at least", change["prompt_tokens"], self._num_prompt_tokens, math.inf),
            Check("prompt tokens restored", change["restored"], 0, change["looked_up"]),
            Check("bytes of stored prompts", stored, 0, after.get("stored_capacity", 0.0)),
            *(_equal(f"{name}, at the end", after[f"held:{name}"], 0) for name in HELD),
        ]

    def _status_checks(self, change: Mapping[str, float]) -> list[Check]:
        num_arrived = self.num_sent - self._num_unreached
        seen = {int(name[5:]) for name, value in change.items() if name.startswith("http:") and value}
        return [
            _equal("HTTP requests that the server counted", _sum(change, "http:"), num_arrived),
            *(
                Check(
                    f"HTTP requests with status {status}",
                    change[f"http:{status}"],
                    self.statuses[status],
                    self.statuses[status] + self._num_unseen,
                )
                for status in sorted(seen | set(self.statuses))
            ),
        ]

    def _sequence_checks(self, change: Mapping[str, float], num_uncertain: int) -> list[Check]:
        """Return the checks of how sequences ended, `num_uncertain` of them in any way."""
        # Each failed request must be due to a failed step, not to an error of the server.
        failed = self.outcomes[Outcome.FAILED]
        known = self.finish_reasons
        ended = {
            f"sequences that ended with {reason}": (change[f"outcome:{reason}"], known[reason])
            for reason in ("stop", "length")
        }
        every = known.total()
        return [
            *(Check(name, found, least, least + num_uncertain) for name, (found, least) in ended.items()),
            Check("sequences that a failed step ended", change["outcome:error"], failed, num_uncertain),
            Check("sequences that ended in any way", _sum(change, "outcome:"), every, every + num_uncertain),
        ]

    def sum_check(self) -> Check:
        name = "requests: answered + refused + failed + cancelled + lost"
        return _equal(name, self.outcomes.total(), self.num_sent)

    def fault_checks(self) -> list[Check]:
        """Return the checks that nothing happened which must not."""
        return [_equal(name, self.faults[fault], 0) for fault, name in FAULTS.items()]

    def line_checks(self, before: Mapping[str, float], after: Mapping[str, float]) -> list[Check]:
        """Return the checks of a server that alone has answered all lines of batches."""
        return [
            _equal(
                f"lines of batches that were {name}",
                after.get(f"lines:{name}", 0.0) - before.get(f"lines:{name}", 0.0),
                self.num_lines[name],
            )
            for name in ("completed", "failed")
        ]

    def add(self, other: "Ledger") -> None:
        """Add the counts of what clients saw, not those of uncertain ends."""
        self.num_sent += other.num_sent
        self.outcomes += other.outcomes
        self.statuses += other.statuses
        self.answered_by_key += other.answered_by_key
        self.num_batches += other.num_batches
        self.num_lines += other.num_lines
        self.faults += other.faults
        for kind, outcomes in other.by_kind.items():
            self.by_kind.setdefault(kind, Counter()).update(outcomes)


FAULTS = {
    "lost": "lines of ended batches without an answer",
    "doubled": "lines of batches with two answers",
    "miscounted": "batches whose counts are not those of their files",
    "unfinished": "batches that did not end",
    "missing": "stored responses that another request did not find",
    "endless": "background responses that did not end",
    "broken": "requests that broke off though their server lived",
}

HELD = ("running", "waiting", "unfinished", "slots", "scratch")
_GAUGES = {
    "vllm:num_requests_running": "held:running",
    "vllm:num_requests_waiting": "held:waiting",
    "snapserve:sequences_unfinished": "held:unfinished",
    "snapserve:slots_in_use": "held:slots",
    "snapserve:scratch_in_use": "held:scratch",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_queries_total": "looked_up",
    "vllm:prefix_cache_hits_total": "restored",
    "snapserve:prefix_cache_bytes": "stored_bytes",
    "snapserve:prefix_cache_capacity_bytes": "stored_capacity",
    "process_resident_memory_bytes": "memory",
    "process_open_fds": "files",
}
_OWN = frozenset({"/metrics", "/ready", "/health"})  # requests of the observer are not counted


def metrics_of(exposition: str) -> dict[str, float]:
    """Return the counts of a scrape that a ledger checks, by short names."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            match sample.name:
                case "http_requests_total" if sample.labels["handler"] not in _OWN:
                    counts[f"http:{sample.labels['status']}"] += sample.value
                case "snapserve:requests_total":
                    counts[f"outcome:{sample.labels['outcome']}"] += sample.value
                case "snapserve:batch_lines_total":
                    counts[f"lines:{sample.labels['outcome']}"] += sample.value
                case name if name in _GAUGES:
                    counts[_GAUGES[name]] += sample.value
    return dict(counts)


def _equal(name: str, found: float, expected: float) -> Check:
    return Check(name, found, expected, expected)


def _sum(counts: Mapping[str, float], prefix: str) -> float:
    return sum(value for name, value in counts.items() if name.startswith(prefix))
