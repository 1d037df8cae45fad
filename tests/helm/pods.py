"""Runs the chart's pods as they are rendered, in namespaces of this machine instead of a cluster.

    python -m tests.helm.pods           # as root; about a minute on two idle cores

Each pod has its own network, processes, /tmp and /dev/shm, a read-only root, no capabilities and
the user id of the chart. Commands, environment, secrets and configuration are those of the render;
names of Services stand in /etc/hosts, and we ask what the probes would ask. Then the command of
`helm test` runs, and the pods end as Kubernetes ends them. There is no API server and no kubelet.
"""

from __future__ import annotations

import base64
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helm.charts import REPOSITORY, documents
from tests.helm.integrity import Render, port_names
from tests.support.namespaces import answers, enter, join, run

WORK = Path("/run/kvlane-pods")
ADDRESSES = {
    name: f"10.79.0.{i}" for i, name in enumerate(("head", "prefill", "decode", "serve"), 1)
}
KVLANE = '#!/bin/sh\nexec python -P -m cluster "$@"\n'  # of this checkout
PREPARE = """set -e
mount -t tmpfs none /mnt; mkdir /mnt/repository /mnt/python
mount --bind {repository} /mnt/repository; mount --bind {python} /mnt/python
case {python} in /root/*) # where the pod's user may not look
    mount -t tmpfs -o mode=755 none /root; mkdir -p {python}; mount --bind /mnt/python {python};;
esac
mount -t tmpfs -o mode=1777 none /tmp; mount -t tmpfs -o mode=1777 none /dev/shm
mount --bind {work}/hosts /etc/hosts
mount -o remount,bind,ro /
cd /
"""


class Pod:
    """One running pod; its first process is the container's."""

    def __init__(self, name: str, spec: dict[str, Any], environment: dict[str, str]) -> None:
        self.name, self.address = name, ADDRESSES[name]
        self.container = spec["containers"][0]
        user = str(spec["securityContext"]["runAsUser"])
        namespace = join(name, self.address)
        prepare = PREPARE.format(repository=REPOSITORY, python=sys.base_prefix, work=WORK)
        words = [
            "env", "-i", *(f"{key}={value}" for key, value in environment.items()),
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all",
            *self.container["command"], *self.container["args"],
        ]  # fmt: skip
        with (WORK / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", "-p", "-f", "-m", "--mount-proc",
                 "--kill-child", "bash", "-c", f"{prepare}exec {shlex.join(words)}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def first(self) -> int:
        """Pid of the container's first process, as we see it."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/comm").read_text().strip() != "unshare":
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def probe(self, kind: str) -> bool:
        """Ask what Kubernetes asks."""
        asked = self.container[kind].get("httpGet")
        if asked is None:
            return True
        port = port_names({"containers": [self.container]})[asked["port"]]
        return answers(f"http://{self.address}:{port}{asked['path']}")

    def end(self, timeout_s: float) -> None:
        """preStop, then SIGTERM."""
        before = self.container["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run(
            ["nsenter", "-t", str(self.first()), "-p", "-m", *before], timeout=timeout_s, check=True
        )
        os.kill(self.first(), signal.SIGTERM)
        self.process.wait(timeout_s)


def wait(what: str, happens: Callable[[], bool], timeout_s: float, pods: list[Pod]) -> None:
    """Until it happens; a pod that ends meanwhile is an error."""
    began = time.monotonic()
    while not happens():
        ended = [pod.name for pod in pods if pod.process.poll() is not None]
        if ended or time.monotonic() - began > timeout_s:
            for pod in pods:
                print(f"== {pod.name}", (WORK / f"{pod.name}.log").read_text()[-2000:], sep="\n")
            raise SystemExit(f"{what}: not after {timeout_s:g} s; ended: {ended}")
        time.sleep(0.5)
    print(f"{what}: after {time.monotonic() - began:.1f} s", flush=True)


def environment_of(render: Render, container: dict[str, Any], address: str) -> dict[str, str]:
    """Of a container, with what Kubernetes would fill in."""
    found = {
        "PATH": f"{WORK}/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": "/mnt/repository",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GRPC_DNS_RESOLVER": "native",  # here is no server of names, only /etc/hosts
    }
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif reference := variable["valueFrom"].get("secretKeyRef"):
            secret = render.named("Secret", reference["name"])
            assert secret is not None
            found[variable["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        else:
            found[variable["name"]] = address
    return found


def prepare(render: Render) -> None:
    """Files and the cable that all pods share."""
    (WORK / "bin").mkdir(parents=True)
    (WORK / "bin" / "kvlane").write_text(KVLANE)
    (WORK / "bin" / "kvlane").chmod(0o755)
    hosts = {"localhost": "127.0.0.1"}
    for service in render.kind("Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        hosts[service["metadata"]["name"]] = ADDRESSES[component]
    (WORK / "hosts").write_text("".join(f"{a} {name}\n" for name, a in hosts.items()))
    run("mount", "-t", "tmpfs", "none", "/opt")
    run("mount", "-o", "remount,mode=755", "/opt")


def main() -> None:
    """Start all, test, end all."""
    enter("tests.helm.pods")
    render = Render(documents("default"))
    prepare(render)
    specs = {labels["app.kubernetes.io/component"]: spec for _, labels, spec in render.pods}
    (config,) = render.kind("ConfigMap")
    mounted = Path("/opt/config")
    mounted.mkdir()
    for name, text in config["data"].items():
        (mounted / name).write_text(text)

    pods = []
    for name in ADDRESSES:
        container = specs[name]["containers"][0]
        if name == "serve":  # where the root has no /etc/kvlane to mount at
            container["args"] = [
                each.replace("/etc/kvlane/", "/opt/config/") for each in container["args"]
            ]
        pods.append(Pod(name, specs[name], environment_of(render, container, ADDRESSES[name])))
        if name == "head":
            wait("head is alive", lambda: pods[0].probe("livenessProbe"), 120, pods)
    serve = pods[-1]
    wait("serve is ready", lambda: serve.probe("readinessProbe"), 240, pods)
    for kind in ("livenessProbe", "readinessProbe"):
        assert all(pod.probe(kind) for pod in pods), kind
    port = port_names(specs["decode"])["metrics"]
    wait(
        "workers have metrics",
        lambda: all(
            answers(f"http://{ADDRESSES[each]}:{port}/metrics") for each in ("prefill", "decode")
        ),
        120,
        pods,
    )
    test = specs["test"]["containers"][0]
    url = f"http://{serve.address}:8000"
    given = environment_of(render, test, "") | {"URL": url}
    subprocess.run([*test["command"], *test["args"]], env=given, timeout=300, check=True)
    began = time.monotonic()
    serve.end(120)
    assert serve.process.returncode == 0, serve.process.returncode
    for pod in pods[1:3]:
        pod.end(60)
    print(f"serve and its workers' pods ended after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
