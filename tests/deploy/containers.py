"""Containers of the images that tests/deploy/build made, by podman and crun of Debian.

For programs that have called `tests.support.namespaces.enter`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deploy.blocks import REPOSITORY
from tests.support.namespaces import run

IMAGE = "kvlane:0.1.0-cpu"
TOOLS = REPOSITORY / ".tools" / "deploy"
WORK = Path("/run/containers-of-tests")
# What the Helm chart and compose.yaml ask for: nothing may be written but /tmp and /dev/shm.
CONFINED = (
    "--read-only", "--tmpfs=/tmp:exec,mode=1777", "--shm-size=1g", "--cap-drop=all",
    "--security-opt=no-new-privileges",
)  # fmt: skip


def prepare(image: str = IMAGE) -> None:
    """What podman needs of this machine; `image` has to be there."""
    # crun takes version 2 of control groups, or 1, but not both; and limits that we may not raise.
    run("umount", "--recursive", "/sys/fs/cgroup")
    run("mount", "-t", "cgroup2", "none", "/sys/fs/cgroup")
    WORK.mkdir()
    limits = WORK / "containers.conf"
    limits.write_text('[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=8192:8192"]\n')
    os.environ["CONTAINERS_CONF"] = str(limits)
    os.environ["CONTAINERS_STORAGE_CONF"] = str(TOOLS / "storage.conf")
    if subprocess.run(["podman", "image", "exists", image], check=False).returncode != 0:
        raise SystemExit(f"no image {image}; run tests/deploy/build")
    # Those of a run that was cut off.
    subprocess.run(["podman", "rm", "--all", "--force"], check=True, stdout=subprocess.DEVNULL)


class Container:
    """One running container; its output is in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        network: str = "host",
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = CONFINED,
        image: str = IMAGE,
    ) -> None:
        self.name = name
        self._log = WORK / f"{name}.log"
        network = network if network == "host" else f"ns:/run/netns/{network}"
        given = [f"--env={key}={value}" for key, value in (environment or {}).items()]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["podman", "run", "--replace", f"--name={name}", "--cgroups=disabled",
                 f"--network={network}", "--no-hosts", *given, *options, image, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ended(self) -> str:
        """Its output if it has ended, else ""."""
        return f"{self.name} ended\n{self.output}" if self.process.poll() is not None else ""

    def words(self, *command: str, user: str = "") -> list[str]:
        """The words that run a command in it."""
        return ["podman", "exec", *([f"--user={user}"] if user else []), self.name, *command]

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """What a command prints in it; it has to succeed."""
        done = subprocess.run(
            self.words(*command), timeout=timeout_s, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {command}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def end(self, timeout_s: float) -> int:
        """SIGTERM to its first process, as every engine does; its exit code."""
        run("podman", "kill", "--signal=TERM", self.name)
        return self.process.wait(timeout_s)


def ended(containers: Sequence[Container]) -> str:
    """What has ended of these, else ""."""
    return "".join(each.ended() for each in containers)
