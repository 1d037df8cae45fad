"""Figures of a whole cluster on GPUs: `serve` with random weights under `benchmarks.load`.

    python -m benchmarks.gpu_cluster --gpus 1 --out results              # both workers on one GPU
    python -m benchmarks.gpu_cluster --gpus 2 --kind tcp,nvlink --out results
    python -m benchmarks.gpu_cluster --gpus 0 --model-config worker/assets/tiny/config.json \\
        --prompt-len 64 --output-len 16 --concurrency 4 --num 16 --repeat 1 --out results
    python -m benchmarks.gpu_cluster --gpus 2 --kind nvlink --loads 16,32,48,full \\
        --concurrency 256 --prompt-len 4096 --output-len 2048 --out results

The third needs no GPU. The last runs the loads of `benchmarks.serving`: --concurrency is then the
number of rows and of requests of `full` at a time, and the two lengths together are the longest
request that is served.

Every prompt has exactly --prompt-len tokens, every answer exactly --output-len, and all KV is
pulled from the prefill worker. For each kind of transport a cluster is started and asked, and --out
gets the load's JSON, the cluster's log and configuration and, in `cluster-KIND.json`, the machine
and what was pulled. Runs in a network namespace of its own (root), unless KVLANE_JUDGES_NAMESPACE
is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.judges.served import REPOSITORY, enter_namespace, make_model, serving
from benchmarks.load.records import SIMULATED
from benchmarks.load.result import machine, read, version_of

PULLED = "kvlane_kv_pulled_bytes_total"
PACKAGES = ("torch", "triton", "ray", "flashinfer-python", "mooncake-transfer-engine-cuda13")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cluster_options(parser)
    add = parser.add_argument
    add("--kind", default="tcp", help="of mooncake; several, comma-separated, one after another")
    add("--mode", default="always", help="disaggregation.mode")
    add("--num", type=int, default=256, help="requests of a run")
    add("--repeat", type=int, default=3, help="runs")
    add("--concurrency", type=int, default=32)
    add("--prompt-len", type=int, default=512, help="tokens")
    add("--output-len", type=int, default=128, help="tokens")
    add("--loads", default="", metavar="16,32,full", help="those of benchmarks.serving instead")
    return parser.parse_args()


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Flags of every benchmark that serves a cluster of its own."""
    add = parser.add_argument
    add("--model-config", type=Path, default=REPOSITORY / "benchmarks/models/qwen3-8b.json")
    add("--gpus", type=int, default=1, help="0: CPUs; 1: shared by both workers; 2: one each")
    add("--chunk", type=int, default=2048, help="prompt tokens of one prefill step")
    add("--set", action="append", default=[], metavar="A.B=C", help="more configuration for serve")
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True, help="a directory")


def serve_config(options: argparse.Namespace, model: Path, kind: str) -> dict[str, Any]:
    """The tree that `serve` gets."""
    num_gpus = {0: 0.0, 1: 0.5, 2: 1.0}[options.gpus]
    device = "cuda" if options.gpus else "cpu"
    engine = {"device": device, "prefix_cache": False}
    tokens = options.prompt_len + options.output_len
    return {
        "model": {
            "path": str(model), "served_name": options.model_config.stem, "load_format": "dummy",
            "max_model_len": tokens + 64,
        },
        "prefill": {
            "num_gpus": num_gpus,
            "engine": {**engine, "max_prefill_tokens": options.chunk},
        },
        "decode": {
            "num_gpus": num_gpus,
            "engine": {
                **engine, "max_num_reqs": options.concurrency, "growth_tokens": options.output_len
            },
        },
        "transport": {"name": "mooncake", "kind": kind},
        "disaggregation": {"mode": options.mode},
        "cluster": {"local_ray": {"num_gpus": options.gpus}},
    }  # fmt: skip


def run_load(url: str, model: Path, path: Path, *arguments: str, harness: str = "load") -> int:
    """Run `benchmarks.<harness>` against `url` with more arguments; its exit code."""
    command = [
        sys.executable, "-m", f"benchmarks.{harness}", "--url", url, "--endpoint", "completions",
        "--extra", '{"temperature": 0}', "--tokenizer", str(model), "--quiet", "--json", str(path),
        *arguments,
    ]  # fmt: skip
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def get(url: str) -> str:
    """A body."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def totals(url: str) -> dict[str, float]:
    """Sums, counts and counters of all processes by name, labels left out."""
    groups = json.loads(get(f"{url}/metrics/targets"))
    texts = [get(f"http://{target}/metrics") for group in groups for target in group["targets"]]
    found: dict[str, float] = {}
    for family in (each for text in texts for each in text_string_to_metric_families(text)):
        for sample in family.samples:
            if sample.name.endswith(("_sum", "_count", "_total")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@contextlib.contextmanager
def started(
    options: argparse.Namespace, tree: dict[str, Any], name: str
) -> Iterator[tuple[str, float]]:
    """A cluster that is ready: its URL, and the seconds that it took. Its configuration and its log
    are `serve-NAME.yaml` and `cluster-NAME.log` in `options.out`."""
    out: Path = options.out
    config = out / f"serve-{name}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    sets = [word for each in options.set for word in ("--set", each)]
    began_at = time.monotonic()
    try:
        with serving(["--config", str(config), *sets], options.port, keep=out) as url:
            start_s = time.monotonic() - began_at
            print(f"{name}: ready after {start_s:.1f} s", flush=True)
            yield url, start_s
    finally:
        if (out / "cluster.log").exists():
            (out / "cluster.log").rename(out / f"cluster-{name}.log")


def about(url: str, start_s: float) -> dict[str, Any]:
    """What ran where, for the result file."""
    (row,) = json.loads(get(f"{url}/v1/models"))["data"]
    return {
        "machine": machine(), "versions": {name: version_of(name) for name in PACKAGES},
        "start_s": start_s, "totals": totals(url),
        "config": json.loads(get(f"{url}/config")), SIMULATED: row.get(SIMULATED, 0.0),
    }  # fmt: skip


def measure(options: argparse.Namespace, model: Path, kind: str) -> int:
    """One cluster, from its start to its end; 0, or what the load returned."""
    path = options.out / f"load-{kind}.json"
    path.unlink(missing_ok=True)  # of an earlier run
    with started(options, serve_config(options, model, kind), kind) as (url, start_s):
        if options.loads:
            traces = str(options.out / "traces")
            named = ["--name", kind, "--traces", traces, "--rates", options.loads]
            named += ["--full", str(options.concurrency)]
            code = run_load(url, model, path, *named, harness="serving")
        else:
            code = run_load(
                url, model, path,
                "--source", f"synthetic:{options.prompt_len},{options.output_len}",
                "--concurrency", str(options.concurrency), "--num", str(options.num),
                "--warmup", str(options.concurrency), "--repeat", str(options.repeat),
            )  # fmt: skip
        told = about(url, start_s) | {"load": path.name}
    (options.out / f"cluster-{kind}.json").write_text(json.dumps(told, indent=1) + "\n")
    measured, pulled = read(path), told["totals"].get(PULLED, 0.0)
    found = [each["requests"] for each in measured.summaries]
    num_asked = sum(each["sent"] for each in found)
    if not options.loads:
        num_asked = options.repeat * options.num
    served = sum(each["served"] for each in found)
    print(
        f"{measured.named(kind)}: {served} of {num_asked} served, {pulled / 1e9:.3f} GB of KV "
        "pulled",
        flush=True,
    )
    if code == 0 and (served < num_asked or (options.mode == "always" and not pulled)):
        return 1
    return code


def main() -> int:
    """0 if every request of every kind was served."""
    options = parse()
    enter_namespace("benchmarks.gpu_cluster")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as place:
        make_model(options.model_config, Path(place))
        codes = [measure(options, Path(place), kind) for kind in options.kind.split(",")]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
