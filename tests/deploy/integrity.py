"""Referential integrity of deploy/: what its files mention exists, here or in the product.

Ports, paths, options, settings of the configuration and of Ray, metrics, images, users, packages.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from cluster import cli
from cluster.config import Config, leaves, load
from router.http.openapi import OPERATIONS
from tests.deploy.blocks import REPOSITORY, block
from tests.helm import metrics
from worker.errors import UserError
from worker.transfer.mooncake_libraries import APT_PACKAGES

PATHS = {each.path for each in OPERATIONS}
CHART = yaml.safe_load((REPOSITORY / "helm" / "kvlane" / "values.yaml").read_text())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
USER = CHART["pods"]["securityContext"]
TARGETS = ("cpu", "cuda")
BLOCKS = ("bundle", "compose", "kubernetes", "laptop", "ray", "ray-more", "systemd")
LOCAL = re.compile(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)")
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")


def breaches(deploy: Path) -> list[str]:
    """One line for each thing that is mentioned in this copy of deploy/ and is nowhere."""
    checks = (image, requirements, examples, units, environment, cluster_yaml, compose, prose)
    found: list[str] = []
    for check in checks:
        try:
            found += [f"{check.__name__}: {breach}" for breach in check(deploy)]
        except (KeyError, UserError) as error:  # what has to be there is not
            found.append(f"{check.__name__}: {error!r}")
    return found


def read(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text())


def kvlane(words: list[str], files: dict[str, Path]) -> tuple[Config | None, str]:
    """The configuration of a `kvlane serve`, or why there is none.

    Args:
        words: after `kvlane`.
        files: where a file of the command lies here.
    """
    try:
        given = cli._parser().parse_args(words)
    except (SystemExit, argparse.ArgumentError):
        return None, f"kvlane does not take {shlex.join(words)}"
    if words[0] != "serve":
        return None, ""
    path = files.get(str(given.config), given.config)
    flags = {path: getattr(given, flag) for flag, path in cli.FLAGS.items()}
    try:
        return load(path, given.set, flags), ""
    except UserError as error:
        return None, str(error)


@cache
def ray_options() -> frozenset[str]:
    """Of `ray start`."""
    from ray.scripts.scripts import start

    return frozenset(option for each in start.params for option in each.opts)


def ray_start(line: str) -> Iterator[str]:
    """What is wrong with a command line of `ray start`."""
    for option in re.findall(r"(--[\w-]+)", line.partition("ray start")[2]):
        if option not in ray_options():
            yield f"ray start has no {option}"
    if "--head" in line and "--port=6379" not in line:
        yield f"not the port that everybody else knows: {line}"


def stop_s(config: Config) -> float:
    """What `serve` may take to end."""
    return 2 * (config.cluster.drain_timeout_s + config.cluster.stop_timeout_s) + 30


def of_chart(name: str) -> bool:
    """Whether the Helm chart has a value of this path."""
    found: Any = CHART
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found is not None


def image(deploy: Path) -> Iterator[str]:
    text = (deploy / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    if not PINNED.fullmatch(base):
        yield f"the base {base} is not pinned"
    user, group = USER["runAsUser"], USER["runAsGroup"]
    for wanted in (f"--gid {group} kvlane", f"--uid {user} --gid {group}"):
        if wanted not in text:
            yield f"the chart's user is {user}:{group}, and there is no {wanted}"
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    for target in TARGETS:
        of_target = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        if f"USER {user}:{group}" not in of_target:
            yield f"target {target} does not run as {user}:{group}"
        if f"requirements/{target}.txt" not in text or target not in stages:
            yield f"no target {target}, or not with its requirements"
    for package in APT_PACKAGES.values():
        if not re.search(rf"install .*\b{package}\b", lines[2]):
            yield f"mooncake's {package} is not installed"
    (entry,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', text, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    if entry not in PROJECT["scripts"]:
        yield f"pyproject.toml has no command {entry}"
    config, why = kvlane(yaml.safe_load(command), {})
    if config is None:
        yield why
    elif f"EXPOSE {config.cluster.port}" not in text:
        yield f"does not expose {config.cluster.port}"
    for found in re.findall(r"kvlane:[\w.-]+", (deploy / "Dockerfile").read_text()):
        yield from image_name(found)
    for ignored in re.findall(
        r"^!(\S+)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE
    ):
        if not (REPOSITORY / ignored).exists():
            yield f".dockerignore lets {ignored} in, which is not there"


def image_name(name: str) -> Iterator[str]:
    if name not in {f"kvlane:{PROJECT['version']}-{target}" for target in TARGETS}:
        yield f"{name} is no image of the Dockerfile in this version"


def requirements(deploy: Path) -> Iterator[str]:
    for extra in TARGETS:
        lines = (deploy / "requirements" / f"{extra}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        extras = PROJECT["optional-dependencies"]
        for text in PROJECT["dependencies"] + extras[extra] + extras["tracing"]:
            wanted = Requirement(text)
            version = pins.get(wanted.name)
            if version is None or version not in wanted.specifier:
                yield f"{extra}.txt has {version} for {text}"


def examples(deploy: Path) -> Iterator[str]:
    for path in (deploy / "examples").glob("*.yaml"):
        try:
            load(path)
        except UserError as error:
            yield f"{path.name}: {error}"


def units(deploy: Path) -> Iterator[str]:
    given = env_file(deploy)
    names: set[str] = set()
    for path in sorted((deploy / "systemd").glob("*.service")):
        text = path.read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        for name in re.findall(r"\$\{(\w+)\}", command):
            names.add(name)
            if name not in given:
                yield f"{path.name}: kvlane.env has no {name}"
        if "EnvironmentFile=/etc/kvlane/kvlane.env" not in text or "User=kvlane" not in text:
            yield f"{path.name}: without its environment or user"
        for other in re.findall(r"^(?:BindsTo|After)=(kvlane-\S+)$", text, re.MULTILINE):
            if not (path.parent / other).exists():
                yield f"{path.name}: no unit {other}"
        if "bin/ray start" in command:
            yield from ray_start(command)
            continue
        words = shlex.split(command)[1:]
        example = deploy / "examples" / "two-hosts.yaml"
        config, why = kvlane(words, {"/etc/kvlane/config.yaml": example})
        (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
        if config is None:
            yield f"{path.name}: {why}"
        elif int(limit_s) < stop_s(config):
            yield f"{path.name}: is killed before the {stop_s(config):g} s that it may take to end"
    for name in given:
        if name.startswith("KVLANE_") and name not in names:
            yield f"kvlane.env: nobody reads {name}"


def env_file(deploy: Path) -> dict[str, str]:
    """Of the units."""
    lines = (deploy / "systemd" / "kvlane.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def environment(deploy: Path) -> Iterator[str]:
    """Ray's settings are those of `serve` and, because it may have several nodes, of the chart."""
    files = (deploy / "systemd" / "kvlane.env", deploy / "ray" / "cluster.yaml")
    wanted = {
        k: cli.RAY_SETTINGS[k] for k in ("RAY_worker_niceness", "RAY_memory_monitor_refresh_ms")
    }
    for name, number in CHART["ray"]["healthCheck"].items():
        snake = re.sub("[A-Z]", lambda upper: f"_{upper[0].lower()}", name)
        wanted[f"RAY_health_check_{snake}"] = str(number)
    for path in files:
        found = dict(re.findall(r"\b(RAY_[a-z]\w+)=(\w+)", path.read_text()))
        if found != wanted:
            yield f"{path.name}: {found} instead of {wanted}"


def cluster_yaml(deploy: Path) -> Iterator[str]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    described = read(deploy / "ray" / "cluster.yaml")
    try:
        validate_config(prepare_config(described))
    except Exception as error:  # jsonschema's, ValueError and more
        yield str(error).splitlines()[0]
    lines = [*described["head_start_ray_commands"], *described["worker_start_ray_commands"]]
    config = load(deploy / "examples" / "two-hosts.yaml")
    offered: set[str] = set()
    for line in (*lines, *block("ray", deploy / "README.md")):
        yield from ray_start(line) if "ray start" in line else ()
        offered |= set(re.findall(r"""--resources='\{"(\w+)":""", line))
    if offered != {*config.prefill.resources, *config.decode.resources}:
        yield f"nodes offer {offered}, two-hosts.yaml asks for others"


def compose(deploy: Path) -> Iterator[str]:
    directory = deploy / "compose"
    described = read(directory / "compose.yaml")
    services = described["services"]
    over = read(directory / "gpu.yaml")["services"]
    for name, service in (*services.items(), *over.items()):
        if service["image"].startswith("kvlane"):
            yield from image_name(service["image"])
        elif not PINNED.fullmatch(service["image"]):
            yield f"{service['image']} is not pinned"
        if (
            name not in services
            or service.get("network_mode", "service:kvlane")[8:] not in services
        ):
            yield f"{name}: there is no such service, or not the one whose network it shares"
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            known = (
                (directory / source).exists()
                if source[0] == "."
                else source in described["volumes"]
            )
            if source[0] != "$" and not known:
                yield f"{name}: {source} is not there"
    ours = services["kvlane"]
    config, why = kvlane(ours["command"], {"/etc/kvlane/config.yaml": directory / "config.yaml"})
    if config is None:
        yield why
        return
    if int(ours["stop_grace_period"].rstrip("s")) < stop_s(config):
        yield f"is killed before the {stop_s(config):g} s that it may take to end"
    yield from compose_ports(directory, services, config.cluster.port)


def compose_ports(directory: Path, services: dict[str, Any], port: int) -> Iterator[str]:
    """Who asks whom, at which port and path."""
    prometheus, health = services["prometheus"], services["kvlane"]["healthcheck"]
    published = {each.split(":")[-1] for each in prometheus["ports"]}
    (listens,) = re.findall(r"listen-address=0\.0\.0\.0:(\d+)", " ".join(prometheus["command"]))
    if published != {str(port), listens}:
        yield f"published are {published}, served are {port} and {listens}"
    scrape = (directory / "prometheus.yml").read_text()
    asked = LOCAL.findall(" ".join(health["test"])) + LOCAL.findall(scrape)
    for number, path in asked:
        if int(number) != port or path not in PATHS:
            yield f"nobody serves :{number}{path}"
    grafana = directory / "grafana" / "provisioning"
    (source,) = read(grafana / "datasources" / "prometheus.yaml")["datasources"]
    if source["url"] != f"http://prometheus:{listens}":
        yield f"Grafana asks {source['url']}, where no Prometheus is"
    (provider,) = read(grafana / "dashboards" / "kvlane.yaml")["providers"]
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    if provider["options"]["path"] not in mounts:
        yield f"Grafana looks for dashboards in {provider['options']['path']}"


def prose(deploy: Path) -> Iterator[str]:
    """Commands, links, settings and metrics of the pages."""
    for path in (deploy / "README.md", deploy / "NETWORKS.md"):
        text = path.read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not (deploy / link).exists():
                yield f"{path.name}: no {link}"
        known = {*leaves(), *(leaf.rpartition(".")[0] for leaf in leaves())}
        sections = {leaf.partition(".")[0] for leaf in known}
        for name in re.findall(r"(?:--set[ =]|`)([a-z_]+(?:\.[a-z_]+)+)(?=[`=])", text):
            if name.partition(".")[0] in sections and not (name in known or of_chart(name)):
                yield f"{path.name}: no setting {name}"
        for name in metrics.NAME.findall(text):
            if name not in metrics.exported():
                yield f"{path.name}: nobody exports {name}"
    for name in BLOCKS:
        for line in block(name, deploy / "README.md"):
            for words in re.findall(r"(?:python -m cluster|bin/kvlane) (\w+)([^;&|\n]*)", line):
                _, why = kvlane([words[0], *shlex.split(words[1])], {})
                if why:
                    yield f"README.md: {why}"
            if "kubectl" in line:  # whose deploy/NAME is a Deployment
                continue
            for file in re.findall(r"\b(?:deploy|helm|tests)/[\w./-]+", line):
                if not (REPOSITORY / file).exists():
                    yield f"README.md: no {file}"
