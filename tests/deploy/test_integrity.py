"""Whatever deploy/ mentions exists; and this is noticed wherever it does not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.deploy.blocks import REPOSITORY
from tests.deploy.compose import QUERIES
from tests.deploy.integrity import breaches
from tests.helm import metrics

DEPLOY = REPOSITORY / "deploy"
TOOLS = REPOSITORY / ".tools" / "deploy"
SCHEMA, HADOLINT = TOOLS / "compose_spec.json", TOOLS / "hadolint"
GRAFANA = "compose/grafana/provisioning"
MUTATIONS = {
    "user": ("Dockerfile", "--uid 1000", "--uid 1001"),
    "user of a target": ("Dockerfile", "USER 1000:1000", "USER 0:0"),
    "base": ("Dockerfile", "debian:12.14-slim\n", "debian:latest\n"),
    "port": ("Dockerfile", "EXPOSE 8000", "EXPOSE 8080"),
    "option of the image": ("Dockerfile", "--host=0.0.0.0", "--listen=0.0.0.0"),
    "library": ("Dockerfile", "libnuma1 ", ""),
    "image": ("compose/compose.yaml", "kvlane:0.1.0-cpu", "kvlane:0.1.0"),
    "tag": ("compose/compose.yaml", "prometheus:v3.5.0", "prometheus:latest"),
    "file of a volume": ("compose/compose.yaml", "./prometheus.yml", "./prom.yml"),
    "port of Prometheus": ("compose/compose.yaml", "0.0.0.0:9090", "0.0.0.0:9091"),
    "port of the API": ("compose/compose.yaml", "--port=8000", "--port=8001"),
    "path of the health check": ("compose/compose.yaml", "8000/ready", "8000/readyz"),
    "time to end": ("compose/compose.yaml", "160s", "60s"),
    "service": ("compose/compose.yaml", "service:prometheus", "service:kv"),
    "targets": ("compose/prometheus.yml", "/metrics/targets", "/targets"),
    "datasource": (f"{GRAFANA}/datasources/prometheus.yaml", "prometheus:9090", "kvlane:9090"),
    "dashboards": (f"{GRAFANA}/dashboards/kvlane.yaml", "grafana/dashboards", "dashboards"),
    "setting": ("compose/config.yaml", "drain_timeout_s", "drain_s"),
    "setting of an example": ("examples/two-hosts.yaml", "kind: tcp", "type: tcp"),
    "variable": ("systemd/kvlane.env", "KVLANE_HEAD=", "HEAD="),
    "Ray's setting": ("systemd/kvlane.env", "period_ms=1000", "period_ms=9000"),
    "Ray's option": ("systemd/kvlane-node.service", "--node-ip-address", "--node-ip"),
    "Ray's port": ("systemd/kvlane-head.service", "--port=6379", "--port=6380"),
    "unit": ("systemd/kvlane-serve.service", "After=kvlane-head", "After=kvlane-ray"),
    "option of a unit": ("systemd/kvlane-serve.service", "--config=", "--configuration="),
    "Ray's resource": ("ray/cluster.yaml", '"decode"', '"dec"'),
    "key of Ray's": ("ray/cluster.yaml", "head_start_ray_commands", "head_ray_commands"),
    "pin": ("requirements/cpu.txt", "ray==2.60.0", "ray==2.59.0"),
    "package": ("requirements/cuda.txt", "triton==", "triton-nightly=="),
    "command": ("README.md", "cluster down", "cluster stop"),
    "option of a command": ("README.md", "--set=model.served_name", "--name"),
    "setting in prose": ("NETWORKS.md", "`cluster.port`", "`cluster.http_port`"),
    "metric in prose": ("NETWORKS.md", "kvlane_transport_info", "kvlane_transport"),
}  # fmt: skip


def test_whatever_is_mentioned_exists() -> None:
    assert breaches(DEPLOY) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_name_that_changes_in_one_place_is_noticed(mutation: str, tmp_path: Path) -> None:
    name, old, new = MUTATIONS[mutation]
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    (tmp_path / "helm").symlink_to(REPOSITORY / "helm")  # README.md links to it
    text = (copy / name).read_text()
    assert old in text, f"{name} does not say {old}"
    (copy / name).write_text(text.replace(old, new))
    assert breaches(copy), f"{name}: {old} became {new}, and nothing was said"


def test_what_the_check_of_compose_asks_prometheus_is_exported() -> None:
    jobs = {"kvlane"}
    asked = [query for query in QUERIES if "kvlane_" in query]
    assert [b for query in asked for b in metrics.breaches(query, jobs, metrics.exported())] == []


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml"])
def test_compose_files_fit_the_schema(name: str) -> None:
    if not SCHEMA.exists():
        pytest.skip("no schema in .tools/deploy; run tests/deploy/install")
    described = yaml.safe_load((DEPLOY / "compose" / name).read_text())
    described.pop("name", "")  # younger than the schema
    validator = jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text()))
    validator.validate(described)
    described["services"]["kvlane"]["imag"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imag"):
        validator.validate(described)


def test_hadolint_finds_nothing_in_the_dockerfile(tmp_path: Path) -> None:
    if not HADOLINT.exists():
        pytest.skip("no hadolint in .tools/deploy; run tests/deploy/install")
    text = (DEPLOY / "Dockerfile").read_text()
    for name, content, codes in (("good", text, []), ("bad", f"{text}RUN sudo true\n", ["DL3004"])):
        (tmp_path / name).write_text(content)
        words = [str(HADOLINT), "--format=json", str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert [each["code"] for each in json.loads(done.stdout)] == codes, done.stdout


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    for path in (DEPLOY / "systemd").glob("*.service"):
        unit = path.read_text().replace("ExecStart=/opt/kvlane/bin/", "ExecStart=/bin/echo ")
        (tmp_path / path.name).write_text(unit)
    said = verify(tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    serve = tmp_path / "kvlane-serve.service"
    serve.write_text(serve.read_text().replace("KillMode=mixed", "KillMode=mix"))
    assert "kill mode" in verify(tmp_path).stderr


def verify(units: Path) -> subprocess.CompletedProcess[str]:
    """systemd's own opinion."""
    words = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(units.glob("*.service")))]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
