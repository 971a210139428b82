"""The files under `deploy/`: their rules, dashboards and queries."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
KUBERNETES = DEPLOY / "kubernetes"


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    """Return every rule, recording and alerting."""
    return [rule for group in load_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def load_dashboard(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


@dataclass(frozen=True)
class Query:
    """A query, and the panel, rule or trigger that has it."""

    place: str
    text: str


def panel_queries() -> Iterator[Query]:
    for path in DASHBOARDS:
        for panel in load_dashboard(path)["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def scaler_queries() -> Iterator[Query]:
    for document in manifests("autoscaling/scaledobject.yaml"):
        for trigger in document["spec"]["triggers"]:
            yield Query(f"autoscaling {trigger['metadata'].get('threshold')}", trigger["metadata"]["query"])


def manifests(name: str) -> list[dict[str, Any]]:
    return [
        document for document in yaml.safe_load_all((KUBERNETES / name).read_text()) if document is not None
    ]


def names_in(query: str) -> set[str]:
    """Return the exported metrics that a query names, without the endings of histograms."""
    names = set(re.findall(r"\b(?:(?:vllm|snapserve):[a-z_0-9:]+|http_[a-z_]+)", query))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
