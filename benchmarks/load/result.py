"""The result file: JSON, gzip if its name ends in .gz; an indented head, then a request a line."""

from __future__ import annotations

import datetime
import gzip
import importlib.metadata
import os
import platform
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.records import Outcome, Result, Run

KIND = "kvlane.load/1"
DIGITS = 6  # of a piece's arrival time in seconds; the clock tells no more, the file is half as big
COMMAND_S = 2.0
PACKAGES = ("kvlane", "aiohttp", "numpy", "msgspec")
REPOSITORY = Path(__file__).resolve().parents[2]


def write(path: str | Path, result: Result) -> None:
    """Writes `result` to `path`; arrival times are rounded to the microsecond."""
    data = b"".join(pieces(result))
    if str(path).endswith(".gz"):
        data = gzip.compress(data, compresslevel=6, mtime=0)
    Path(path).write_bytes(data)


def pieces(result: Result) -> Iterator[bytes]:
    """The file's bytes."""
    yield b"{\n"
    for name in (name for name in result.__struct_fields__ if name != "runs"):
        value = msgspec.json.format(msgspec.json.encode(getattr(result, name)), indent=2)
        yield b'"%s": %s,\n' % (name.encode(), value)
    yield b'"runs": ['
    yield b",\n".join(b"".join(run_pieces(run)) for run in result.runs)
    yield b"]\n}\n"


def run_pieces(run: Run) -> Iterator[bytes]:
    """One run: the small fields, then a line for each outcome."""
    yield b"{\n"
    for name in (name for name in run.__struct_fields__ if name != "outcomes"):
        yield b'"%s": %s,\n' % (name.encode(), msgspec.json.encode(getattr(run, name)))
    yield b'"outcomes": [\n'
    yield b",\n".join(msgspec.json.encode(rounded(outcome)) for outcome in run.outcomes)
    yield b"\n]}"


def rounded(outcome: Outcome) -> Outcome:
    """`outcome` with its arrival times rounded."""
    times = [round(s, DIGITS) for s in outcome.chunk_s]
    return msgspec.structs.replace(outcome, chunk_s=times)


def read(path: str | Path) -> Result:
    """The result in `path`.

    Raises ValueError, with the path and the reason, if it is missing or not such a file.
    """
    try:
        data = Path(path).read_bytes()
        if str(path).endswith(".gz"):
            data = gzip.decompress(data)
        kind = msgspec.json.decode(data, type=Kind).kind
        if kind != KIND:
            raise ValueError(f"its kind is {kind!r}, not {KIND!r}")
        return msgspec.json.decode(data, type=Result)
    except (OSError, EOFError, zlib.error, ValueError, msgspec.MsgspecError) as e:
        raise ValueError(f"{path} is not a result of benchmarks.load: {e}") from e


class Kind(msgspec.Struct):
    """The field by which a file says what it is."""

    kind: str


def machine() -> dict[str, Any]:
    """Where the harness runs: hardware, versions, commit, date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    status = output_of("git", "-C", str(REPOSITORY), "status", "--porcelain")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus.splitlines() if gpus else [],
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "commit": output_of("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version_of(package: str) -> str | None:
    """The installed version, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """What `command` prints; None if it is missing, fails, or takes longer than 2 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
