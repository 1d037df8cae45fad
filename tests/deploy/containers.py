"""Containers of the images that tests/deploy/build made, by podman and crun of Debian.

For programs that have called `tests.support.namespaces.enter`.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.blocks import REPOSITORY
from tests.support.namespaces import Started, run

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


class Container(Started):
    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        options: Sequence[str] = ("--network=host", *CONFINED),
        image: str = IMAGE,
    ) -> None:
        run = ("podman", "run", "--replace", f"--name={name}", "--cgroups=disabled", "--no-hosts")
        super().__init__(name, [*run, *options, image, *command], WORK / f"{name}.log")

    def words(self, *command: str) -> list[str]:
        return ["podman", "exec", self.name, *command]

    def terminate(self) -> None:
        run("podman", "kill", "--signal=TERM", self.name)  # as every engine does
