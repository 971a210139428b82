"""A real Prometheus over running servers: every query has data, and each fault fires its alerts."""

import math
import re
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from server.metrics.instruments import Instruments
from tests.deploy.conftest import Scene
from tests.deploy.deployment import Query, alerts, panel_queries, rule_queries, scaler_queries
from tests.deploy.prometheus import RATE_INTERVAL, sped_up

pytestmark = [pytest.mark.prometheus, pytest.mark.long]

LIMIT = 60.0  # seconds for an alert to fire, on a machine that is busy with other things
MUST_BE_EMPTY = set(alerts())  # for the healthy server

FIRING = {
    "healthy": set[str](),
    "overloaded": {
        "SnapserveQueueWait",
        "SnapserveSlotsExhausted",
        "SnapserveRejections",
        "SnapserveTtftBurnFast",
        "SnapserveTpotBurnFast",
    },
    "failing": {"SnapserveHttpErrors", "SnapserveFailedSequences"},
    "hanging": {"SnapserveStuck", "SnapserveUnhealthy", "SnapserveNotReady"},
    "gone": {"SnapserveDown"},
}
MAY_FIRE = {"overloaded": {"SnapserveTtftBurnSlow", "SnapserveTpotBurnSlow"}}  # a little later


def vllm_queries() -> Iterator[Query]:
    """Yield queries as vLLM's published dashboards have them, for each of its metrics that we have.

    They select by the name and `model_name` alone.
    """
    for family in Instruments(CollectorRegistry(), "").families:
        name, own = family.name, '{model_name="$model_name"}'
        if not name.startswith("vllm:"):
            continue
        if family.kind == "histogram":
            buckets = f"{name}_bucket{own}[$__rate_interval]"
            yield Query(f"{name} p99", f"histogram_quantile(0.99, sum by(le) (rate({buckets})))")
            yield Query(f"{name} heat map", f"sum by(le) (increase({buckets}))")
            yield Query(
                f"{name} mean",
                f"rate({name}_sum{own}[$__rate_interval])\n/\nrate({name}_count{own}[$__rate_interval])",
            )
        elif family.kind == "counter":
            yield Query(name, f"rate({name}{own}[$__rate_interval])")
        else:
            yield Query(name, f"{name}{own}")
    yield Query(
        "finish reasons",
        "sum by(finished_reason) (increase("
        'vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
    )


QUERIES = {
    query.place: query.text
    for query in (*panel_queries(), *rule_queries(), *scaler_queries(), *vllm_queries())
}


def filled_in(scene: Scene, text: str) -> str:
    """Return a query about the healthy server, as Grafana would send it."""
    instance = re.escape(scene.servers["healthy"].url.removeprefix("http://")).replace("\\", "\\\\")
    values = {
        "$__rate_interval": RATE_INTERVAL,
        "$model_name": "healthy",
        "$instance": instance,
        # What an operator sets in the autoscaler's queries.
        'namespace="default"': 'namespace="healthy"',
        'model_name="SmolLM2-135M-Instruct"': 'model_name="healthy"',
    }
    text = sped_up(text)
    for name, value in values.items():
        text = text.replace(name, value)
    assert "$" not in text, f"unknown variable in {text}"
    return text


@pytest.mark.parametrize("place", QUERIES)
def test_query_has_data(scene: Scene, place: str) -> None:
    query = filled_in(scene, QUERIES[place])
    if place in MUST_BE_EMPTY:
        assert [
            labels for labels, _ in scene.prometheus.query(query) if labels.get("namespace") == "healthy"
        ] == []
        return
    end = time.monotonic() + LIMIT
    while not [value for _, value in scene.prometheus.query(query) if not math.isnan(value)]:
        assert time.monotonic() < end, f"no data: {query}"
        time.sleep(0.25)


def test_stuck_engine_fires_while_it_still_reports_ready(scene: Scene) -> None:
    scene.prometheus.wait_until_firing("hanging", {"SnapserveStuck"}, LIMIT)
    firing = 'ALERTS{alertname="SnapserveStuck",alertstate="firing"}'
    both = f'{firing} and on (instance) snapserve:health{{state="ready"}} == 1'
    # The alert is reported before its sample is stored, and a subquery has a step each 500 ms only.
    end = time.monotonic() + LIMIT
    while not scene.prometheus.query(f"max_over_time(({both})[10m:500ms])"):
        assert time.monotonic() < end, "SnapserveStuck never fired while /health reported ready"
        time.sleep(0.25)


@pytest.mark.parametrize("fault", FIRING)
def test_each_fault_fires_its_alerts_only(scene: Scene, fault: str) -> None:
    firing = scene.prometheus.wait_until_firing(fault, FIRING[fault], LIMIT)
    assert firing <= FIRING[fault] | MAY_FIRE.get(fault, set())


def test_every_alert_is_driven_or_listed() -> None:
    driven = set().union(*FIRING.values(), *MAY_FIRE.values())
    assert set(alerts()) - driven == {
        "SnapserveBatchDisk",
        "SnapserveBatchesStuck",
        "SnapserveConnectionsRefused",
        "SnapserveFileDescriptors",
        "SnapserveMemory",
        "SnapserveNoTargets",
        "SnapserveNotCompiled",
        "SnapserveReplicaNotReady",
    }  # promtool's tests drive them
