"""Whatever the chart mentions exists; and this is noticed wherever it does not.

What charts get wrong installs, comes up healthy, and then does not route or scrapes nothing.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.http.table import PROBES
from tests.helm import metrics
from tests.helm.charts import (
    NAMES,
    NAMESPACE,
    Document,
    Render,
    changed,
    documents,
    port_names,
    title,
)
from tests.support.command_line import configured
from tests.support.pairwise import one_in
from worker.errors import UserError

PATHS = {*PROBES, "/api/gcs_healthz", "/api/local_raylet_healthz"}  # the latter are Ray's
# Field of a pod -> what it mentions, and the field below it with the name.
REFERENCES = {
    "secretKeyRef": ("Secret", "name"), "configMapKeyRef": ("ConfigMap", "name"),
    "secretRef": ("Secret", "name"), "configMapRef": ("ConfigMap", "name"),
    "secret": ("Secret", "secretName"), "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}  # fmt: skip
SERVE = "Deployment demo-kvlane-serve"
RULES, WORKERS = "PrometheusRule demo-kvlane", "PodMonitor demo-kvlane-workers"
BOARDS, WAITING = "ConfigMap demo-kvlane-dashboards", "kvlane_requests_waiting"
LABELS = "labels:\n    app.kubernetes.io/component: "
# What changes -> values, title of the object, old text and new.
MUTATIONS = {
    "Service": ("default", "Service demo-kvlane-head", "name: demo-kvlane-head", "name: demo-head"),
    "port": ("default", "StatefulSet demo-kvlane-head", "name: gcs", "name: ray"),
    "port of a probe": ("default", SERVE, "port: http", "port: api"),
    "path of a probe": ("default", SERVE, "path: /ready", "path: /rdy"),
    "label": ("default", SERVE, "io/component: serve", "io/component: router"),
    "Secret": ("default", "Secret demo-kvlane-ray", "name: demo-kvlane-ray", "name: demo-ray"),
    "key of a Secret": ("gpu-rdma", "Secret api-keys", "keys:", "key:"),
    "ConfigMap": ("default", "ConfigMap demo-kvlane", "config.yaml:", "kvlane.yaml:"),
    "claim": ("pvc", "PersistentVolumeClaim models", "name: models", "name: weights"),
    "metric in a KEDA query": (
        "autoscaling", "ScaledObject demo-kvlane-decode", WAITING, "kvlane_num_requests_waiting",
    ),
    "metric of an autoscaler": (
        "autoscaling", "HorizontalPodAutoscaler demo-kvlane-prefill", WAITING, "kvlane_queue",
    ),
    "metric in an alert": ("monitoring", RULES, "cache_usage_ratio", "cache_usage_perc"),
    "label in an alert": ("monitoring", RULES, "outcome!~", "finish!~"),
    "value of a label": ("monitoring", RULES, "worker_lost", "worker_gone"),
    "metric of a dashboard": ("monitoring", BOARDS, "kvlane_kv_pages{", "kvlane_pages{"),
    "label of a dashboard": ("monitoring", BOARDS, "worker_role=", "role_of_worker="),
    "group of a query": ("monitoring", BOARDS, "by (stage)", "by (phase)"),
    "variable of a dashboard": ("monitoring", BOARDS, "label_values(", "label_values(of_"),
    "job in a query": ("autoscaling", WORKERS, "-workers", "-pods"),
    "port of a ServiceMonitor": (
        "monitoring", "ServiceMonitor demo-kvlane", "port: http", "port: web",
    ),
    "labels of a ServiceMonitor": (
        "monitoring", "Service demo-kvlane", f"{LABELS}serve", f"{LABELS}api",
    ),
    "port of a PodMonitor": ("monitoring", WORKERS, "port: metrics", "port: m"),
    "path of the configuration": ("default", SERVE, "decode.num_cpus", "decode.cpus"),
    "value of the configuration": (
        "default", "ConfigMap demo-kvlane", "metrics_port: 9400", "metrics_port: 9401",
    ),
    "option": ("default", SERVE, "--prefill=", "--num-prefill="),
    "labels of a NetworkPolicy": (
        "default", "NetworkPolicy demo-kvlane", "instance: demo", "instance: other",
    ),
    "port of the API's NetworkPolicy": (
        "default", "NetworkPolicy demo-kvlane-api", "port: http", "port: api",
    ),
    "port of the metrics' NetworkPolicy": (
        "monitoring", "NetworkPolicy demo-kvlane-metrics", "port: metrics", "port: m",
    ),
    "file of the certificate": ("edge", "Deployment llm-serve", "-tls/tls.crt", "-cert/tls.crt"),
    "TLS of a probe": ("edge", "Deployment llm-serve", "scheme: HTTPS", "scheme: HTTP"),
    "key of the certificate": ("edge", "Secret llm-tls", "tls.key", "key"),
    "ports of several workers": ("node", WORKERS, "port: metrics-2", "port: metrics-3"),
    "number of these ports": (
        "node", SERVE, "worker_metrics_ports=3", "worker_metrics_ports=2",
    ),
    "Ray's resource of a node": ("node", "Deployment demo-kvlane-node", '"node-', '"pod-'),
    "Ray's resource": ("kuberay", "RayCluster demo-kvlane", '"decode-', '"dec-'),
    "backend of an Ingress": ("edge", "Ingress llm", "name: http", "name: https"),
    "backend of an HTTPRoute": ("edge", "HTTPRoute llm", "port: 80", "port: 8000"),
    "URL of the test": ("edge", "Pod llm-test", "https://llm:80", "https://llm:8000"),
}  # fmt: skip

Mention = tuple[str, str, str, Any]  # title, then kind, name and key of what it mentions
Selection = tuple[str, dict[str, Any], list[Any]]  # title, label selector, ports of those pods


def breaches(render: Render, path: Path) -> list[str]:
    """One line for each thing that is mentioned and is not there; path: a directory to write in."""
    lines = [*undefined(render), *unselected(render), *unserved(render)]
    lines += misconfigured(render, path)
    jobs = {f"{NAMESPACE}/{each['metadata']['name']}" for each in render.kind("PodMonitor")}
    for monitor in render.kind("ServiceMonitor"):
        jobs |= {service["metadata"]["name"] for service in scraped(render, monitor)}
    for document in render.documents:
        for query in metrics.of(document):
            lines += metrics.breaches(query, jobs)
    return lines


def mentions(render: Render) -> Iterator[Mention]:
    """Objects, and keys of these, that others name. A Service's keys are its ports."""
    for owner, _, spec in render.pods:
        if spec["serviceAccountName"] != "default":
            yield owner, "ServiceAccount", spec["serviceAccountName"], None
        for secret in spec.get("imagePullSecrets", []):
            yield owner, "Secret", secret["name"], None
        for field, value in fields(spec):
            if field in REFERENCES:
                kind, name = REFERENCES[field]
                for item in value.get("items", [value]):
                    yield owner, kind, value[name], item.get("key")
            if field == "value" and (url := re.fullmatch(r"https?://([\w-]+):(\d+)", str(value))):
                yield owner, "Service", url[1], int(url[2])
        for address in options(command(spec), "--address"):
            name, _, port = address.rpartition(":")
            yield owner, "Service", name, int(port)
    for document in render.kind("HorizontalPodAutoscaler", "ScaledObject", "Ingress", "HTTPRoute"):
        for field, value in fields(document["spec"]):
            if field == "scaleTargetRef":
                yield title(document), value["kind"], value["name"], None
            elif field == "service":  # of an Ingress
                yield title(document), "Service", value["name"], value["port"]["name"]
            elif field == "tls":
                yield from ((title(document), "Secret", tls["secretName"], None) for tls in value)
            elif field == "backendRefs":
                for backend in value:
                    yield title(document), "Service", backend["name"], backend["port"]


def fields(node: Any) -> Iterator[tuple[str, Any]]:
    """All names below a node, however deep, and their values."""
    if isinstance(node, dict):
        yield from node.items()
        node = list(node.values())
    if isinstance(node, list):
        for below in node:
            yield from fields(below)


def undefined(render: Render) -> Iterator[str]:
    """Mentions of objects or keys that are not in the render, and mounts of no volume."""
    for who, kind, name, key in mentions(render):
        target = render.named(kind, name)
        if target is None or (key is not None and key not in keys(target)):
            yield f"{who}: no {kind} {name} with {key}"
    for owner, _, spec in render.pods:
        workload = render.named("StatefulSet", owner) or {"spec": {}}
        claims = [each["metadata"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {each["name"] for each in (*spec.get("volumes", []), *claims)}
        for container in containers(spec):
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{owner}: volumeMount {mount['name']} has no volume"


def keys(document: Document) -> set[Any]:
    """What may be asked of an object: its data, or a Service's ports by name and number."""
    if document["kind"] == "Service":
        return {port.get(key) for port in document["spec"]["ports"] for key in ("port", "name")}
    return {*document.get("data", {}), *document.get("stringData", {})}


def selections(render: Render) -> Iterator[Selection]:
    """Pods that objects select, and the ports that these have to have."""
    for service in render.kind("Service"):
        ports = [port["targetPort"] for port in service["spec"]["ports"]]
        yield title(service), {"matchLabels": service["spec"]["selector"]}, ports
    for monitor in render.kind("PodMonitor"):
        ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        yield title(monitor), monitor["spec"]["selector"], ports
    for budget in render.kind("PodDisruptionBudget"):
        yield title(budget), budget["spec"]["selector"], []
    for policy in render.kind("NetworkPolicy"):
        rules = policy["spec"].get("ingress", [])
        ports = [port["port"] for rule in rules for port in rule.get("ports", [])]
        yield title(policy), policy["spec"]["podSelector"], ports
        for peer in (peer for rule in rules for peer in rule.get("from", [])):
            if "podSelector" in peer and "namespaceSelector" not in peer:
                yield title(policy), peer["podSelector"], []


def unselected(render: Render) -> Iterator[str]:
    """Selectors that mean no pod, or one without the port; workloads that miss their own pods."""
    for who, selector, ports in selections(render):
        pods = [spec for _, labels, spec in render.pods if matches(selector, labels)]
        if not pods:
            yield f"{who}: no pod has its labels"
        for port in ports:
            if not all(port in port_names(pod) for pod in pods):
                yield f"{who}: its pods have no port {port}"
    for workload in render.kind("Deployment", "StatefulSet"):
        spec = workload["spec"]
        if not matches(spec["selector"], spec["template"]["metadata"]["labels"]):
            yield f"{title(workload)}: its selector does not match its own pods"


def scraped(render: Render, monitor: Document) -> list[Document]:
    selector = monitor["spec"]["selector"]
    return [s for s in render.kind("Service") if matches(selector, s["metadata"]["labels"])]


def unserved(render: Render) -> Iterator[str]:
    """Ports and paths that probes and monitors ask, and nobody serves."""
    for monitor in render.kind("ServiceMonitor"):
        services = scraped(render, monitor)
        for endpoint in monitor["spec"]["endpoints"]:
            known = [endpoint["port"] in keys(service) for service in services]
            if not known or not all(known) or endpoint["path"] not in PROBES:
                yield f"{title(monitor)}: nobody serves {endpoint}"
    for owner, _, spec in render.pods:
        for container in containers(spec):
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for action in ("httpGet", "tcpSocket"):
                    asked = container.get(probe, {}).get(action)
                    path = asked and asked.get("path", "/ready")
                    if asked and (asked["port"] not in ports or path not in PATHS):
                        yield f"{owner}: {probe} asks {asked}, which nobody serves"


def misconfigured(render: Render, path: Path) -> Iterator[str]:
    """Start commands, the configuration and Ray's resources that do not fit each other."""
    offered = {
        name for _, _, spec in render.pods
        for text in options(command(spec), "--resources") for name in json.loads(text)
    }  # fmt: skip
    spec = render.components().get("serve")
    if spec is None:  # its Service says so
        return
    words = command(spec)
    mounts = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    for file in (*options(words, "--config"), *options(words, "--api-key-file")):
        if str(Path(file).parent) not in mounts:
            yield f"serve: {file} is on no volume"
    (name,) = (volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume)
    (file,) = options(words, "--config")
    texts = (render.named("ConfigMap", name) or {"data": {}})["data"]
    (path / "config.yaml").write_text(texts.get(Path(file).name, "no: such file"))
    try:
        config = configured(words[words.index("kvlane") + 1 :], {file: path / "config.yaml"})
    except UserError as error:
        yield f"serve: {error}"
        return
    for role in (config.prefill, config.decode):
        if role.replicas and not offered.issuperset(role.resources):
            yield f"serve asks for Ray's resources {role.resources}, pods offer {offered}"
    for path_of in (config.router.tls_cert_file, config.router.tls_key_file):
        if path_of and str(Path(path_of).parent) not in mounts:
            yield f"serve: {path_of} is on no volume"
    scheme = "HTTPS" if config.router.tls_cert_file else "HTTP"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if spec["containers"][0][probe]["httpGet"]["scheme"] != scheme:
            yield f"serve: {probe} does not speak {scheme}"
    if port_names(spec).get("http") != config.cluster.port:
        yield f"serve: port http is not {config.cluster.port}"
    for other, _, pod in render.pods:
        own = [port for name, port in port_names(pod).items() if name.startswith("metrics")]
        if own not in ([], [*config.cluster.metrics_ports]):
            yield f"{other}: workers' metrics are at {config.cluster.metrics_ports}"


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    expressions = selector.get("matchExpressions", [])
    return equal and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def command(pod: dict[str, Any]) -> list[str]:
    container = pod["containers"][0]
    text = "\n".join(container.get("args", [])).replace("\\\n", "")
    return shlex.split(text) if container["command"][0] == "sh" else list(container["command"])


def options(words: list[str], name: str) -> list[str]:
    return [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_mentioned_is_defined(name: str, tmp_path: Path) -> None:
    assert breaches(Render(documents(name)), tmp_path) == []


@pytest.mark.parametrize("mutation", one_in(8, MUTATIONS))
def test_a_name_that_changes_in_one_place_is_noticed(mutation: str, tmp_path: Path) -> None:
    name, which, old, new = MUTATIONS[mutation]
    wrong = Render(changed(documents(name), which, old, new))
    assert breaches(wrong, tmp_path), f"{which}: {old} became {new}, and nothing was said"
