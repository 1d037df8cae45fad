"""Hosts in network namespaces of this machine, on one bridge.

`enter` starts the program over in namespaces in which nothing else runs; all of it dies with it.
"""

import os
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

INSIDE = "KVLANE_NAMESPACES"
ENTER = ("unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child")
GATEWAY = "10.79.0.254"  # this program's own address on the bridge


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def enter(module: str) -> None:
    """Run `python -m module` over with the same arguments; returns inside only."""
    if INSIDE not in os.environ:
        words = [*ENTER, sys.executable, "-m", module, *sys.argv[1:]]
        os.execvpe(ENTER[0], words, {**os.environ, INSIDE: "1"})
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "none", "/run")
    Path("/run/netns").mkdir()
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "addr", "add", f"{GATEWAY}/24", "dev", "bridge0")
    run("ip", "link", "set", "bridge0", "up")


def join(name: str, address: str) -> str:
    """A network namespace with this address on the bridge; its name."""
    namespace = f"kv{name}"
    run("ip", "netns", "add", namespace)
    run(*f"ip link add v{name} type veth peer name eth0 netns {namespace}".split())
    run("ip", "link", "set", f"v{name}", "master", "bridge0", "up")
    for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
        run("ip", "-n", namespace, *words.split())
    return namespace


def wait(
    what: str, happens: Callable[[], bool], timeout_s: float, ended: Callable[[], str]
) -> None:
    """Until it happens; `what`, for whoever reads along.

    ended: what has ended meanwhile and should not have, with its output; else "".
    """
    began = time.monotonic()
    while not happens():
        if text := ended():
            raise SystemExit(f"{what}: {text}")
        if time.monotonic() - began > timeout_s:
            raise SystemExit(f"{what}: not after {timeout_s:g} s")
        time.sleep(0.5)
    print(f"{what}: after {time.monotonic() - began:.1f} s", flush=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


class Started(ABC):
    """One that stands for a container; `process` is its first one, or ends with that."""

    def __init__(self, name: str, words: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ended(self) -> str:
        """Its output if it has ended, else ""."""
        return f"{self.name} ended\n{self.output}" if self.process.poll() is not None else ""

    @abstractmethod
    def words(self, *command: str) -> list[str]:
        """The words that run a command in it."""

    @abstractmethod
    def terminate(self) -> None:
        """SIGTERM to its first process."""

    def run(self, *command: str) -> str:
        done = subprocess.run(
            self.words(*command), timeout=120, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {command}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def end(self, timeout_s: float) -> int:
        self.terminate()
        return self.process.wait(timeout_s)
