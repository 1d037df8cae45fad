"""Runs the image: as `docker run` would, then the pods of the Helm chart with it.

    tests/deploy/build                    # the image, once: minutes
    python -m tests.deploy.image          # as root; two minutes on two idle cores

The root is read-only, the user is not root, and there are no capabilities. Commands, environment,
secrets, configuration and probes of the pods are those of the render; so is the request of
`helm test`, which has to pass through prefill, pull and decode.
"""

from __future__ import annotations

import shlex
import sys

from tests.deploy.containers import CONFINED, WORK, Container, ended, prepare
from tests.helm.charts import CHART, documents
from tests.helm.integrity import Render, port_names
from tests.helm.pods import ADDRESSES, environment_of
from tests.support.namespaces import GATEWAY, answers, enter, join, wait

URL = "http://127.0.0.1:8000"
OF_THE_HOST = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # what tests.helm.pods adds
NEEDED = ("grep", "hf", "kvlane", "python", "ray", "sh", "sleep")  # by the pods' commands


def as_it_is() -> None:
    """The image's own command, as in the first lines of the Dockerfile."""
    container = Container("kvlane")
    wait("kvlane serves", lambda: "kvlane serves" in container.output, 120, container.ended)
    assert container.run("id", "-u", "-n").strip() == "kvlane"
    for word in NEEDED:
        container.run("sh", "-c", f"command -v {word}")
    refused = container.run("sh", "-c", "! touch /opt/kvlane/x 2>&1")
    assert "Read-only file system" in refused, refused
    request = (CHART / "files" / "request.py").read_text()
    print(container.run("env", f"URL={URL}", "PREFILLS=prefill", "python", "-c", request), end="")
    code = container.end(60)
    assert code == 0, f"{code}\n{container.output}"
    print("docker run: a completion, then SIGTERM: 0")


def pods() -> None:
    """Head, prefill, decode and serve of the chart."""
    render = Render(documents("default"))
    (config,) = render.kind("ConfigMap")
    mounted = WORK / "config"
    mounted.mkdir()
    for name, text in config["data"].items():
        (mounted / name).write_text(text)
    hosts = WORK / "hosts"
    names = {"localhost": "127.0.0.1"}
    for service in render.kind("Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        names[service["metadata"]["name"]] = ADDRESSES[component]
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    specs = {labels["app.kubernetes.io/component"]: spec for _, labels, spec in render.pods}

    def start(name: str, network: str, address: str) -> Container:
        described = specs[name]["containers"][0]
        user = str(specs[name]["securityContext"]["runAsUser"])
        environment = environment_of(render, described, address)
        volumes = (f"--volume={hosts}:/etc/hosts:ro", f"--volume={mounted}:/etc/kvlane:ro")
        # command and args of Kubernetes stand for ENTRYPOINT and CMD.
        first, *rest = [*described["command"], *described["args"]]
        return Container(
            name, rest, network=network,
            environment={k: v for k, v in environment.items() if k not in OF_THE_HOST},
            options=(*CONFINED, *volumes, f"--user={user}:{user}", f"--entrypoint={first}"),
        )  # fmt: skip

    def probe(name: str, kind: str) -> bool:
        asked = specs[name]["containers"][0][kind]["httpGet"]
        port = port_names(specs[name])[asked["port"]]
        return answers(f"http://{ADDRESSES[name]}:{port}{asked['path']}")

    running: list[Container] = []
    for name, address in ADDRESSES.items():
        running.append(start(name, join(name, address), address))
        if name == "head":
            wait("head is alive", lambda: probe("head", "livenessProbe"), 120, running[0].ended)
    wait("serve is ready", lambda: probe("serve", "readinessProbe"), 240, lambda: ended(running))
    for name in ("prefill", "decode", "serve"):
        assert probe(name, "livenessProbe"), name
        assert probe(name, "readinessProbe"), name
    test = start("test", "host", GATEWAY)
    assert test.process.wait(300) == 0, test.output
    print(test.output.splitlines()[-1])
    *workers, serve = running[1:]
    assert serve.end(120) == 0, serve.output
    for each in workers:
        before = specs[each.name]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        each.run(*before)
        each.end(60)
    print(f"the pods' own commands, as {shlex.join(CONFINED)}: served and ended")


def main() -> None:
    """Both."""
    enter("tests.deploy.image")
    prepare()
    as_it_is()
    pods()


if __name__ == "__main__":
    sys.exit(main())
