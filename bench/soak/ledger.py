"""What the clients saw, counted: every request that was sent, how it ended, and what of it the server must have counted too.

A request that was given up may have ended at the server in any way, so it widens what the server's count may be, by one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    REFUSED = "refused"  # 4xx or 503
    FAILED = "failed"  # 500, or a stream that ended with an error
    CANCELLED = "cancelled"  # by the client, which went away


@dataclass(slots=True)
class Ending:
    """What a client knows of one request at its end. `num_sequences` is how many the engine may have been asked for."""

    kind: str
    outcome: Outcome
    status: int | None = None  # None: gone before it came
    num_sequences: int = 0
    max_tokens: int = 0  # of each of them
    finish_reasons: Counter[str] = field(default_factory=Counter)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A count of the server's, and what the clients say it must be: from `least` to `most`."""

    name: str
    found: float
    least: float
    most: float

    @property
    def holds(self) -> bool:
        return self.least <= self.found <= self.most


class Ledger:
    """All requests of all clients."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.by_kind: dict[str, Counter[Outcome]] = {}
        self.statuses: Counter[int] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.num_lines: Counter[str] = Counter()  # of batches, by what the server says became of them
        self._num_untold = 0  # requests whose status nobody saw
        self._num_untold_sequences = 0
        self._num_untold_tokens = 0  # that these may have
        self._num_output_tokens = 0
        self._num_prompt_tokens = 0

    def sent(self) -> None:
        self.num_sent += 1

    def ended(self, ending: Ending) -> None:
        self.outcomes[ending.outcome] += 1
        self.by_kind.setdefault(ending.kind, Counter())[ending.outcome] += 1
        if ending.status is None:
            self._num_untold += 1
        else:
            self.statuses[ending.status] += 1
        if ending.outcome is Outcome.ANSWERED:
            self.finish_reasons += ending.finish_reasons
            self._num_output_tokens += ending.num_output_tokens
            self._num_prompt_tokens += ending.num_prompt_tokens
        elif ending.outcome is not Outcome.REFUSED:
            self.untold_sequences(ending.num_sequences, ending.max_tokens)

    def untold_sequences(self, number: int, max_tokens: int) -> None:
        """So many may have run, to any end."""
        self._num_untold_sequences += number
        self._num_untold_tokens += number * max_tokens

    def counted_line(self, finish_reason: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A line of a batch was answered."""
        self.finish_reasons[finish_reason] += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens

    def checks(self, before: Mapping[str, float], after: Mapping[str, float]) -> list[Check]:
        """Return what must hold between two scrapes of `metrics_of`, taken when nothing was under way."""
        made = defaultdict(float, {name: value - before.get(name, 0.0) for name, value in after.items()})
        checks = [
            Check(
                "requests: answered + refused + failed + cancelled",
                self.outcomes.total(),
                self.num_sent,
                self.num_sent,
            )
        ]
        checks.append(_equal("HTTP requests that the server counted", _sum(made, "http:"), self.num_sent))
        untold = self._num_untold
        for status in sorted(
            {int(name[5:]) for name, value in made.items() if name.startswith("http:") and value}
            | set(self.statuses)
        ):
            known = self.statuses[status]
            checks.append(
                Check(f"HTTP requests with status {status}", made[f"http:{status}"], known, known + untold)
            )
        for reason in ("stop", "length"):
            known = self.finish_reasons[reason]
            checks.append(
                Check(
                    f"sequences that ended with {reason}",
                    made[f"outcome:{reason}"],
                    known,
                    known + self._num_untold_sequences,
                )
            )
        failed = self.outcomes[
            Outcome.FAILED
        ]  # each by a step that failed, not by a fault of the server's own
        checks.append(
            Check(
                "sequences that a failed step ended",
                made["outcome:error"],
                failed,
                self._num_untold_sequences,
            )
        )
        known = self.finish_reasons.total()
        checks.append(
            Check(
                "sequences that ended in any way",
                _sum(made, "outcome:"),
                known,
                known + self._num_untold_sequences,
            )
        )
        tokens, most = self._num_output_tokens, self._num_output_tokens + self._num_untold_tokens
        checks.append(Check("tokens of answers", made["generation_tokens"], tokens, most))
        checks.append(
            Check("tokens of prompts, at least", made["prompt_tokens"], self._num_prompt_tokens, float("inf"))
        )
        checks += [
            _equal(f"lines of batches that were {name}", made[f"lines:{name}"], self.num_lines[name])
            for name in ("completed", "failed")
        ]
        return checks + [_equal(f"{name}, at the end", after[f"held:{name}"], 0) for name in HELD]


HELD = ("running", "waiting", "unfinished", "slots", "scratch")
_GAUGES = {
    "vllm:num_requests_running": "held:running",
    "vllm:num_requests_waiting": "held:waiting",
    "snapserve:sequences_unfinished": "held:unfinished",
    "snapserve:slots_in_use": "held:slots",
    "snapserve:scratch_in_use": "held:scratch",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "process_resident_memory_bytes": "memory",
    "process_open_fds": "files",
}
_OWN = frozenset({"/metrics", "/ready", "/health"})  # who watches is not counted


def metrics_of(exposition: str) -> dict[str, float]:
    """Return the counts of a scrape that a ledger can be held against, by short names."""
    from prometheus_client.parser import text_string_to_metric_families

    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            match sample.name:
                case "http_requests_total" if sample.labels["handler"] not in _OWN:
                    found[f"http:{sample.labels['status']}"] += sample.value
                case "snapserve:requests_total":
                    found[f"outcome:{sample.labels['outcome']}"] += sample.value
                case "snapserve:batch_lines_total":
                    found[f"lines:{sample.labels['outcome']}"] += sample.value
                case name if name in _GAUGES:
                    found[_GAUGES[name]] += sample.value
    return dict(found)


def _equal(name: str, found: float, expected: float) -> Check:
    return Check(name, found, expected, expected)


def _sum(counts: Mapping[str, float], prefix: str) -> float:
    return sum(value for name, value in counts.items() if name.startswith(prefix))
