"""The dashboards as Grafana loads them: grid, sources, variables and provisioning."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deployment import DASHBOARDS, DEPLOY, load_dashboard, load_yaml

VARIABLES = {"datasource", "model_name", "instance"}


def panels(path: Path) -> list[dict[str, Any]]:
    return list(load_dashboard(path)["panels"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_neither_overlap_nor_leave_the_grid(path: Path) -> None:
    cells: dict[tuple[int, int], int] = {}
    for panel in panels(path):
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        for cell in (
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        ):
            assert cells.setdefault(cell, panel["id"]) == panel["id"], (
                f"{panel['title']} overlaps another panel"
            )
    ids = [panel["id"] for panel in panels(path)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_a_description_and_uses_the_chosen_source(path: Path) -> None:
    for panel in panels(path):
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_have_the_same_variables(path: Path) -> None:
    assert {variable["name"] for variable in load_dashboard(path)["templating"]["list"]} == VARIABLES


def test_grafana_is_provisioned_with_the_mounted_files() -> None:
    grafana = load_yaml(DEPLOY / "docker-compose.yml")["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    mounted = {inside: DEPLOY / outside for outside, inside in mounts.items() if outside.startswith(".")}
    (provider,) = load_yaml(mounted["/etc/grafana/provisioning"] / "dashboards" / "snapserve.yml")[
        "providers"
    ]
    assert sorted(mounted[provider["options"]["path"]].glob("*.json")) == DASHBOARDS
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name) in DASHBOARDS
    (source,) = load_yaml(mounted["/etc/grafana/provisioning"] / "datasources" / "prometheus.yml")[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert (
        source["jsonData"]["timeInterval"]
        == load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    )
