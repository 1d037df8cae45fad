"""What is done to a cluster, as data: schedules.yaml, and the places that a step fills."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("schedules.yaml")
SPARE = 2**20  # bytes that a full place has left before it is filled
SMALL_ROOT = Path("/tmp/kvlchaos")  # a file system of its own, which may be filled


@dataclass(frozen=True, slots=True)
class Step:
    """First a place is filled, then a command begun, then processes are hit."""

    hit: str  # prefill, decode, router, or a process that faults.TITLES has
    all: bool = False  # all of them at once; else one, if it is not the last
    how: Sequence[str] = ("kill",)  # one of these: kill, stop
    again: Sequence[str] = ()  # kill the next one, too: once it is ready, or while it is starting
    fill: str = ""  # a folder, or "tmp": where the cluster has its files
    full_s: float = 15.0
    run: Sequence[str] = ()  # a command of kvlane that drains
    after_s: float = 0.0  # from its start to the hit
    calm: bool = True  # first all workers are ready again


def schedules() -> dict[str, list[dict[str, Any]]]:
    """What the file has."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def steps_of(name: str | None, roles: Sequence[str], signals: Sequence[str]) -> list[Step]:
    """Of a schedule; "all": of each in turn; None: one of a role after another is hit."""
    if name is None:
        return [Step(role, how=signals, calm=False) for role in roles]
    known = schedules()
    rows = [row for each in known.values() for row in each] if name == "all" else known[name]
    return [Step(**row) for row in rows]


def small_root() -> Path:
    """A folder for a cluster's files, in a file system that only this namespace has."""
    SMALL_ROOT.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "kvlane", SMALL_ROOT], check=True)
    return Path(tempfile.mkdtemp(prefix="jd", dir=SMALL_ROOT))


@contextlib.contextmanager
def filled(place: str) -> Iterator[None]:
    """A tmpfs without a byte to spare, until the body ends; "": none."""
    if not place:
        yield
        return
    folder = SMALL_ROOT if place == "tmp" else Path(place)
    state = os.statvfs(folder)
    size = (state.f_blocks - state.f_bfree) * state.f_frsize + SPARE
    _resize(folder, str(size))
    file = folder / "full"
    try:
        with contextlib.suppress(OSError), file.open("wb", buffering=0) as full:
            while full.write(bytes(4096)):
                pass
        yield
    finally:
        file.unlink(missing_ok=True)
        _resize(folder, "50%")


def _resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
