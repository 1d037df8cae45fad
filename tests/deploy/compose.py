"""Runs the services of deploy/compose as they are written, without Docker.

    tests/deploy/build                    # the image, once
    python -m tests.deploy.compose        # as root, with Debian's prometheus; a minute

Commands, volumes, limits and the shared network namespace are those of the file. Prometheus is this
machine's, in the place where its image has it; Grafana is not to be had here and is left out.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import yaml

from tests.deploy.blocks import REPOSITORY
from tests.deploy.containers import IMAGE, WORK, Container, ended, prepare
from tests.support.namespaces import answers, enter, join, wait

COMPOSE = REPOSITORY / "deploy" / "compose"
ADDRESS = "10.79.0.1"
QUERIES = (
    "count(up) == 3",  # a router and two workers
    "min(up) == 1",
    'sum(kvlane_requests_total{outcome=~"stop|length"}) > 0',
    "count(kvlane_transport_info) > 0",
)  # fmt: skip


def services() -> dict[str, Any]:
    """Of compose.yaml."""
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def options(service: dict[str, Any]) -> Iterator[str]:
    """The words of `podman run` for what a service says.

    Left out are ulimits, which may not be raised here, and what has a meaning to compose only.
    """
    if service.get("read_only"):
        yield "--read-only"
    yield from (f"--tmpfs={each}" for each in service.get("tmpfs", []))
    if size := service.get("shm_size"):
        yield f"--shm-size={size}"
    yield from (f"--cap-drop={each}" for each in service.get("cap_drop", []))
    yield from (f"--security-opt={each}" for each in service.get("security_opt", []))
    for volume in service["volumes"]:
        source, target, *mode = volume.replace("${KVLANE_MODELS:-./models}", "./models").split(":")
        path = (COMPOSE if source.startswith(".") else WORK) / source  # else a named volume
        if not path.exists():
            path = WORK / path.name
            path.mkdir(exist_ok=True)
        yield ":".join((f"--volume={path}", target, *mode))


def ask(query: str) -> list[Any]:
    """What Prometheus says."""
    url = f"http://{ADDRESS}:9090/api/v1/query?query={quote(query)}"
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)["data"]["result"]


def complete() -> str:
    """A completion."""
    body = {"model": "tiny", "prompt": "What is 2 + 2?", "max_tokens": 8}
    request = urllib.request.Request(
        f"http://{ADDRESS}:8000/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def main() -> None:
    """Start, ask, end."""
    enter("tests.deploy.compose")
    prepare()
    binary = shutil.which("prometheus")
    if binary is None:
        raise SystemExit("no prometheus: apt-get install --no-install-recommends prometheus")
    described = services()
    # Containers of one network namespace have its owner's name and /etc/hosts.
    hosts = WORK / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} prometheus\n")
    owner = (f"--volume={hosts}:/etc/hosts:ro", "--hostname=prometheus")
    network = join("compose", ADDRESS)
    prometheus = Container(
        "prometheus", described["prometheus"]["command"], network=network,
        options=(
            *options(described["prometheus"]), *owner, "--user=0:0",
            f"--volume={binary}:{binary}:ro", f"--entrypoint={binary}",
        ),
    )  # fmt: skip
    assert described["kvlane"]["network_mode"] == "service:prometheus"
    assert described["kvlane"]["image"] == IMAGE
    kvlane = Container(
        "kvlane", described["kvlane"]["command"], network=network,
        options=(*options(described["kvlane"]), *owner),
    )  # fmt: skip
    running = [prometheus, kvlane]
    check = described["kvlane"]["healthcheck"]["test"][1:]
    wait(
        "the API answers",
        lambda: answers(f"http://{ADDRESS}:8000/ready"),
        120,
        lambda: ended(running),
    )
    kvlane.run(*check)
    print("health check passed; a completion:", complete())
    for query in QUERIES:
        wait(query, lambda query=query: bool(ask(query)), 90, lambda: ended(running))
    code = kvlane.end(60)
    assert code == 0, f"{code}\n{kvlane.output}"
    prometheus.end(30)


if __name__ == "__main__":
    main()
