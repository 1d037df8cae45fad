"""Figures of a whole cluster on GPUs: `serve` with random weights under `benchmarks.load`.

    python -m benchmarks.gpu_cluster --gpus 1 --out results              # both workers on one GPU
    python -m benchmarks.gpu_cluster --gpus 2 --kind tcp,nvlink --out results
    python -m benchmarks.gpu_cluster --gpus 0 --model-config worker/assets/tiny/config.json \\
        --prompt-len 64 --output-len 16 --concurrency 4 --num 16 --repeat 1 --out results
    python -m benchmarks.gpu_cluster --gpus 2 --kind nvlink --loads 16,32,48,full \\
        --concurrency 256 --prompt-len 4096 --output-len 2048 --out results
    python -m benchmarks.gpu_cluster --gpus 1 --kind nvlink --concurrency 256,32 --out results

The fourth runs the loads of `benchmarks.serving`: --concurrency is then the number of rows and of
requests of `full` at a time, and the two lengths together are the longest request.

Prompts and answers have exactly their lengths, and all KV is pulled from the prefill worker. For
each kind of transport --out gets the load's JSON, the cluster's log and configuration, and what was
pulled (`cluster-KIND.json`). Runs in a network namespace of its own (root), unless
KVLANE_JUDGES_NAMESPACE is set.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import served, serving
from benchmarks.load.__main__ import main as load
from benchmarks.load.records import SIMULATED
from benchmarks.load.result import read
from benchmarks.output import described, ints, shown, write
from benchmarks.served import REPOSITORY, enter_namespace, get, make_model

PULLED = "kvlane_kv_pulled_bytes_total"


def parse() -> argparse.Namespace:
    """The command line."""
    made = described(__doc__)
    add = made.add_argument
    add("--model-config", type=Path, default=REPOSITORY / "benchmarks/models/qwen3-8b.json")
    add("--gpus", type=int, default=1, help="0: CPUs; 1: shared by both workers; 2: one each")
    add("--chunk", type=int, default=2048, help="prompt tokens of one prefill step")
    add("--set", action="append", default=[], metavar="A.B=C", help="more configuration for serve")
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True, help="a directory")
    add("--kind", default="tcp", help="transport.kind; several, comma-separated, one by one")
    add("--mode", default="always", help="disaggregation.mode")
    add("--num", type=int, default=256, help="requests of a run")
    add("--repeat", type=int, default=3, help="runs")
    add("--concurrency", type=ints, default="32", help="requests at a time; 256,32: one by one")
    add("--prompt-len", type=int, default=512, help="tokens")
    add("--output-len", type=int, default=128, help="tokens")
    add("--loads", default="", metavar="16,32,full", help="those of benchmarks.serving instead")
    return made.parse_args()


def serve_config(options: argparse.Namespace, model: Path, kind: str) -> dict[str, Any]:
    """The tree that `serve` gets."""
    num_gpus = {0: 0.0, 1: 0.5, 2: 1.0}[options.gpus]
    device = "cuda" if options.gpus else "cpu"
    engine = {"device": device, "prefix_cache": False}
    of_prefill = {**engine, "max_prefill_tokens": options.chunk}
    of_decode = {
        **engine, "max_num_reqs": max(options.concurrency), "growth_tokens": options.output_len,
    }  # fmt: skip
    model_of = {
        "path": str(model), "served_name": options.model_config.stem, "load_format": "dummy",
        "max_model_len": options.prompt_len + options.output_len + 64,
    }  # fmt: skip
    return {
        "model": model_of,
        "prefill": {"num_gpus": num_gpus, "engine": of_prefill},
        "decode": {"num_gpus": num_gpus, "engine": of_decode},
        "transport": {"kind": kind},
        "disaggregation": {"mode": options.mode},
        "cluster": {"local_ray": {"num_gpus": options.gpus}},
    }


def run_load(
    url: str, model: Path, path: Path, options: argparse.Namespace, kind: str, at_a_time: int
) -> int:
    """Run `benchmarks.load`, or with --loads `benchmarks.serving`, against `url`; its exit code."""
    harness, num = (serving.main if options.loads else load), str(at_a_time)
    arguments = ["--name", kind, "--rates", options.loads, "--full", num]
    if not options.loads:
        lengths = f"synthetic:{options.prompt_len},{options.output_len}"
        arguments = ["--source", lengths, "--concurrency", num, "--warmup", num]
        arguments += ["--num", str(options.num), "--repeat", str(options.repeat)]
    return harness([
        "--url", url, "--endpoint", "completions", "--extra", '{"temperature": 0}', "--tokenizer",
        str(model), "--quiet", "--json", str(path), *arguments,
    ])  # fmt: skip


def totals(url: str) -> dict[str, float]:
    """Sums, counts and counters of all processes by name, labels left out."""
    groups = json.loads(get(f"{url}/metrics/targets"))
    texts = [get(f"http://{target}/metrics") for group in groups for target in group["targets"]]
    sums: dict[str, float] = {}
    for family in (family for text in texts for family in text_string_to_metric_families(text)):
        for sample in family.samples:
            if sample.name.endswith(("_sum", "_count", "_total")):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def measure(options: argparse.Namespace, model: Path, kind: str) -> int:
    """One cluster, from its start to its end; 0, or what the load returned.

    Its configuration and its log are `serve-KIND.yaml` and `cluster-KIND.log` in `options.out`.
    """
    out: Path = options.out
    several, config = len(options.concurrency) > 1, out / f"serve-{kind}.yaml"
    paths = {
        num: out / (f"load-{kind}-{num}.json" if several else f"load-{kind}.json")
        for num in options.concurrency
    }
    for path in paths.values():
        path.unlink(missing_ok=True)  # of an earlier run
    config.write_text(yaml.safe_dump(serve_config(options, model, kind), sort_keys=False))
    sets = [word for each in options.set for word in ("--set", each)]
    began = time.monotonic()
    try:
        with served.serving(["--config", str(config), *sets], options.port, keep=out) as url:
            start_s = time.monotonic() - began
            print(f"{kind}: ready after {start_s:.1f} s", flush=True)
            codes = [run_load(url, model, path, options, kind, num) for num, path in paths.items()]
            (row,) = json.loads(get(f"{url}/v1/models"))["data"]
            sums = totals(url)
            about = {
                "options": shown(options), "start_s": start_s, "totals": sums,
                "load": ",".join(path.name for path in paths.values()),
                "config": json.loads(get(f"{url}/config")), SIMULATED: row.get(SIMULATED, 0.0),
            }  # fmt: skip
    finally:
        if (out / "cluster.log").exists():
            (out / "cluster.log").rename(out / f"cluster-{kind}.log")
    write(out / f"cluster-{kind}.json", about)
    pulled = sums.get(PULLED, 0.0)
    is_whole = options.mode != "always" or pulled > 0
    for path in paths.values():
        measured = read(path)
        requests = [summary["requests"] for summary in measured.summaries]
        num_asked = options.repeat * options.num
        if options.loads:
            num_asked = sum(counts["sent"] for counts in requests)
        num_served = sum(counts["served"] for counts in requests)
        is_whole &= num_served >= num_asked
        print(f"{path.stem}: {num_served} of {num_asked} served", flush=True)
    print(f"{pulled / 1e9:.3f} GB of KV pulled", flush=True)
    return next(filter(None, codes), 0 if is_whole else 1)


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
