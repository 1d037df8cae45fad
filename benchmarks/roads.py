"""Roads between hosts: what clients of a cluster over two hosts see at each speed of the road.

    python -m benchmarks.roads --out results
    python -m benchmarks.roads --roads 0.25gbit,1gbit --modes auto,never --duration 10 --out results

Two hosts in network namespaces of this machine (tests/e2e/two_nodes.sh; root): two prefill workers
on one and two decode workers on the other, with random weights whose KV is large beside what it
takes to compute it (64 KiB a token: an 8B model has 144, and a GPU is as much faster). `tc` slows
the road between them. Each road is run with every disaggregation.mode, by turns, under the same
arrivals. --out gets the loads' JSON and `roads.json`. The kernel here has no netem: no delays.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.judges.served import REPOSITORY, make_model
from benchmarks.load.result import read
from benchmarks.output import parser, shown, write

SCRIPT = REPOSITORY / "tests" / "e2e" / "two_nodes.sh"
HEAD = "10.78.0.1:6379"
URL = "http://127.0.0.1:8000"
READY_S = 120.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
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
    return made.parse_args(arguments)


def script(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the script."""
    environment = os.environ | {"PYTHON_BIN": str(Path(sys.executable).parent)}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, check=True, text=True, **more
    )


def slow_down(rate: str) -> None:
    """Both ends of the road send so fast from now on."""
    for host in ("a", "b"):
        words = f"ip netns exec kvl{host} tc qdisc replace dev v{host} root tbf rate {rate}"
        subprocess.run([*words.split(), "burst", "4mb", "latency", "50ms"], check=True)


@contextmanager
def serving(model: Path, mode: str, options: argparse.Namespace, log: Path) -> Any:
    """`serve` over both hosts."""
    sets = [
        "model.load_format=dummy", "prefill.resources={a: 1}", "decode.resources={b: 1}",
        f"disaggregation.mode={mode}", "prefill.engine.prefix_cache=false",
        "decode.engine.prefix_cache=false", *options.set,
    ]  # fmt: skip
    words = [word for each in sets for word in ("--set", each)]
    serve = [sys.executable, "-m", "cluster", "serve", "--model", str(model), *words]
    environment = os.environ | {"RAY_ADDRESS": HEAD, "RAY_AUTH_MODE": "disabled"}
    with log.open("wb") as file:  # not by the script, whose shell passes no signal on
        served = subprocess.Popen(
            ["ip", "netns", "exec", "kvla", *serve, "--prefill", "2", "--decode", "2"],
            env=environment, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while "kvlane serves" not in log.read_text():
            if served.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield
    finally:
        served.send_signal(signal.SIGTERM)
        served.wait(60)


def measure(model: Path, name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One cluster under its arrivals: over its requests, and how many prompts were pulled."""
    path = options.out / f"load-{name}.json"
    with serving(model, mode, options, options.out / f"{name}.log"):
        script(
            "run", sys.executable, "-m", "benchmarks.load", "--url", URL, "--endpoint",
            "completions", "--tokenizer", str(model), "--quiet", "--json", str(path),
            "--source", options.source, "--rate", str(options.rate), "--duration",
            str(options.duration), "--slo", options.slo, "--extra", '{"temperature": 0}',
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        targets = json.loads(script("get", f"{URL}/metrics/targets", stdout=-1).stdout)
        texts = [
            script("get", f"http://{target}/metrics", stdout=-1).stdout
            for group in targets
            for target in group["targets"]
        ]
    placed: dict[str, float] = {}
    for line in "\n".join(texts).splitlines():
        if line.startswith("kvlane_prefill_placed_total{"):
            where = line.partition('where="')[2].partition('"')[0]
            placed[where] = placed.get(where, 0.0) + float(line.rpartition(" ")[2])
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
        "pulled_share": placed.get("remote", 0.0) / max(1.0, sum(placed.values())),
        "pulled_gb_per_s": pulled["bytes"] / 1e9 / max(1e-9, pulled["seconds"]),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each road and mode: medians of its runs."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["road"], row["mode"]), []).append(row)
    names = [name for name in rows[0] if name not in ("road", "mode")]
    lines = [" ".join(f"{name:>15}" for name in ("road", "mode", *names))]
    for key, found in runs.items():
        medians = [f"{statistics.median(row[name] for row in found):.3g}" for name in names]
        lines.append(" ".join(f"{text:>15}" for text in (*key, *medians)))
    return "\n".join(lines)


def main() -> int:
    """0 if all requests were served."""
    options = parse()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvlane-roads-") as place:
        model = Path(place)
        make_model(options.model_config, model)
        script("up")
        try:
            for road in options.roads.split(","):
                slow_down(road)
                for number in range(options.repeat):
                    for mode in options.modes.split(","):
                        figures = measure(model, f"{road}-{mode}-{number}", mode, options)
                        rows.append({"road": road, "mode": mode} | figures)
                        print(f"{road} {mode}: {figures['ttft_ms']:.0f} ms", flush=True)
        finally:
            script("down")
    print(table(rows))
    write(options.out / "roads.json", {"options": shown(options), "rows": rows})
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
