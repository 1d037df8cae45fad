"""Load tools of others: `python -m tests.clients --load [NAME …]`.

Installs each at its newest version, alone, into .tools/newest, and has benchmarks/load/others.sh
run it in a network namespace: against `kvlane serve` with the bundled model,
whose counters have to agree with what the tool tells, and against a server whose every second
stream ends in an error event. Prints a table; ends with 1 where a tool does otherwise than the page
says.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from packaging.requirements import Requirement

from tests.e2e.harness import REPOSITORY, Serve
from tests.support.patience import HANG_S

PLACE = REPOSITORY / ".tools" / "newest"
COMMAND = ["bash", str(REPOSITORY / "benchmarks" / "load" / "others.sh")]
SERVED, BROKEN, BEHIND = (f"http://127.0.0.1:{port}" for port in (8000, 9000, 30000))
NUM_REQUESTS, NUM_TOKENS = 20, 32  # that the commands ask for, and of each answer
LIMIT_S = 600.0
TINY = REPOSITORY / "worker" / "assets" / "tiny"
# Of vLLM's requirements; its client, which runs here without a GPU, has no use for them.
OF_GPUS = re.compile(
    r"torch|nv|pynv|flashinfer|tilelang|fastsafe|instant|quack|tokenspeed|humming|opencv"
)


class Told(NamedTuple):
    """Requests that were served, and their output tokens."""

    served: int
    tokens: int

    def __sub__(self, before: tuple[int, int]) -> "Told":
        return Told(self.served - before[0], self.tokens - before[1])


class Tool(NamedTuple):
    """read: what it has told, of the folder in which it ran."""

    read: Callable[[Path], Told]
    install: tuple[str, ...] = ()  # arguments of pip
    trials: int = 0  # requests that it sends beforehand and does not count
    counts_broken: bool = False  # it takes a stream that ends in an error event as served
    is_router: bool = False  # kvlane's own bench asks through it


def _json(folder: Path, pattern: str) -> Any:
    (path,) = folder.glob(pattern)
    return json.loads(path.read_text())


def _guidellm(folder: Path) -> Told:
    told = _json(folder, "guidellm.json")["benchmarks"][0]["metrics"]
    tokens = told["output_token_count"]["successful"]["total_sum"]
    return Told(told["request_totals"]["successful"], round(tokens))


def _aiperf(folder: Path) -> Told:
    told = _json(folder, "aiperf/profile_export_aiperf.json")
    return Told(*(round(told[name]["avg"]) for name in ("request_count", "total_output_tokens")))


def _vllm(folder: Path) -> Told:
    told = _json(folder, "vllm.json")
    return Told(told["completed"], told["total_output_tokens"])


def _inference_perf(folder: Path) -> Told:
    told = _json(folder, "reports-*/summary_lifecycle_metrics.json")["successes"]
    return Told(told["count"], round(told["output_tokens"]["total"]))


def _kvlane(folder: Path) -> Told:
    (told,) = _json(folder, "kvlane.json")["summaries"]
    return Told(told["requests"]["served"], told["tokens"]["output"])


TOOLS = {
    "kvlane": Tool(_kvlane),
    "guidellm": Tool(_guidellm, ("guidellm", "torch")),
    "aiperf": Tool(_aiperf, ("aiperf",), counts_broken=True),
    "vllm": Tool(_vllm, ("--no-deps", "vllm"), trials=1, counts_broken=True),
    "inference-perf": Tool(_inference_perf, ("inference-perf",), counts_broken=True),
    "vllm-router": Tool(_kvlane, ("vllm-router",), is_router=True),
}  # fmt: skip


def install(names: list[str]) -> None:
    """The newest versions; a folder for each tool."""
    for name in filter(lambda name: TOOLS[name].install, names):
        print(f"installing {name}", flush=True)
        place = PLACE / name
        if name == "inference-perf":  # it asks for Python 3.12, and runs on 3.11; uv would not
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--upgrade"]
            anyway = ("--ignore-requires-python", "--only-binary=:all:")
            subprocess.run([*pip, *anyway, *TOOLS[name].install], cwd=place, check=True)
            continue
        make = [REPOSITORY / "tests" / "support" / "venv", place, "--upgrade"]
        subprocess.run([*make, *TOOLS[name].install], check=True)
        if name == "vllm":
            wanted = (Requirement(text) for text in _installed(name).requires or ())
            chosen = [each for each in wanted if not OF_GPUS.match(each.name.lower())]
            here = [str(each) for each in chosen if not each.marker or each.marker.evaluate()]
            subprocess.run([*make, *here, "pandas", "datasets", "torch==2.13.0"], check=True)


def _installed(name: str) -> Distribution:
    (places,) = (PLACE / name).glob("lib/*/site-packages")
    return next(iter(distributions(name=name, path=[str(places)])))


def counters() -> Told:
    """What the server has counted so far."""
    page = httpx.get(f"{SERVED}/metrics").text
    lines = [line for line in page.splitlines() if 'role="router"' in line]
    served = r'kvlane_requests_total\{.*outcome="(stop|length)".* '
    found = (served, r"kvlane_generation_tokens_total\{.* ")
    return Told(
        *(sum(int(float(re.sub(p, "", x))) for x in lines if re.match(p, x)) for p in found)
    )


def run(name: str, url: str, root: Path) -> Told:
    """What the tool tells of a run of its command against `url`. Raises what its failure is."""
    folder = Path(root, f"{name}{url[-4:]}")
    folder.mkdir()
    command = [*COMMAND, "kvlane" if TOOLS[name].is_router else name]
    done = subprocess.run(command, timeout=LIMIT_S, **_as_told(name, url, folder))
    try:
        return TOOLS[name].read(folder)
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(f"{error!r}\n{done.stdout[-4000:]}") from error


def _as_told(name: str, url: str, folder: Path) -> Any:
    path = f"{PLACE / name / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"URL": url, "PATH": path, "HOME": str(folder)}
    if url == BROKEN:  # which says nothing about a model
        own |= {"MODEL": "tiny", "TOKENIZER": str(TINY)}
    return {
        "cwd": folder, "env": os.environ | own, "text": True, "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
    }  # fmt: skip


@contextmanager
def beside(command: list[str], url: str, how: Any) -> Iterator[str]:
    """The URL of a process that answers there."""

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/v1/models").is_success
        except httpx.TransportError:
            return False

    process = subprocess.Popen(command, **how | {"stdout": subprocess.DEVNULL})
    try:
        deadline = time.monotonic() + HANG_S
        while not answers():
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(HANG_S)


def compared(name: str, root: Path) -> tuple[str, ...]:
    """A line of the table; the last field is empty if all is as the page says."""
    tool, before, server = TOOLS[name], counters(), Told(0, 0)
    try:
        if tool.is_router:
            with beside([*COMMAND, name], BEHIND, _as_told(name, SERVED, root)) as url:
                told = run(name, url, root)
            broken = "-"
        else:
            told = run(name, SERVED, root)
            broken = str(run(name, BROKEN, root).served)
        server = counters() - before
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return name, "", "", "", "", str(error)
    trials = tool.trials, tool.trials * NUM_TOKENS
    as_said = server - trials == told and told.served == NUM_REQUESTS
    as_said &= broken in ("-", str(NUM_REQUESTS // (1 if tool.counts_broken else 2)))
    version = _installed(name).version if tool.install else "here"
    told_and_counted = (f"{a}/{b}" for a, b in zip(told, server, strict=True))
    return name, version, *told_and_counted, broken, "" if as_said else "not as the page says"


def main(names: list[str]) -> list[tuple[str, ...]]:
    """The lines of the table. Runs inside a namespace."""
    root = Path("/tmp") / f"load{os.getpid()}"
    serve = Serve(root).start("--prefill", "1")
    stub = [sys.executable, "-m", "benchmarks.load", "stub", "--port", BROKEN[-4:]]
    try:
        serve.wait_ready()
        with beside([*stub, "--break-every", "2"], BROKEN, {"cwd": REPOSITORY}):
            rows = [compared(name, root) for name in names]
    finally:
        serve.end()
        shutil.rmtree(root, ignore_errors=True)
    head = ("tool", "version", "told/counted", "their tokens", "of 20, 10 broken", "")
    return [head, *rows]
