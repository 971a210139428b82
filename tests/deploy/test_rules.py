"""The alert rules: promtool's checks and unit tests, annotations, and the metrics that queries name."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server.metrics.instruments import Instruments
from tests.deploy.deployment import (
    PROMETHEUS,
    alerts,
    load_yaml,
    names_in,
    panel_queries,
    rule_queries,
    rules,
    scaler_queries,
)
from tests.paths import ROOT


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "command",
    [
        "check config prometheus.yml",
        "check rules rules.yml",
        pytest.param("test rules rules.test.yml", marks=pytest.mark.long),
    ],
)
def test_promtool_accepts_the_rules(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    seen: dict[str, set[bool]] = defaultdict(set)
    for case in load_yaml(PROMETHEUS / "rules.test.yml")["tests"]:
        for check in case["alert_rule_test"]:
            seen[check["alertname"]].add(bool(check.get("exp_alerts")))
    assert dict(seen) == {name: {True, False} for name in alerts()}


@pytest.mark.parametrize("name", alerts())
def test_alert_has_a_description_and_a_runbook_section(name: str) -> None:
    rule = alerts()[name]
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    path, _, section = annotations["runbook_url"].partition("#")
    assert section == name.lower()
    assert section_of(ROOT / path, name) >= {"What it means", "How to look", "What to do"}


def section_of(path: Path, title: str) -> set[str]:
    """Return the bold words at the start of a section's paragraphs."""
    sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(f"{title}\n")]
    return set(re.findall(r"^\*\*([^*]+?)\.?\*\*", section, flags=re.MULTILINE))


def test_queries_name_exported_metrics_only() -> None:
    exported = {family.name for family in Instruments(CollectorRegistry(), "").families}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in (*panel_queries(), *rule_queries(), *scaler_queries()):
        assert names_in(query.text) <= exported | recorded, query.place


def test_objectives_are_bucket_boundaries() -> None:
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
