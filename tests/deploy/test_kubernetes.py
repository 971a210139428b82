"""The manifests agree with the server and with each other: probes, drain time, options, labels and ports.

Their validity as Kubernetes objects is left to the cluster's own tools.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from backends.clock import WallClock
from backends.fake import FakeBackend
from scheduler.config import SchedulerConfig
from server.app import OPEN_PATHS, create_app
from server.engine import async_engine
from server.engine.async_engine import AsyncEngine
from server.grammar.compiler import Grammars
from server.metrics.metrics import Metrics
from server.options.command_line import options_of
from server.options.serve import serve_groups
from server.options.settings import ServerSettings, StorageLimits
from server.process import CLOSING_TIME
from server.services import Services
from server.state.memory import MemoryState
from server.text.renderer import Renderer
from tests.deploy.deployment import KUBERNETES, PROMETHEUS, load_yaml, manifests
from tests.paths import ROOT
from tests.server.options.test_config import config_of

OPTIONS = {option.variable: option for group in serve_groups() for option in options_of(group)}
FOLDERS = ("base", "gpu", "batches", "replicas", "inference-gateway", "monitoring", "autoscaling")
NO_MANIFESTS = {"kustomization.yaml", "values.yaml"}


def deployment() -> Any:
    (document,) = manifests("base/deployment.yaml")
    return document


def pod() -> Any:
    return deployment()["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def literals(folder: str) -> dict[str, str]:
    (generator,) = load_yaml(KUBERNETES / folder / "kustomization.yaml")["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generator["literals"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_kustomizations_name_existing_files(folder: str) -> None:
    kustomization = load_yaml(KUBERNETES / folder / "kustomization.yaml")
    for resource in kustomization["resources"]:
        assert (KUBERNETES / folder / resource).exists()
    listed = {resource for resource in kustomization["resources"] if resource.endswith(".yaml")}
    assert listed == {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - NO_MANIFESTS


def labelled_and_selected() -> Iterator[tuple[str, Any]]:
    yield "deployment", deployment()["spec"]["selector"]["matchLabels"]
    yield "service", manifests("base/service.yaml")[0]["spec"]["selector"]
    yield (
        "disruption budget",
        manifests("base/poddisruptionbudget.yaml")[0]["spec"]["selector"]["matchLabels"],
    )
    yield "network policy", manifests("base/networkpolicy.yaml")[0]["spec"]["podSelector"]["matchLabels"]
    for constraint in pod()["topologySpreadConstraints"]:
        yield constraint["topologyKey"], constraint["labelSelector"]["matchLabels"]
    values = load_yaml(KUBERNETES / "inference-gateway" / "values.yaml")
    yield "inference pool", values["inferencePool"]["modelServers"]["matchLabels"]
    yield "pod monitor", manifests("monitoring/podmonitor.yaml")[0]["spec"]["selector"]["matchLabels"]


def test_selectors_match_the_labels_of_the_pods() -> None:
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    for name, selector in labelled_and_selected():
        assert selector == labels, name


def test_ports_match() -> None:
    ports = {port["name"]: str(port["containerPort"]) for port in container()["ports"]}
    set_by = {variable["name"]: variable.get("value") for variable in container()["env"]}
    assert ports == {"http": set_by["SNAPSERVE_PORT"], "admin": set_by["SNAPSERVE_ADMIN_PORT"]}
    (served,) = manifests("base/service.yaml")[0]["spec"]["ports"]
    (scraped,) = manifests("monitoring/podmonitor.yaml")[0]["spec"]["podMetricsEndpoints"]
    probed = {
        container()[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert served["targetPort"] == "http"
    assert {scraped["port"]} | probed == {"admin"}
    clients, prometheus = manifests("base/networkpolicy.yaml")[0]["spec"]["ingress"]
    assert [clients["ports"], prometheus["ports"]] == [[{"port": "http"}], [{"port": "admin"}]]
    values = load_yaml(KUBERNETES / "inference-gateway" / "values.yaml")
    assert [str(port["number"]) for port in values["inferencePool"]["targetPorts"]] == [ports["http"]]


def test_no_pod_starts_without_its_key() -> None:
    (key,) = (variable for variable in container()["env"] if variable["name"] == "SNAPSERVE_API_KEY")
    assert "optional" not in key["valueFrom"]["secretKeyRef"]


@pytest.mark.parametrize(("folder", "mode"), [("batches", "ReadWriteOnce"), ("replicas", "ReadWriteMany")])
def test_a_volume_of_batches_is_mounted_where_they_are_kept(folder: str, mode: str) -> None:
    (claim,) = manifests(f"{folder}/volume.yaml")
    assert claim["spec"]["accessModes"] == [mode]
    (patch,) = load_yaml(KUBERNETES / folder / "kustomization.yaml")["patches"]
    changes = {change["path"]: change["value"] for change in yaml.safe_load(patch["patch"])}
    volume = changes["/spec/template/spec/volumes/-"]
    mount = changes["/spec/template/spec/containers/0/volumeMounts/-"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], literals(folder)["SNAPSERVE_BATCH_DIR"])
    # A volume of one node lets no new pod start beside the old one.
    assert (changes.get("/spec/strategy") == {"type": "Recreate"}) == (mode == "ReadWriteOnce")


def test_replicas_reach_their_redis() -> None:
    redis, service = manifests("replicas/redis.yaml")
    (port,) = service["spec"]["ports"]
    name, number = service["metadata"]["name"], port["port"]
    assert literals("replicas")["SNAPSERVE_STATE_URL"] == f"redis://{name}:{number}/0"
    labels = redis["spec"]["template"]["metadata"]["labels"]
    guarded, opened = manifests("replicas/networkpolicy.yaml")
    assert service["spec"]["selector"] == guarded["spec"]["podSelector"]["matchLabels"] == labels
    assert opened["spec"]["egress"][0]["to"][0]["podSelector"]["matchLabels"] == labels
    ours = deployment()["spec"]["template"]["metadata"]["labels"]
    assert guarded["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == ours


def test_the_gateway_routes_to_the_pool_of_the_chart() -> None:
    (route,) = manifests("inference-gateway/httproute.yaml")
    (rule,) = route["spec"]["rules"]
    assert [backend["kind"] for backend in rule["backendRefs"]] == ["InferencePool"]
    extension = load_yaml(KUBERNETES / "inference-gateway" / "values.yaml")["inferenceExtension"]
    config = yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])
    plugins = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} == plugins


def test_probes_use_the_right_open_paths() -> None:
    paths = {
        probe: container()[f"{probe}Probe"]["httpGet"]["path"]
        for probe in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= OPEN_PATHS, "a probe has no API key"


async def test_draining_pod_is_alive_and_not_ready() -> None:
    metrics = Metrics("m")
    engine = AsyncEngine(FakeBackend, SchedulerConfig(), metrics, WallClock(), stall_limit=60)
    renderer = Renderer()
    app = create_app(
        Services(
            engine,
            renderer,
            Grammars(renderer),
            ServerSettings(("m",), created=0),
            metrics,
            MemoryState(StorageLimits()),
        )
    )
    engine.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as kubelet:

        async def probed() -> tuple[int, int]:
            paths = (container()[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
            ready, alive = await asyncio.gather(*(kubelet.get(path) for path in paths))
            return ready.status_code, alive.status_code

        await engine.wait_loaded()
        assert await probed() == (200, 200)
        await engine.drain(1)
        assert await probed() == (503, 200)
    await engine.close()


def test_grace_period_is_longer_than_the_drain_timeout() -> None:
    command, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain = OPTIONS["SNAPSERVE_DRAIN_TIMEOUT"].field.default
    assert (
        pod()["terminationGracePeriodSeconds"]
        > int(seconds) + drain + CLOSING_TIME + async_engine.CLOSING_TIME
    )


def test_options_exist_and_kubernetes_does_not_set_others() -> None:
    names = (
        {variable["name"] for variable in container()["env"]}
        | set(literals("base"))
        | set(literals("gpu"))
        | set(literals("replicas"))
    )
    assert names <= set(OPTIONS)
    assert pod()["enableServiceLinks"] is False, "a Service named snapserve would set SNAPSERVE_PORT"
    for layer in ("base", "gpu", "batches", "replicas"):
        config_of(**literals(layer))  # raises OptionError for an invalid value


def test_pod_has_no_privileges_it_does_not_need() -> None:
    security = pod()["securityContext"] | container()["securityContext"]
    assert security == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert "USER 10001:10001" in (ROOT / "Dockerfile").read_text()
    assert {mount["mountPath"] for mount in container()["volumeMounts"]} == {"/cache", "/tmp"}
    assert {mount["name"] for mount in container()["volumeMounts"]} == {
        volume["name"] for volume in pod()["volumes"]
    }


def test_monitored_pods_have_the_job_of_the_rules() -> None:
    (monitor,) = manifests("monitoring/podmonitor.yaml")
    assert deployment()["spec"]["template"]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "snapserve"
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    assert scraped["path"] == "/metrics"


def test_autoscaler_follows_slots_and_queue() -> None:
    (scaler,) = manifests("autoscaling/scaledobject.yaml")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]
    assert "replicas" not in deployment()["spec"], "applying the deployment would undo the scaling"
    slots, queue = (trigger["metadata"] for trigger in scaler["spec"]["triggers"])
    for trigger in (slots, queue):
        assert 'namespace="' in trigger["query"], "another namespace's load would scale this one"
        assert 'model_name="' in trigger["query"]
    assert "snapserve:slots_in_use" in slots["query"]
    assert "vllm:num_requests_waiting" in queue["query"]
    assert float(slots["threshold"]) == 0.75 * int(literals("base")["SNAPSERVE_NUM_SLOTS"])


def test_operator_gets_the_rules_of_prometheus() -> None:
    printed = subprocess.run(
        [KUBERNETES / "monitoring" / "prometheusrule"], capture_output=True, text=True, check=True
    ).stdout
    document = yaml.safe_load(printed)
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert document["spec"] == load_yaml(PROMETHEUS / "rules.yml")
