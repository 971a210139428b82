"""The rules by themselves: promtool's checks and unit tests, their annotations, and the names that they and the dashboards use."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server.metrics.instruments import Instruments
from tests.deploy.deployment import (
    PROMETHEUS,
    ROOT,
    alerts,
    load_yaml,
    names_in,
    panel_queries,
    rule_queries,
    rules,
    scaler_queries,
)


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules rules.yml", "test rules rules.test.yml"]
)
def test_promtool(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    seen: dict[str, set[bool]] = defaultdict(set)
    for case in load_yaml(PROMETHEUS / "rules.test.yml")["tests"]:
        for check in case["alert_rule_test"]:
            seen[check["alertname"]].add(bool(check.get("exp_alerts")))
    assert dict(seen) == {name: {True, False} for name in alerts()}


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_it_is_and_what_to_do(name: str) -> None:
    rule = alerts()[name]
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    path, _, section = annotations["runbook_url"].partition("#")
    assert section == name.lower()
    assert section_of(ROOT / path, name) >= {"What it means", "How to look", "What to do"}


def section_of(path: Path, title: str) -> set[str]:
    """Return the bold words that begin the paragraphs of a section."""
    sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(f"{title}\n")]
    return set(re.findall(r"^\*\*([^*]+?)\.?\*\*", section, flags=re.MULTILINE))


def test_only_names_that_are_exported_are_used() -> None:
    exported = {family.name for family in Instruments(CollectorRegistry(), "").families}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in (*panel_queries(), *rule_queries(), *scaler_queries()):
        assert names_in(query.text) <= exported | recorded, query.place


def test_objectives_are_borders_of_buckets() -> None:
    Instruments(registry := CollectorRegistry(), "m")
    buckets = {
        (sample.name, sample.labels["le"])
        for family in registry.collect()
        for sample in family.samples
        if "le" in sample.labels
    }
    used = {
        pair
        for query in rule_queries()
        for pair in re.findall(r'([a-z_:]+_bucket)\{[^}]*le="([^"]+)"', query.text)
    }
    assert used
    assert used <= buckets
