"""Runs the units of deploy/systemd as they are written: two bare hosts, without systemd itself.

    tests/deploy/build                    # the image, once: its root stands for a host's
    python -m tests.deploy.systemd        # as root; a minute

Each ExecStart line, with the environment file and the user of its unit, a read-only root
(ProtectSystem=strict) and the unit's directories. The first host has the head and serve, the second
a node; prefill runs on one, decode on the other. `systemctl stop` is SIGTERM, as it would be.
"""

from __future__ import annotations

import re
import shlex
import subprocess

from tests.deploy.blocks import REPOSITORY
from tests.deploy.containers import WORK, Container, ended, prepare
from tests.helm.charts import CHART
from tests.support.namespaces import answers, enter, join, wait

UNITS = REPOSITORY / "deploy" / "systemd"
ADDRESSES = {"head": "10.79.0.1", "node": "10.79.0.2"}
URL = f"http://{ADDRESSES['head']}:8000"
TOKEN = "a-long-secret"
SERVE_LOG = WORK / "serve.log"


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / f"kvlane-{name}.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def file_environment() -> dict[str, str]:
    """What the environment file says; systemd takes quotes away as a shell does."""
    lines = (UNITS / "kvlane.env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key: shlex.split(value)[0] for key, _, value in pairs}


def environment_of(name: str, host: str) -> dict[str, str]:
    """Of a unit, on one of our hosts."""
    pairs = " ".join(unit(name)["Environment"]).split()
    resources = {"head": '{"prefill": 1}', "node": '{"decode": 1}'}
    return {
        **dict(pair.split("=", 1) for pair in pairs),
        **file_environment(),
        "KVLANE_ADDRESS": ADDRESSES[host],
        "KVLANE_HEAD": f"{ADDRESSES['head']}:6379",
        "KVLANE_RESOURCES": resources[host],
    }


def command_of(name: str, environment: dict[str, str]) -> list[str]:
    """The words of ExecStart; ${NAME} is one word, whatever its value."""
    (line,) = unit(name)["ExecStart"]
    return [re.sub(r"\$\{(\w+)\}", lambda m: environment[m[1]], word) for word in line.split()]


def host(name: str) -> Container:
    """The unit that begins a host: Ray's head or a node."""
    settings, environment = unit(name), environment_of(name, name)
    assert settings["ProtectSystem"] == ["strict"]
    etc = f"--volume={WORK}/etc:/etc/kvlane:ro"
    (run_directory,), (state,) = settings["RuntimeDirectory"], settings["StateDirectory"]
    first, *rest = command_of(name, environment)
    return Container(
        name, rest, network=f"kv{name}", environment=environment,
        options=(
            "--read-only", "--read-only-tmpfs=false", "--shm-size=1g", etc,
            f"--tmpfs=/run/{run_directory}:exec,mode=1777",
            f"--tmpfs=/var/lib/{state}:exec,mode=1777",
            "--cap-drop=all", "--security-opt=no-new-privileges",
            f"--user={settings['User'][0]}", f"--entrypoint={first}",
        ),
    )  # fmt: skip


def prepare_files() -> None:
    """/etc/kvlane, as deploy/README.md makes it."""
    etc = WORK / "etc"
    etc.mkdir()
    (etc / "ray-token").write_text(TOKEN)
    example = REPOSITORY / "deploy" / "examples" / "two-hosts.yaml"
    (etc / "config.yaml").write_text(example.read_text())


def start_serve(command: list[str], hosts: list[Container]) -> subprocess.Popen[bytes]:
    """As Restart= does, for the hosts, too: until the head listens, and where Ray was too slow."""
    for _ in range(6):
        hosts[:] = [host(each.name) if each.ended() else each for each in hosts]
        with SERVE_LOG.open("wb") as log:
            serve = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            serve.wait(10)
        except subprocess.TimeoutExpired:
            return serve
    raise SystemExit(SERVE_LOG.read_text() + ended(hosts))


def main() -> None:
    """Start both hosts, then serve; ask; stop."""
    enter("tests.deploy.systemd")
    prepare()
    prepare_files()
    for name, address in ADDRESSES.items():
        join(name, address)
    hosts = [host(name) for name in ADDRESSES]
    environment = environment_of("serve", "head")
    words = [f"--env={key}={value}" for key, value in environment.items()]
    command = ["podman", "exec", *words, "head", *command_of("serve", environment)]
    serve = start_serve(command, hosts)
    wait("serve is ready", lambda: answers(f"{URL}/ready"), 120, lambda: ended(hosts))
    request = (CHART / "files" / "request.py").read_text()
    print(hosts[1].run("env", f"URL={URL}", "PREFILLS=prefill", "python3", "-c", request), end="")
    found = "grep -lsz '^serve$' /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | head -1"
    hosts[0].run("sh", "-c", f'kill -TERM "$({found})"')  # KillMode=mixed: the main process only
    assert serve.wait(60) == 0, SERVE_LOG.read_text()
    for each in reversed(hosts):
        print(f"{each.name} ended with {each.end(60)}")
    print("the units' own commands, as their user, with a read-only root: served and ended")


if __name__ == "__main__":
    main()
