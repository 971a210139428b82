"""The options about who is served when, and the scheduler's configuration that they make."""

import math
from collections.abc import Mapping
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.waiting import QueueOrder
from server.options.option import Option, OptionGroup, choices, integer, one_of, seconds

_SCHEDULER = SchedulerConfig()

SCHEDULING = OptionGroup(
    "Scheduling",
    (
        Option(
            "scheduling-order",
            one_of(QueueOrder),
            _SCHEDULER.order,
            "Who is admitted first: fair is by what each API key was given, and first come, first served within each.",
            choices(QueueOrder),
        ),
        Option(
            "max-num-waiting",
            integer(0),
            _SCHEDULER.max_num_waiting,
            "Sequences that may wait for a slot; more get a 429.",
            "N",
        ),
        Option(
            "max-num-waiting-per-key",
            integer(0),
            None,
            "Sequences of one API key that may wait beyond as many as there are slots; more get a 429.",
            "N",
            "half of --max-num-waiting when there are several keys, otherwise all",
        ),
        Option("queue-timeout", seconds, None, "Longest wait for a slot.", "SECONDS", "none"),
        Option("request-timeout", seconds, None, "Longest time for a whole request.", "SECONDS", "none"),
        Option(
            "max-inter-token-latency",
            seconds,
            _SCHEDULER.max_inter_token_latency,
            "Target for the time between two tokens while prompts are being read. "
            "A longer one reads them sooner, and gives more tokens a second in all.",
            "SECONDS",
        ),
        Option(
            "max-decode-steps",
            integer(1),
            _SCHEDULER.max_decode_steps,
            "Most decode steps of one launch, if nobody waits.",
            "N",
        ),
    ),
)


def scheduler_config_of(values: Mapping[str, Any], num_keys: int) -> SchedulerConfig:
    """Return the configuration for a server of so many API keys. Raises ValueError."""
    return SchedulerConfig(
        order=values["scheduling_order"],
        max_num_waiting=values["max_num_waiting"],
        max_num_waiting_per_tenant=_share(values, num_keys),
        max_inter_token_latency=values["max_inter_token_latency"],
        max_decode_steps=values["max_decode_steps"],
        max_background_slots=values["batch_concurrency"],
        reports_slots=values["enable_slots"],
    )


def _share(values: Mapping[str, Any], num_keys: int) -> int | None:
    """Return how many places of the queue one key may take: no key may keep the others out."""
    given: int | None = values["max_num_waiting_per_key"]
    return math.ceil(values["max_num_waiting"] / 2) if given is None and num_keys > 1 else given
