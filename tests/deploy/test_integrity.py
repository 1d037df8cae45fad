"""Whatever deploy/ mentions exists, here or in the product; this is noticed wherever it does not.

Ports, paths, options, settings of the configuration and of Ray, metrics, images, users, packages.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from cluster import cli
from cluster.config import Config, leaves, load
from router.http.table import ROUTES
from tests.deploy.blocks import REPOSITORY, block
from tests.helm import metrics
from tests.support.command_line import configured
from tests.support.pairwise import one_in
from worker.errors import UserError
from worker.transfer.mooncake_libraries import APT_PACKAGES

DEPLOY, README = REPOSITORY / "deploy", REPOSITORY / "README.md"
TOOLS = REPOSITORY / ".tools" / "deploy"
SCHEMA, HADOLINT = TOOLS / "compose_spec.json", TOOLS / "hadolint"
GRAFANA = "compose/grafana/provisioning"
CHART = yaml.safe_load((REPOSITORY / "helm" / "kvlane" / "values.yaml").read_text())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
TARGETS = ("cpu", "cuda")
IMAGES = {f"kvlane:{PROJECT['version']}-{target}" for target in TARGETS}
BLOCKS = ("bundle", "compose", "kubernetes", "laptop", "ray", "ray-more", "systemd")
CONFIG = "/etc/kvlane/config.yaml"
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
RAY_SETTINGS = ("RAY_worker_niceness", "RAY_memory_monitor_refresh_ms")
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


def search(pattern: str, path: Path) -> list[Any]:
    """All matches in a file, whose lines ^ and $ mean."""
    return re.findall(pattern, path.read_text(), re.MULTILINE)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@cache
def ray_options() -> frozenset[str]:
    from ray.scripts.scripts import start

    return frozenset(option for param in start.params for option in param.opts)


def check_ray_start(line: str) -> None:
    """Options of `ray start`, and the head's port, which everybody else knows."""
    assert ray_options().issuperset(re.findall(r"--[\w-]+", line.partition("ray start")[2])), line
    assert "--head" not in line or "--port=6379" in line, line


def stop_s(config: Config) -> float:
    return 2 * (config.cluster.drain_timeout_s + config.cluster.stop_timeout_s) + 30


def dockerfile(deploy: Path) -> None:
    """Users, targets, packages and the command of the image."""
    path = deploy / "Dockerfile"
    text = path.read_text().replace("\\\n", " ")
    (base,) = search(r"^ARG BASE=(\S+)$", path)
    assert PINNED.fullmatch(base)
    user, group = (CHART["pods"]["securityContext"][key] for key in ("runAsUser", "runAsGroup"))
    assert f"--gid {group} kvlane" in text
    assert f"--uid {user} --gid {group}" in text
    assert set(TARGETS) <= set(search(r"^FROM \S+ AS (\S+)$", path))
    for target in TARGETS:
        own = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert f"USER {user}:{group}" in own, target
        assert f"requirements/{target}.txt" in text
    installs = next(line for line in text.splitlines() if "apt-get install" in line).split()
    assert set(APT_PACKAGES.values()) <= set(installs)
    (entry,) = search(r'^ENTRYPOINT \["(\w+)"\]$', path)
    assert entry in PROJECT["scripts"]
    (command,) = search(r"^CMD (\[.*\])$", path)
    assert f"EXPOSE {configured(yaml.safe_load(command)).cluster.port}\n" in text
    assert set(search(r"kvlane:[\w.-]+", path)) <= IMAGES
    for ignored in search(r"^!(\S+)$", REPOSITORY / ".dockerignore"):
        assert (REPOSITORY / ignored).exists(), ignored


def requirements(deploy: Path) -> None:
    extras = PROJECT["optional-dependencies"]
    for extra in TARGETS:
        lines = (deploy / "requirements" / f"{extra}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        for text in PROJECT["dependencies"] + extras[extra] + extras["tracing"]:
            wanted = Requirement(text)
            assert pins[wanted.name] in wanted.specifier, f"{extra}.txt: {text}"


def units(deploy: Path) -> None:
    lines = (deploy / "systemd" / "kvlane.env").read_text().splitlines()
    given = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    used = set[str]()
    for path in sorted((deploy / "systemd").glob("*.service")):
        (command,) = search(r"^ExecStart=(.*)$", path)
        used |= set(re.findall(r"\$\{(\w+)\}", command))
        assert {"EnvironmentFile=/etc/kvlane/kvlane.env", "User=kvlane"} <= set(search(".+", path))
        for other in search(r"^(?:BindsTo|After)=(kvlane-\S+)$", path):
            assert (path.parent / other).exists(), other
        if "bin/ray start" in command:
            check_ray_start(command)
            continue
        example = deploy / "examples" / "two-hosts.yaml"
        config = configured(shlex.split(command)[1:], {CONFIG: example})
        (limit_s,) = search(r"^TimeoutStopSec=(\d+)$", path)
        assert int(limit_s) >= stop_s(config), "is killed before it may have ended"
    assert used <= given
    assert {name for name in given if name.startswith("KVLANE_")} <= used


def ray_settings(deploy: Path) -> None:
    """Those of `serve` and, because there may be several nodes, of the chart."""
    wanted = {name: cli.RAY_SETTINGS[name] for name in RAY_SETTINGS}
    for name, number in CHART["ray"]["healthCheck"].items():
        snake = re.sub("[A-Z]", lambda upper: f"_{upper[0].lower()}", name)
        wanted[f"RAY_health_check_{snake}"] = str(number)
    for path in (deploy / "systemd" / "kvlane.env", deploy / "ray" / "cluster.yaml"):
        assert dict(search(r"\b(RAY_[a-z]\w+)=(\w+)", path)) == wanted, path


def ray_cluster(deploy: Path) -> None:
    """Ray takes cluster.yaml; nodes, there and in the README, offer what the example asks for."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    described = read(deploy / "ray" / "cluster.yaml")
    validate_config(prepare_config(described))
    offered = set[str]()
    for line in (
        *described["head_start_ray_commands"], *described["worker_start_ray_commands"],
        *block("ray", deploy / "README.md"),
    ):  # fmt: skip
        if "ray start" in line:
            check_ray_start(line)
        offered |= set(re.findall(r"""--resources='\{"(\w+)":""", line))
    config = load(deploy / "examples" / "two-hosts.yaml")
    assert offered == {*config.prefill.resources, *config.decode.resources}


def compose(deploy: Path) -> None:
    """Images, volumes and services of Compose; who asks whom, at which port and path."""
    directory = deploy / "compose"
    described, over = read(directory / "compose.yaml"), read(directory / "gpu.yaml")
    services = described["services"]
    for name, service in (*services.items(), *over["services"].items()):
        image = service["image"]
        assert image in IMAGES if image.startswith("kvlane") else PINNED.fullmatch(image), image
        assert name in services
        assert service.get("network_mode", "service:kvlane").removeprefix("service:") in services
        for source in (volume.partition(":")[0] for volume in service.get("volumes", [])):
            known = (directory / source).exists() or source in described["volumes"]
            assert known or source.startswith("$"), source
    ours, prometheus = services["kvlane"], services["prometheus"]
    config = configured(ours["command"], {CONFIG: directory / "config.yaml"})
    port = str(config.cluster.port)
    assert int(ours["stop_grace_period"].rstrip("s")) >= stop_s(config)

    (listens,) = re.findall(r"listen-address=0\.0\.0\.0:(\d+)", " ".join(prometheus["command"]))
    assert {each.split(":")[-1] for each in prometheus["ports"]} == {port, listens}
    paths = {route.path for route in ROUTES}
    texts = " ".join(ours["healthcheck"]["test"]) + (directory / "prometheus.yml").read_text()
    for number, path in re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", texts):
        assert number == port
        assert path in paths
    (source,) = read(deploy / GRAFANA / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == f"http://prometheus:{listens}"
    (provider,) = read(deploy / GRAFANA / "dashboards" / "kvlane.yaml")["providers"]
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


def prose(deploy: Path) -> None:
    """Links, settings, metrics and commands of the pages, and of the first one; the examples."""
    for path in (deploy / "examples").glob("*.yaml"):
        load(path)
    known = {*leaves(), *(leaf.rpartition(".")[0] for leaf in leaves())}
    sections = {leaf.partition(".")[0] for leaf in known}
    for path in (deploy / "README.md", deploy / "NETWORKS.md"):
        for link in search(r"\]\(([^)#]+)\)", path):
            assert (deploy / link).exists(), link
        for name in search(r"(?:--set[ =]|`)([a-z_]+(?:\.[a-z_]+)+)(?=[`=])", path):
            if name.partition(".")[0] in sections:
                assert name in known or of_chart(name), name
        assert set(search(metrics.NAME.pattern, path)) <= set(metrics.exported())
    shell = "".join(re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL))
    lines = shell.replace("\\\n", "").splitlines()  # of the first page
    assert len(lines) > 15
    for line in (*lines, *(line for name in BLOCKS for line in block(name, deploy / "README.md"))):
        for text in re.findall(r"(?:python -m cluster|bin/kvlane) (\w+[^;&|\n]*)", line):
            words = shlex.split(text, comments=True)
            if words[0] != "bench":  # `tests/benchmarks` tries its options
                configured(words)
        if "kubectl" not in line:  # whose deploy/NAME is a Deployment
            for file in re.findall(r"\b(?:deploy|helm|tests)/[\w./-]+", line):
                assert (REPOSITORY / file).exists(), file


def of_chart(name: str) -> bool:
    values: Any = CHART
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values is not None


CHECKS = (
    dockerfile, requirements, units, ray_settings, ray_cluster, compose, prose,
)  # fmt: skip


WRONG = (AssertionError, KeyError, UserError, ValueError, jsonschema.ValidationError)


@pytest.mark.parametrize("check", CHECKS)
def test_whatever_is_mentioned_exists(check: Any) -> None:
    check(DEPLOY)


@pytest.mark.parametrize("mutation", one_in(8, MUTATIONS))
def test_a_name_that_changes_in_one_place_is_noticed(mutation: str, tmp_path: Path) -> None:
    name, old, new = MUTATIONS[mutation]
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    (tmp_path / "helm").symlink_to(REPOSITORY / "helm")  # README.md links to it
    text = (copy / name).read_text()
    assert old in text, f"{name} does not say {old}"
    (copy / name).write_text(text.replace(old, new))
    with pytest.raises(WRONG):
        [check(copy) for check in CHECKS]


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
    words = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(units.glob("*.service")))]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
