"""The dashboards by themselves: what Grafana would stumble over, and what it is provisioned with."""

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
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cells.setdefault(cell, panel["id"]) == panel["id"], (
                f"{panel['title']} lies over another panel"
            )
    ids = [panel["id"] for panel in panels(path)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_and_asks_the_chosen_source(path: Path) -> None:
    for panel in panels(path):
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables(path: Path) -> None:
    assert {variable["name"] for variable in load_dashboard(path)["templating"]["list"]} == VARIABLES


def test_grafana_finds_what_is_mounted() -> None:
    grafana = load_yaml(DEPLOY / "docker-compose.yml")["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    at = {inside: DEPLOY / outside for outside, inside in mounts.items() if outside.startswith(".")}
    (provider,) = load_yaml(at["/etc/grafana/provisioning"] / "dashboards" / "snapserve.yml")["providers"]
    assert sorted(at[provider["options"]["path"]].glob("*.json")) == DASHBOARDS
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (at[str(home.parent)] / home.name) in DASHBOARDS
    (source,) = load_yaml(at["/etc/grafana/provisioning"] / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert (
        source["jsonData"]["timeInterval"]
        == load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    )
