"""The result file: JSON, gzip if its name ends in .gz; and the machine that it was made on."""

import datetime
import gzip
import importlib.metadata
import os
import platform
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.records import Outcome, Result

KIND = "kvlane.load/1"
DIGITS = 6  # of a piece's arrival time in seconds; the clock tells no more, the file is half as big
COMMAND_S = 2.0
PACKAGES = ("kvlane", "aiohttp", "numpy", "msgspec")
REPOSITORY = Path(__file__).resolve().parents[2]


def write(path: str | Path, result: Result) -> None:
    """Writes `result` to `path`; arrival times are rounded to the microsecond."""
    runs = [
        msgspec.structs.replace(run, outcomes=[rounded(outcome) for outcome in run.outcomes])
        for run in result.runs
    ]
    data = msgspec.json.encode(msgspec.structs.replace(result, runs=runs))
    if str(path).endswith(".gz"):
        data = gzip.compress(data, compresslevel=6, mtime=0)
    Path(path).write_bytes(data)


def rounded(outcome: Outcome) -> Outcome:
    """`outcome` with its arrival times rounded."""
    times = [round(s, DIGITS) for s in outcome.chunk_s]
    return msgspec.structs.replace(outcome, chunk_s=times)


def read(path: str | Path) -> Result:
    """The result in `path`; raises ValueError, with path and reason, if there is none."""
    try:
        data = Path(path).read_bytes()
        if str(path).endswith(".gz"):
            data = gzip.decompress(data)
        stored = msgspec.json.decode(data, type=Result)
        if stored.kind != KIND:
            raise ValueError(f"its kind is {stored.kind!r}, not {KIND!r}")
        return stored
    except (OSError, EOFError, zlib.error, ValueError, msgspec.MsgspecError) as e:
        raise ValueError(f"{path} is not a result of benchmarks.load: {e}") from e


def machine() -> dict[str, Any]:
    """Where the harness runs: hardware, versions, commit, date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    status = output_of("git", "-C", str(REPOSITORY), "status", "--porcelain")
    return {
        "cpu": cpu_model() or platform.machine(),
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


def cpu_model() -> str | None:
    """The processor's name, where /proc tells it."""
    path = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", path.read_text(), re.M) if path.exists() else None
    return named and named[1]


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
