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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from packaging.requirements import Requirement

from tests.e2e.harness import REPOSITORY, Serve
from tests.support.patience import HANG_S, until

PLACE = REPOSITORY / ".tools" / "newest"
COMMAND = ["bash", str(REPOSITORY / "benchmarks" / "load" / "others.sh")]
SERVED, BROKEN, BEHIND = (f"http://127.0.0.1:{port}" for port in (8000, 9000, 30000))
NUM_REQUESTS = 20  # that the commands ask for
LIMIT_S = 600.0
TINY = REPOSITORY / "worker" / "assets" / "tiny"
# Of vLLM's requirements; its client, which runs here without a GPU, has no use for them.
OF_GPUS = re.compile(
    r"torch|nv|pynv|flashinfer|tilelang|fastsafe|instant|quack|tokenspeed|humming|opencv"
)


Counts = list[int]  # requests that were served, and their output tokens


class Tool(NamedTuple):
    """file: in which it tells, at `served` and `tokens`."""

    file: str
    served: str
    tokens: str
    counts_broken: bool = False  # it takes a stream that ends in an error event as served


OWN = Tool("kvlane.json", "summaries.0.requests.served", "summaries.0.tokens.output")
METRICS = "benchmarks.0.metrics."
TOOLS = {
    "kvlane": OWN,
    "guidellm": Tool("guidellm.json", f"{METRICS}request_totals.successful",
                     f"{METRICS}output_token_count.successful.total_sum"),
    "aiperf": Tool("aiperf/profile_export_aiperf.json", "request_count.avg",
                   "total_output_tokens.avg", True),
    "vllm": Tool("vllm.json", "completed", "total_output_tokens", True),
    "inference-perf": Tool("reports-*/summary_lifecycle_metrics.json", "successes.count",
                           "successes.output_tokens.total", True),
    "vllm-router": OWN,  # kvlane's own bench asks through it
}  # fmt: skip


def install(names: list[str]) -> None:
    """The newest versions; a folder for each tool."""
    for name in filter("kvlane".__ne__, names):
        print(f"installing {name}", flush=True)
        place = PLACE / name
        if name == "inference-perf":  # it asks for Python 3.12, and runs on 3.11; uv would not
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--upgrade"]
            anyway = ("--ignore-requires-python", "--only-binary=:all:")
            subprocess.run([*pip, *anyway, name], cwd=place, check=True)
            continue
        make = [REPOSITORY / "tests" / "support" / "venv", place, "--upgrade"]
        extra = {"vllm": ["--no-deps"], "guidellm": ["torch"]}.get(name, [])
        subprocess.run([*make, *extra, name], check=True)
        if name == "vllm":
            wanted = (Requirement(text) for text in _installed(name).requires or ())
            chosen = [each for each in wanted if not OF_GPUS.match(each.name.lower())]
            here = [str(each) for each in chosen if not each.marker or each.marker.evaluate()]
            subprocess.run([*make, *here, "pandas", "datasets", "torch==2.13.0"], check=True)


def _installed(name: str) -> Distribution:
    (places,) = (PLACE / name).glob("lib/*/site-packages")
    return next(iter(distributions(name=name, path=[str(places)])))


def counters() -> Counts:
    """What the server has counted so far."""
    page = httpx.get(f"{SERVED}/metrics").text
    ours = r'\{.*role="router".* (\d+)'
    served = re.findall(rf'^kvlane_requests_total(?=.*"(?:stop|length)"){ours}', page, re.MULTILINE)
    tokens = re.findall(rf"^kvlane_generation_tokens_total{ours}", page, re.MULTILINE)
    return [sum(map(int, served)), sum(map(int, tokens))]


def run(name: str, url: str, root: Path) -> Counts:
    """What the tool tells of a run of its command against `url`. Raises what its failure is."""
    folder = Path(root, f"{name}{url[-4:]}")
    folder.mkdir()
    command = [*COMMAND, "kvlane" if TOOLS[name] is OWN else name]
    done = subprocess.run(command, timeout=LIMIT_S, **_as_told(name, url, folder))
    try:
        (path,) = folder.glob(TOOLS[name].file)
        told = json.loads(path.read_text())
        return [round(_at(told, where)) for where in TOOLS[name][1:3]]
    except (OSError, ValueError, LookupError) as error:
        raise RuntimeError(f"{error!r}\n{done.stdout[-4000:]}") from error


def _at(told: Any, where: str) -> float:
    return reduce(
        lambda part, key: part[int(key) if key.isdigit() else key], where.split("."), told
    )


def _as_told(name: str, url: str, folder: Path) -> Any:
    path = f"{PLACE / name / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"URL": url, "PATH": path, "HOME": str(folder)}
    if url == BROKEN:  # which says nothing about a model
        own |= {"MODEL": "tiny", "TOKENIZER": str(TINY)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return {"cwd": folder, "env": os.environ | own, "text": True, **pipes}


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
        until(answers)
        yield url
    finally:
        process.terminate()
        process.wait(HANG_S)


def compared(name: str, root: Path) -> tuple[str, ...]:
    """A line of the table; the last field is empty if all is as the page says."""
    tool, before, broken = TOOLS[name], counters(), "-"
    try:
        if name == "vllm-router":
            with beside([*COMMAND, name], BEHIND, _as_told(name, SERVED, root)) as url:
                told = run(name, url, root)
        else:
            told = run(name, SERVED, root)
            broken = str(run(name, BROKEN, root)[0])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return name, "", "", "", "", str(error)
    counted = [now - then for now, then in zip(counters(), before, strict=True)]
    as_said = counted == told and told[0] == NUM_REQUESTS
    as_said &= broken in ("-", str(NUM_REQUESTS // (1 if tool.counts_broken else 2)))
    version = _installed(name).version if name != "kvlane" else "here"
    pairs = (f"{a}/{b}" for a, b in zip(told, counted, strict=True))
    return name, version, *pairs, broken, "" if as_said else "not as the page says"


def main(names: list[str]) -> list[tuple[str, ...]]:
    """The lines of the table. Runs inside a namespace."""
    root = Path("/tmp") / f"load{os.getpid()}"
    serve = Serve(root).start("--prefill", "1")
    stub = [sys.executable, "-m", "benchmarks.load", "stub", "--port", BROKEN[-4:]]
    try:
        serve.wait_ready()
        with beside([*stub, "--break-every", "2"], BROKEN, {"cwd": REPOSITORY}):
            rows: list[tuple[str, ...]] = []
            for name in names:
                rows.append(compared(name, root))
                print(*rows[-1], flush=True)
    finally:
        serve.end()
        shutil.rmtree(root, ignore_errors=True)
    head = ("tool", "version", "told/counted", "their tokens", "of 20, 10 broken", "")
    return [head, *rows]
