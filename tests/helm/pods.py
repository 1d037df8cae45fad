"""Runs the chart's pods as they are rendered, in namespaces of this machine instead of a cluster.

    python -m tests.helm.pods           # as root; about a minute on two idle cores
    python -m tests.helm.pods --set=workers.layout=node    # with values

Each pod has its own network, processes, /tmp and /dev/shm, a read-only root, no capabilities and
the user id of the chart. Commands, environment, secrets and configuration are those of the render;
names of Services stand in /etc/hosts, and we ask what the probes would ask. Then the command of
`helm test` runs, and the pods end as Kubernetes ends them. There is no API server and no kubelet.
"""

import base64
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.helm.charts import REPOSITORY, Render, parsed, port_names, template
from tests.support import namespaces
from tests.support.namespaces import Started, answers, enter, join
from tests.support.patience import HANG_S

WORK = Path("/run/kvlane-pods")
ADDRESSES = {
    name: f"10.79.0.{i}"
    for i, name in enumerate(("head", "prefill", "decode", "serve", "test", "node"), start=1)
}
PLACES = {"kvlane": "config", "kvlane-ray": "token"}
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


# Starts the pod of a component with this spec and environment, at its address.
Start = Callable[[str, dict[str, Any], dict[str, str]], Started]


class Pod(Started):
    def __init__(self, name: str, spec: dict[str, Any], environment: dict[str, str]) -> None:
        container, user = spec["containers"][0], str(spec["securityContext"]["runAsUser"])
        own = {
            "PATH": f"{WORK}/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": "/mnt/repository",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # The root has no /etc/kvlane to mount at.
        args = [there(text) for text in container["args"]]
        words = [
            "env", "-i", *(f"{key}={value}" for key, value in (environment | own).items()),
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all", *container["command"], *args,
        ]  # fmt: skip
        prepare = PREPARE.format(repository=REPOSITORY, python=sys.base_prefix, work=WORK)
        apart = [
            "ip", "netns", "exec", join(name, ADDRESSES[name]),
            "unshare", "-p", "-f", "-m", "--mount-proc", "--kill-child", "bash", "-c",
        ]  # fmt: skip
        log = WORK / f"{name}.log"
        super().__init__(name, [*apart, f"{prepare}exec {shlex.join(words)}"], log)

    def first(self) -> int:
        """Pid of the container's first process, as we see it: the child of `unshare`."""
        pid, name = self.process.pid, ""
        while name != "unshare":
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return pid

    def words(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.first()}", "--pid", "--mount", *command]

    def terminate(self) -> None:
        os.kill(self.first(), signal.SIGTERM)


def there(text: str) -> str:
    """With the paths at which files of the ConfigMap and of Ray's token are here."""
    for name, directory in PLACES.items():
        text = text.replace(f"/etc/{name}/", f"{WORK}/{directory}/")
    return text


def environment_of(container: dict[str, Any], address: str) -> dict[str, str]:
    """Of a container, with what Kubernetes would fill in."""
    values = {"GRPC_DNS_RESOLVER": "native"}  # here is no server of names, only /etc/hosts
    for variable in container["env"]:
        if "value" in variable:
            values[variable["name"]] = there(variable["value"])
        else:
            values[variable["name"]] = address
    return values


def write_files(render: Render, directory: Path) -> None:
    """What all pods see: `hosts`, the files of the ConfigMap, and Ray's token."""
    names = {"localhost": "127.0.0.1"}
    for service in render.kind("Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        names[service["metadata"]["name"]] = ADDRESSES[component]
    (directory / "hosts").write_text("".join(f"{names[name]} {name}\n" for name in names))
    (config,) = render.kind("ConfigMap")
    (directory / "config").mkdir()
    for name, text in config["data"].items():
        (directory / "config" / name).write_text(text)
    (secret,) = render.kind("Secret")
    (token,) = secret["data"].values()
    (directory / "token").mkdir()
    (directory / "token" / "token").write_bytes(base64.b64decode(token))


def serve_and_end(render: Render, start: Start) -> None:
    """Start all pods, probe and test them, and end them in the order of an upgrade."""
    specs = render.components()
    workers = [name for name in ("prefill", "decode", "node") if name in specs]
    running: dict[str, Started] = {}

    def begin(name: str) -> None:
        environment = environment_of(specs[name]["containers"][0], ADDRESSES[name])
        running[name] = start(name, specs[name], environment)

    def probe(name: str, kind: str) -> bool:
        asked = specs[name]["containers"][0][kind].get("httpGet")
        port = asked and port_names(specs[name])[asked["port"]]
        return not asked or answers(f"http://{ADDRESSES[name]}:{port}{asked['path']}")

    def wait(what: str, happens: Callable[[], bool], timeout_s: float) -> None:
        def ended() -> str:
            return "".join(pod.ended() for pod in running.values())

        try:
            namespaces.wait(what, happens, timeout_s, ended)
        except SystemExit:
            print(*(f"== {pod.name}\n{pod.output[-2000:]}" for pod in running.values()), sep="\n")
            raise

    begin("head")
    # Nodes that came before the head's own would end, to be started anew by a kubelet.
    agent = f"http://{ADDRESSES['head']}:{port_names(specs['head'])['ray-agent']}"
    wait("head is alive", lambda: probe("head", "livenessProbe"), HANG_S)
    wait("head has a node", lambda: answers(f"{agent}/api/local_raylet_healthz"), HANG_S)
    for name in (*workers, "serve"):
        begin(name)
    wait("serve is ready", lambda: probe("serve", "readinessProbe"), HANG_S)
    for name in running:
        for kind in ("livenessProbe", "readinessProbe"):
            wait(f"{kind} of {name}", partial(probe, name, kind), HANG_S)
    urls = [
        f"http://{ADDRESSES[name]}:{port}/metrics"
        for name in workers for title, port in port_names(specs[name]).items()
        if title.startswith("metrics")
    ]  # fmt: skip
    wait(f"{len(urls)} workers have metrics", lambda: all(map(answers, urls)), HANG_S)
    begin("test")
    test = running.pop("test")
    assert test.process.wait(HANG_S) == 0, test.output
    print(test.output.splitlines()[-1])
    for name in ("serve", *workers):
        before = specs[name]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        running[name].run(*before)
        code = running[name].end(HANG_S)
        assert name != "serve" or code == 0, running[name].output
    print("serve and its workers' pods ended")


def main() -> None:
    enter("tests.helm.pods")
    done = template(*sys.argv[1:])
    assert done.returncode == 0, done.stderr
    render = Render(parsed(done.stdout))
    (WORK / "bin").mkdir(parents=True)
    (WORK / "bin" / "kvlane").write_text(KVLANE)
    (WORK / "bin" / "kvlane").chmod(0o755)
    write_files(render, WORK)
    serve_and_end(render, Pod)


if __name__ == "__main__":
    main()
