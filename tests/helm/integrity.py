"""Referential integrity of a render: whatever an object mentions is defined in the same render.

Services, ports, labels, Secrets, ConfigMaps, claims, metrics, options and paths of the
configuration, Ray's resources. What charts get wrong installs, comes up healthy, and then does not
route or scrapes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from cluster import cli
from cluster.config import load
from router.http.exchange import PROBES
from tests.helm import metrics
from tests.helm.charts import NAMESPACE, Document
from worker.errors import UserError

RAY_PATHS = ("/api/gcs_healthz", "/api/local_raylet_healthz")


class Render:
    """The objects of one render, and what is wrong with them."""

    def __init__(
        self, documents: list[Document], names: dict[str, frozenset[str]] | None = None
    ) -> None:
        self.documents = documents
        self.names = metrics.exported() if names is None else names
        self.pods = list(self._pods())  # (owner, labels, pod spec)

    def breaches(self) -> list[str]:
        """One line each; none if all is well."""
        checks = (
            self._selectors, self._pod_references, self._services, self._monitors, self._policies,
            self._targets, self._edges, self._queries, self._commands,
        )  # fmt: skip
        return [breach for check in checks for breach in check()]

    def kind(self, *kinds: str) -> Iterator[Document]:
        """Objects of these kinds."""
        return (each for each in self.documents if each["kind"] in kinds)

    def named(self, kind: str, name: str) -> Document | None:
        """The object of a kind and name, if there is one."""
        return next((d for d in self.kind(kind) if d["metadata"]["name"] == name), None)

    def selected(self, selector: dict[str, Any]) -> list[dict[str, Any]]:
        """Specs of the pods that a label selector means."""
        return [spec for _, labels, spec in self.pods if matches(selector, labels)]

    def _pods(self) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
        for document in self.documents:
            spec, name = document.get("spec") or {}, document["metadata"]["name"]
            if document["kind"] == "Pod":
                yield name, document["metadata"]["labels"], spec
            templates = [spec["template"]] if "template" in spec else []
            if document["kind"] == "RayCluster":
                groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
                templates = [group["template"] for group in groups]
            for template in templates:
                yield name, template["metadata"]["labels"], template["spec"]

    def _selectors(self) -> Iterator[str]:
        """Workloads find their own pods."""
        for each in self.kind("Deployment", "StatefulSet"):
            if not matches(
                each["spec"]["selector"], each["spec"]["template"]["metadata"]["labels"]
            ):
                yield f"{title(each)}: its selector does not match its own pods"

    def _pod_references(self) -> Iterator[str]:
        for owner, _, spec in self.pods:
            account = spec["serviceAccountName"]
            if account != "default" and not self.named("ServiceAccount", account):
                yield f"{owner}: no ServiceAccount {account}"
            for secret in spec.get("imagePullSecrets", []):
                yield from self._key(owner, "Secret", secret["name"], None)
            volumes = {each["name"]: each for each in spec.get("volumes", [])}
            claimed = self._claim_templates(owner)
            for volume in volumes.values():
                yield from self._volume(owner, volume)
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                for mount in container.get("volumeMounts", []):
                    if mount["name"] not in {*volumes, *claimed}:
                        yield f"{owner}: volumeMount {mount['name']} has no volume"
                yield from self._environment(owner, container)
                yield from self._probes(owner, container)

    def _claim_templates(self, owner: str) -> set[str]:
        found = self.named("StatefulSet", owner)
        claims = found["spec"].get("volumeClaimTemplates", []) if found else []
        return {each["metadata"]["name"] for each in claims}

    def _volume(self, owner: str, volume: dict[str, Any]) -> Iterator[str]:
        if secret := volume.get("secret"):
            for item in secret.get("items", [{"key": None}]):
                yield from self._key(owner, "Secret", secret["secretName"], item["key"])
        if config := volume.get("configMap"):
            yield from self._key(owner, "ConfigMap", config["name"], None)
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and not self.named("PersistentVolumeClaim", claim):
            yield f"{owner}: no PersistentVolumeClaim {claim}"

    def _environment(self, owner: str, container: dict[str, Any]) -> Iterator[str]:
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                if reference := source.get(field):
                    yield from self._key(owner, kind, reference["name"], reference["key"])
            if url := re.fullmatch(r"http://([\w-]+):(\d+)", str(variable.get("value", ""))):
                yield from self._service_port(owner, url[1], int(url[2]))
        for source in container.get("envFrom", []):
            for kind, field in (("Secret", "secretRef"), ("ConfigMap", "configMapRef")):
                if reference := source.get(field):
                    yield from self._key(owner, kind, reference["name"], None)

    def _key(self, owner: str, kind: str, name: str, key: str | None) -> Iterator[str]:
        found = self.named(kind, name)
        if found is None:
            yield f"{owner}: no {kind} {name}"
        elif key is not None and key not in {
            **found.get("data", {}),
            **found.get("stringData", {}),
        }:
            yield f"{owner}: {kind} {name} has no {key}"

    def _probes(self, owner: str, container: dict[str, Any]) -> Iterator[str]:
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for action in ("httpGet", "tcpSocket"):
                asked = container.get(probe, {}).get(action, {})
                if asked and asked["port"] not in ports:
                    yield f"{owner}: {probe} asks port {asked['port']}, which has no such name"
                if asked.get("path", "/ready") not in (*PROBES, *RAY_PATHS):
                    yield f"{owner}: {probe} asks {asked['path']}, which nobody serves"

    def _services(self) -> Iterator[str]:
        for each in self.kind("Service"):
            pods = self.selected({"matchLabels": each["spec"]["selector"]})
            if not pods:
                yield f"{title(each)}: no pod has its labels"
            for port in each["spec"]["ports"]:
                if not all(port["targetPort"] in port_names(pod) for pod in pods):
                    yield f"{title(each)}: its pods have no port {port['targetPort']}"

    def _service_port(self, owner: str, name: str, port: int) -> Iterator[str]:
        service = self.named("Service", name)
        if service is None:
            yield f"{owner}: no Service {name}"
        elif port not in [each["port"] for each in service["spec"]["ports"]]:
            yield f"{owner}: Service {name} has no port {port}"

    def _scraped(self, monitor: Document) -> list[Document]:
        selector = monitor["spec"]["selector"]
        services = self.kind("Service")
        return [each for each in services if matches(selector, each["metadata"]["labels"])]

    def _monitors(self) -> Iterator[str]:
        for each in self.kind("ServiceMonitor"):
            services = self._scraped(each)
            if not services:
                yield f"{title(each)}: no Service has its labels"
            for endpoint in each["spec"]["endpoints"]:
                for service in services:
                    if endpoint["port"] not in [p.get("name") for p in service["spec"]["ports"]]:
                        yield f"{title(each)}: Service has no port {endpoint['port']}"
                if endpoint["path"] not in PROBES:
                    yield f"{title(each)}: nobody serves {endpoint['path']}"
        for each in self.kind("PodMonitor"):
            pods = self.selected(each["spec"]["selector"])
            if not pods:
                yield f"{title(each)}: no pod has its labels"
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                if not all(endpoint["port"] in port_names(pod) for pod in pods):
                    yield f"{title(each)}: its pods have no port {endpoint['port']}"

    def _policies(self) -> Iterator[str]:
        for each in self.kind("NetworkPolicy", "PodDisruptionBudget"):
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            pods = self.selected(selector)
            if not pods:
                yield f"{title(each)}: no pod has its labels"
            for rule in each["spec"].get("ingress", []):
                for port in rule.get("ports", []):
                    if not all(port["port"] in port_names(pod) for pod in pods):
                        yield f"{title(each)}: its pods have no port {port['port']}"
                for peer in rule.get("from", []):
                    ours = "podSelector" in peer and "namespaceSelector" not in peer
                    if ours and not self.selected(peer["podSelector"]):
                        yield f"{title(each)}: lets in pods that there are not"

    def _targets(self) -> Iterator[str]:
        for each in self.kind("HorizontalPodAutoscaler", "ScaledObject"):
            target = each["spec"]["scaleTargetRef"]
            if not self.named(target["kind"], target["name"]):
                yield f"{title(each)}: no {target['kind']} {target['name']}"

    def _edges(self) -> Iterator[str]:
        for each in self.kind("Ingress"):
            for rule in each["spec"]["rules"]:
                for path in rule["http"]["paths"]:
                    backend = path["backend"]["service"]
                    service = self.named("Service", backend["name"])
                    ports = [p["name"] for p in service["spec"]["ports"]] if service else []
                    if backend["port"]["name"] not in ports:
                        yield f"{title(each)}: no Service {backend}"
            for tls in each["spec"].get("tls", []):
                yield from self._key(title(each), "Secret", tls["secretName"], None)
        for each in self.kind("HTTPRoute"):
            for rule in each["spec"]["rules"]:
                for backend in rule["backendRefs"]:
                    yield from self._service_port(title(each), backend["name"], backend["port"])

    def _queries(self) -> Iterator[str]:
        pods = {f"{NAMESPACE}/{each['metadata']['name']}" for each in self.kind("PodMonitor")}
        services = {
            service["metadata"]["name"]
            for each in self.kind("ServiceMonitor")
            for service in self._scraped(each)
        }
        for each in self.documents:
            for query in metrics.of(each):
                for breach in metrics.breaches(query, pods | services, self.names):
                    yield f"{title(each)}: {breach}"

    def _commands(self) -> Iterator[str]:
        """The start commands, the configuration and Ray's resources fit each other."""
        offered: dict[str, float] = {}
        for owner, _, spec in self.pods:
            words = command(spec)
            for address in options(words, "--address"):
                name, _, port = address.rpartition(":")
                yield from self._service_port(owner, name, int(port))
            for text in options(words, "--resources"):
                offered |= json.loads(text)
        for owner, labels, spec in self.pods:
            if labels.get("app.kubernetes.io/component") == "serve":
                yield from self._serve(owner, spec, offered)

    def _serve(self, owner: str, spec: dict[str, Any], offered: dict[str, float]) -> Iterator[str]:
        words = command(spec)
        given = words[words.index("kvlane") + 1 :]
        try:
            arguments = cli._parser().parse_args(given)
        except (SystemExit, argparse.ArgumentError):
            yield f"{owner}: kvlane does not take {given}"
            return
        mounts = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        files = [str(arguments.config), *filter(None, [arguments.api_key_file])]
        for file in files:
            if str(Path(file).parent) not in mounts:
                yield f"{owner}: {file} is on no volume"
        config_map = next(self.kind("ConfigMap"))
        for volume in spec["volumes"]:
            if "configMap" in volume:
                config_map = self.named("ConfigMap", volume["configMap"]["name"]) or config_map
        text = config_map["data"].get(arguments.config.name)
        if text is None:
            yield f"{owner}: {title(config_map)} has no {arguments.config.name}"
            return
        with NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            flags = {path: getattr(arguments, flag) for flag, path in cli.FLAGS.items()}
            try:
                config = load(Path(file.name), arguments.set, flags)
            except UserError as error:
                yield f"{owner}: {error}"
                return
        for role in ("prefill", "decode"):
            part = config.role(role)
            for name in part.resources if part.replicas else ():
                if name not in offered:
                    yield f"{owner}: {role} asks for the Ray resource {name}, which no pod has"
        if port_names(spec).get("http") != config.cluster.port:
            yield f"{owner}: port http is not {config.cluster.port}"
        for other, _, pod in self.pods:
            port = port_names(pod).get("metrics", config.cluster.worker_metrics_port)
            if port != config.cluster.worker_metrics_port:
                yield f"{other}: workers' metrics are at {config.cluster.worker_metrics_port}"


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector means an object with these labels."""
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def port_names(pod: dict[str, Any]) -> dict[str, int]:
    """Names of a pod's ports -> numbers."""
    ports = [port for each in pod["containers"] for port in each.get("ports", [])]
    return {port["name"]: port["containerPort"] for port in ports}


def command(pod: dict[str, Any]) -> list[str]:
    """The words of what the first container runs."""
    container = pod["containers"][0]
    text = "\n".join(container.get("args", [])).replace("\\\n", "")
    return shlex.split(text) if container["command"][0] == "sh" else list(container["command"])


def options(words: list[str], name: str) -> list[str]:
    """Values of --name=value."""
    return [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]


def title(document: Document) -> str:
    """Kind and name."""
    return f"{document['kind']} {document['metadata']['name']}"


def changed(documents: list[Document], which: str, old: str, new: str) -> list[Document]:
    """A render in which one object says `new` for `old`; `which` is its kind and name."""
    found = next(each for each in documents if title(each) == which)
    text = yaml.safe_dump(found, width=100_000)
    assert old in text, f"{which} does not say {old}"
    index = documents.index(found)
    return [*documents[:index], yaml.safe_load(text.replace(old, new)), *documents[index + 1 :]]
