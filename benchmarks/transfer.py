"""Pulls of KV: between two processes, beside decode steps, and over the road between two hosts.

    python -m benchmarks.transfer --transport shm --transport mooncake --run-bytes 65536 1048576
    python -m benchmarks.transfer --two --rate 10gbit --transport sockets
    python -m benchmarks.transfer steps --model-config benchmarks/models/qwen3-8b.json --cached \\
        --transport sockets/tcp --batch 32 --rates 0,1,2,inf
    python -m benchmarks.transfer roads --roads 0.25gbit,1gbit --modes auto,never --out results

Without a word: throughput and latency of one transport. With --two the source is in another network
namespace (root, iproute2), whose road `tc` may slow down.
Both ends, the copy and the network stack share this machine's cores, so only ratios count. A pull
is polled in a closed loop, as an idle engine would; `first run` is the time of a pull of a single
run, which is what a short prompt sees.

`steps`: decode steps of one engine while KV is pulled beside them from another process on its GPU.
--rates: GB/s asked of the road; 0: nothing is pulled; inf: the next pull starts when one ends. They
take turns, since a GPU at the limit of its power slows down. One transport a run: mooncake is
configured once a process.

`roads`: what clients see of a cluster over two hosts in network namespaces (root) at each speed of
the road between them: two prefill workers on one and two decode workers on the other, with random
weights whose KV is large beside what it takes to compute it (64 KiB a token: an 8B model has 144,
and a GPU is as much faster). Every road has every disaggregation.mode, by turns, under the same
arrivals. The kernel here has no netem: no delays.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks import two_hosts
from benchmarks.engine import Case
from benchmarks.instruments import Bench, add_engine_options, build
from benchmarks.load.report import aligned
from benchmarks.load.result import read
from benchmarks.output import parser, shown, write
from benchmarks.served import REPOSITORY, make_model
from benchmarks.timing import DEVICE
from tests.support import namespaces
from worker.cache.layout import MemoryRegion
from worker.registry import resolve
from worker.transfer.base import TRANSPORTS, Endpoint, KVTransport, Peer, PullState, Run

KINDS = {"shm": "shm", "mooncake": "tcp", "sockets": "tcp"}
CLONE_NEWNET = 0x40000000
FAR = "10.79.0.2"
CONNECT_S = 10.0
NUM_SINGLE_RUNS = 50
POLL_S = 2e-5  # between two polls; others of this process have their turn then
FIRST_STEPS = 8  # which are counted with the prompts
COLUMNS = {  # of the table
    "transport": "{transport}",
    "run bytes": "{run_bytes}",
    "runs": "{num_runs}",
    "GiB/s (min..max)": "{gib_per_s_median:.2f} ({gib_per_s_min:.2f}..{gib_per_s_max:.2f})",
    "cpu s/GB": "{cpu_s_per_gb:.2f}",
    "us/run": "{us_per_run:.1f}",
    "first run us": "{first_run_us_p50:.1f}",
    "max": "{first_run_us_max:.1f}",
}


class Place(NamedTuple):
    """Where the source is, and both hosts' addresses."""

    host: str = "127.0.0.1"
    far: str = "127.0.0.1"
    netns: str = ""  # "": in this one
    device: str = "cpu"


class Memory:
    """Memory as a pool makes it, of random bytes if they are to be pulled."""

    def __init__(self, num_bytes: int, device: str, *, filled: bool) -> None:
        fd = None
        if device == "cpu":
            fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        else:
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if filled:
            drawn = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
            self.bytes.copy_(torch.from_numpy(drawn))
        self.region = MemoryRegion("target", self.bytes.data_ptr(), num_bytes, fd)

    def registered(self, transport: str, host: str) -> KVTransport:
        """The transport NAME/KIND that pulls from it and into it."""
        name, kind = transport.split("/")
        made = resolve("transport", name, TRANSPORTS)(host, kind)
        made.register([self.region])
        return made


def serve(transport: str, num_bytes: int, place: Place, conn: Connection) -> None:
    """Main function of the source process; ends with its parent."""
    if place.netns:
        with open(f"/run/netns/{place.netns}") as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
    memory = Memory(num_bytes, place.device, filled=True)
    made = memory.registered(transport, place.far)
    conn.send_bytes(msgspec.msgpack.encode(made.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


@contextlib.contextmanager
def source(transport: str, num_bytes: int, place: Place) -> Iterator[tuple[Peer, Memory, int]]:
    """Another process's memory, ours that it is pulled into, and that process's pid."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(transport, num_bytes, place, theirs), daemon=True)
    process.start()
    theirs.close()
    memory = Memory(num_bytes, place.device, filled=False)
    made = memory.registered(transport, place.host)
    assert process.pid is not None
    try:
        endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
        yield made.connect(endpoint, CONNECT_S), memory, process.pid
    finally:
        made.close()
        ours.close()
        process.join()


def scattered(num: int, num_bytes: int) -> list[Run]:
    """So many runs, in another order at either end."""
    rng = random.Random(0)
    here, there = (rng.sample(range(num), num) for _ in range(2))
    return [
        Run(0, a * num_bytes, b * num_bytes, num_bytes) for a, b in zip(here, there, strict=True)
    ]


def pull_s(peer: Peer, runs: Sequence[Run]) -> float:
    """Seconds from the start of a pull to its end."""
    began = time.perf_counter()
    pull = peer.pull(runs)
    while (state := pull.poll()) is PullState.RUNNING:
        time.sleep(POLL_S)
    took_s = time.perf_counter() - began
    if state is not PullState.OK:
        raise RuntimeError(pull.error)
    return took_s


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, the kernel for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(peer: Peer, run_bytes: int, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    """One row: --total-mb in scattered runs, --repeat times, then single runs.

    pid: of the source.
    """
    runs = scattered(max(1, (options.total_mb << 20) // run_bytes), run_bytes)
    rng, num_bytes = random.Random(1), len(runs) * run_bytes
    pull_s(peer, runs)  # faults the pages in
    computed_s = sum(map(cpu_s, (os.getpid(), pid)))
    whole_s = [pull_s(peer, runs) for _ in range(options.repeat)]
    computed_s = sum(map(cpu_s, (os.getpid(), pid))) - computed_s
    single_s = [pull_s(peer, [rng.choice(runs)]) for _ in range(NUM_SINGLE_RUNS)]
    rates = [num_bytes / took_s / (1 << 30) for took_s in whole_s]
    return {
        "run_bytes": run_bytes,
        "num_runs": len(runs),
        "gib_per_s_median": statistics.median(rates),
        "gib_per_s_min": min(rates),
        "gib_per_s_max": max(rates),
        "cpu_s_per_gb": computed_s / (options.repeat * num_bytes / 1e9),
        "us_per_run": statistics.median(whole_s) / len(runs) * 1e6,
        "first_run_us_p50": statistics.median(single_s) * 1e6,
        "first_run_us_max": max(single_s) * 1e6,
    }


def two_places(options: argparse.Namespace) -> Place:
    """Another network namespace, whose road is as slow as asked."""
    namespaces.enter("benchmarks.transfer")
    netns = namespaces.join("far", FAR)
    for inside, end in ((["ip", "netns", "exec", netns], "eth0"), ([], "vfar")):
        if options.rate:
            limit = f"root tbf rate {options.rate} burst 4mb latency 50ms"
            namespaces.run(*inside, "tc", "qdisc", "add", "dev", end, *limit.split())
    return Place(namespaces.GATEWAY, FAR, netns)


def links() -> None:
    """Throughput and latency: a row for each transport and size of a run."""
    made = parser(__doc__)
    add = made.add_argument
    add("--transport", action="append", choices=sorted(KINDS))
    add("--run-bytes", type=int, nargs="+", default=[4096, 16384, 65536, 1 << 20, 16 << 20])
    add("--total-mb", type=int, default=128, help="MiB per pull")
    add("--repeat", type=int, default=5)
    add("--two", action="store_true", help="the source is in another network namespace")
    add("--rate", default="", help="of the road between the two, as tc writes it")
    options = made.parse_args()
    place = two_places(options) if options.two else Place()
    num_bytes = max(options.total_mb << 20, *options.run_bytes)
    rows: list[dict[str, Any]] = []
    for name in options.transport or sorted(KINDS):
        transport = f"{name}/{KINDS[name]}"
        with source(transport, num_bytes, place) as (peer, memory, pid):
            for size in options.run_bytes:
                rows.append({"transport": transport} | measure(peer, size, options, pid))
            pull_s(peer, [Run(0, 0, 0, num_bytes)])
            wanted = Memory(num_bytes, "cpu", filled=True).bytes
            assert torch.equal(memory.bytes, wanted), "pulled bytes differ"
    cells = [[text.format(**row) for text in COLUMNS.values()] for row in rows]
    print("\n".join(aligned([list(COLUMNS), *cells])))
    write(options.json, {"options": shown(options), "rows": rows})


class Puller:
    """A thread that pulls again and again within a block; `rate` in GB/s."""

    def __init__(self, peer: Peer, runs: list[Run], rate: float) -> None:
        self._peer, self._runs, self._rate = peer, runs, rate
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.gb_s = 0.0  # that were moved

    def __enter__(self) -> "Puller":
        if self._rate > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._rate > 0:
            self._thread.join()

    def _run(self) -> None:
        gb, moved = sum(run.num_bytes for run in self._runs) / 1e9, 0.0
        began = time.perf_counter()
        while not self._ends.is_set():
            pull_s(self._peer, self._runs)
            moved += gb
            self._ends.wait(max(0.0, began + moved / self._rate - time.perf_counter()))
        self.gb_s = moved / (time.perf_counter() - began)


def step_times(bench: Bench, case: Case, num_tokens: int) -> tuple[list[float], float]:
    """Milliseconds between the ends of decode steps, and those until the first of them."""
    ends = [time.perf_counter()]

    def watch(_plan: object, _drawn: object, _num_tokens: int, all_run: bool) -> None:
        if all_run:
            ends.append(time.perf_counter())

    bench.generate(case.batch, case.prompt_len, case.draws(num_tokens), 0, watch)
    first = FIRST_STEPS + 1
    times = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends[first:])]
    return times, 1e3 * (ends[first] - ends[0])


def steps() -> None:
    """Decode steps beside pulls at each rate."""
    made = parser(__doc__)
    add_engine_options(made)
    add = made.add_argument
    add("--batch", type=int, default=32, help="rows")
    add("--rates", default="0,1,2,inf", help="GB/s, by commas")
    add("--pull-mb", type=int, default=256, help="MiB of a pull")
    add("--page-kb", type=int, default=256, help="KiB of a page's group, the least that moves")
    add("--repeat", type=int, default=5)
    made.set_defaults(phase="decode")
    options = made.parse_args()
    assert options.transport, "--transport NAME/KIND"
    bench = Bench(build(options, options.batch))
    case = Case(options.batch, options.prompt_len, "greedy")
    rates = [float(rate) for rate in options.rates.split(",")]
    rows = {rate: {"gb_s": [], "mean_ms": [], "worst_ms": [], "start_ms": []} for rate in rates}
    runs = scattered((options.pull_mb << 10) // options.page_kb, options.page_kb << 10)
    there = source(options.transport, options.pull_mb << 20, Place(device=DEVICE))
    with there as (peer, *_):
        pull_s(peer, runs)  # connects
        step_times(bench, case, options.output_len)  # its prompts are in the cache from now on
        for _, rate in itertools.product(range(options.repeat), rates):
            with Puller(peer, runs, rate) as puller:
                times, start_ms = step_times(bench, case, options.output_len)
            figures = puller.gb_s, statistics.mean(times), max(times), start_ms
            for of, figure in zip(rows[rate].values(), figures, strict=True):
                of.append(figure)
    print(f"{options.transport}, {options.batch} rows, medians of {options.repeat}")
    print("GB/s asked   moved  ms a step    least     most  x first   worst   start")
    base = statistics.median(rows[rates[0]]["mean_ms"])
    for rate, of in rows.items():
        gb_s, step, worst, start = map(statistics.median, of.values())
        print(
            f"{rate:10.3g}{gb_s:8.2f}{step:11.3f}{min(of['mean_ms']):9.3f}{max(of['mean_ms']):9.3f}"
            f"{step / base:9.3f}{worst:8.2f}{start:8.1f}"
        )
    write(options.json, {"options": shown(options), "rows": rows})
    bench.engine.close()


def served(model: Path, name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One cluster over two hosts under its arrivals, and how many prompts were pulled."""
    path = options.out / f"load-{name}.json"
    sets = [
        "model.load_format=dummy", "prefill.resources={a: 1}", "decode.resources={b: 1}",
        f"disaggregation.mode={mode}", "prefill.engine.prefix_cache=false",
        "decode.engine.prefix_cache=false", *options.set,
    ]  # fmt: skip
    arguments = ["--model", str(model), "--prefill", "2", "--decode", "2"]
    arguments += [word for each in sets for word in ("--set", each)]
    with two_hosts.serving_on_a(arguments, options.out / f"{name}.log"):
        two_hosts.script(
            "run", sys.executable, "-m", "benchmarks.load", "--url", two_hosts.URL, "--endpoint",
            "completions", "--tokenizer", str(model), "--quiet", "--json", str(path),
            "--source", options.source, "--rate", str(options.rate), "--duration",
            str(options.duration), "--slo", options.slo, "--extra", '{"temperature": 0}',
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        groups = json.loads(two_hosts.get(f"{two_hosts.URL}/metrics/targets"))
        targets = [target for group in groups for target in group["targets"]]
        lines = "\n".join(two_hosts.get(f"http://{each}/metrics") for each in targets).splitlines()
    placed = {"remote": 0.0, "all": 1e-9}
    for line in lines:
        if line.startswith("kvlane_prefill_placed_total{"):
            num = float(line.rpartition(" ")[2])
            placed["remote"] += num * ('where="remote"' in line)
            placed["all"] += num
    (summary,) = read(path).summaries
    latency, requests = summary["latency"], summary["requests"]
    pulled = summary["stages"].get("pulled", {"bytes": 0, "seconds": 0.0})
    return {
        "failed": requests["sent"] - requests["served"],
        "ttft_ms": 1e3 * latency["ttft_s"]["p50"],
        "ttft_p90_ms": 1e3 * latency["ttft_s"]["p90"],
        "tpot_ms": 1e3 * latency["tpot_s"]["p50"],
        "e2e_ms": 1e3 * latency["e2e_s"]["p50"],
        "good_per_s": summary["goodput"]["good_per_s"],
        "pulled_share": placed["remote"] / placed["all"],
        "pulled_gb_per_s": pulled["bytes"] / 1e9 / max(1e-9, pulled["seconds"]),
    }


def roads() -> int:
    """A cluster at each speed of the road and in each mode; 0 if all requests were served."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model-config", type=Path, default=REPOSITORY / "benchmarks/models/small-wide-kv.json")
    add("--roads", default="0.25gbit,1gbit,10gbit,25gbit", help="as tc writes them")
    add("--modes", default="auto,always,never")
    add("--rate", type=float, default=3.0, help="requests a second")
    add("--duration", type=float, default=15.0, help="seconds of arrivals of a run")
    add("--source", default="synthetic:128-512,8-32", help="as of benchmarks.load")
    add("--slo", default="ttft=1,tpot=0.1")
    add("--repeat", type=int, default=2, help="runs of each mode")
    add("--set", action="append", default=[], metavar="A.B=C", help="more configuration for serve")
    add("--out", type=Path, required=True, help="a directory")
    options = made.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvlane-roads-") as folder:
        make_model(options.model_config, Path(folder))
        two_hosts.script("up")
        try:
            for road in options.roads.split(","):
                two_hosts.slow_down(road)
                modes = options.modes.split(",")
                for number, mode in ((i, mode) for i in range(options.repeat) for mode in modes):
                    row = served(Path(folder), f"{road}-{mode}-{number}", mode, options)
                    rows.setdefault((road, mode), []).append(row)
                    print(f"{road} {mode}: {row['ttft_ms']:.0f} ms", flush=True)
        finally:
            two_hosts.script("down")
    names = list(next(iter(rows.values()))[0])
    medians = [
        [*key, *(f"{statistics.median(row[name] for row in of):.3g}" for name in names)]
        for key, of in rows.items()
    ]
    print("\n".join(aligned([["road", "mode", *names], *medians])))
    flat = [{"road": road, "mode": mode} | row for (road, mode), of in rows.items() for row in of]
    write(options.json or options.out / "roads.json", {"options": shown(options), "rows": flat})
    return int(any(row["failed"] for row in flat))


def main() -> int:
    """Measure, print a table, write the figures."""
    ways = {"steps": steps, "roads": roads}
    way = ways.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if way is not None:
        del sys.argv[1]
    return (way or links)() or 0


if __name__ == "__main__":
    sys.exit(main())
