"""Figures of a whole cluster on GPUs: `serve` with random weights under `benchmarks.load`.

    python -m benchmarks.gpu_cluster --gpus 1 --out results              # both workers on one GPU
    python -m benchmarks.gpu_cluster --gpus 2 --kind tcp,nvlink --out results
    python -m benchmarks.gpu_cluster --gpus 0 --model-config worker/assets/tiny/config.json \\
        --prompt-len 64 --output-len 16 --concurrency 4 --num 16 --repeat 1 --out results
    python -m benchmarks.gpu_cluster --gpus 2 --kind nvlink --rates 16,32,48 \\
        --concurrency 256 --prompt-len 4096 --output-len 2048 --out results
    python -m benchmarks.gpu_cluster --gpus 1 --kind nvlink --concurrency 256,32 --out results
    python -m benchmarks.gpu_cluster --gpus 4 --kind nvlink --rates 8,16 --turn decode-1=prefill \\
        --set prefill.replicas=2 --set decode.replicas=2 --out results

Prompts and answers have exactly their lengths, and all KV is pulled from the prefill worker. The
fourth has requests of lengths as of chats arrive at each rate: --concurrency is then the number of
rows, and the two lengths together are the longest request. The last has a worker change its role
halfway through each rate. For each kind of transport --out gets the JSON of each load, which
`kvlane bench report` puts side by side, the cluster's log and configuration, and what was pulled
(`cluster-KIND.json`). Runs in a network namespace of its own (root), unless KVLANE_TEST_NAMESPACE
is set. Needs the packages of the tests.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.__main__ import main as load
from benchmarks.load.records import SIMULATED
from benchmarks.load.result import read
from benchmarks.output import described, ints, shown, write
from tests.e2e.harness import REPOSITORY, Serve, enter_namespace_of, serving

TINY = REPOSITORY / "worker" / "assets" / "tiny"
PULLED = "kvlane_kv_pulled_bytes_total"
CHATS = "synthetic:64+lognormal(446,0.5),32+lognormal(270,0.4)"  # tokens in and out
OBJECTIVES = "ttft=300ms,itl=8ms"  # of a chat


def parse() -> argparse.Namespace:
    """The command line."""
    made = described(__doc__)
    add = made.add_argument
    add("--model-config", type=Path, default=REPOSITORY / "benchmarks/models/qwen3-8b.json")
    add("--gpus", type=int, default=1, help="0: CPUs; 1: shared by both workers; more: one a rank")
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
    add("--rates", type=ints, default=[], help="chats per second instead; 16,32: one by one")
    add("--duration", type=float, default=10.0, help="of a rate, s")
    add("--turn", default="", help="NAME=ROLE, by commas: one halfway through each rate")
    return made.parse_args()


def serve_config(options: argparse.Namespace, model: Path, kind: str) -> dict[str, Any]:
    """The tree that `serve` gets."""
    num_gpus = 0.5 if options.gpus == 1 else float(options.gpus > 1)
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


def loads(options: argparse.Namespace, kind: str) -> dict[Path, list[str]]:
    """The arguments of `benchmarks.load` for each load, by the file of its result."""
    made: dict[Path, list[str]] = {}
    lengths = f"synthetic:{options.prompt_len},{options.output_len}"
    for number in [] if options.rates else options.concurrency:
        num = str(number)
        made[options.out / f"load-{kind}-{num}.json"] = [
            "--source", lengths, "--concurrency", num, "--warmup", num,
            "--num", str(options.num), "--repeat", str(options.repeat),
        ]  # fmt: skip
    for seed, rate in enumerate(options.rates):
        made[options.out / f"load-{kind}-{rate}-a-second.json"] = [
            "--source", CHATS, "--rate", str(rate), "--duration", str(options.duration),
            "--slo", OBJECTIVES, "--seed", str(seed),
            "--max-len", str(options.prompt_len + options.output_len),
        ]  # fmt: skip
    return made


def run_load(url: str, model: Path, path: Path, arguments: list[str]) -> int:
    """Run `benchmarks.load` against `url`; its exit code."""
    return load([
        "--url", url, "--endpoint", "completions", "--extra", '{"temperature": 0}', "--tokenizer",
        str(model), "--quiet", "--json", str(path), *arguments,
    ])  # fmt: skip


def turn(root: Path, asked: str, codes: list[int]) -> None:
    """Have a worker of the cluster below `root` take a role, as NAME=ROLE says."""
    done = Serve(root).command("role", *asked.split("="))
    codes.append(done.returncode)
    print(f"{done.stdout}{done.stderr}", end="", flush=True)


def make_model(model_config: Path, place: Path) -> None:
    """A model directory without weights, with a word for every token id.

    The bundled tokenizer makes the prompts; ids beyond its own stand for numbers, so that every
    token that random weights draw is a piece of text, and so of the stream.
    """
    shutil.copy(model_config, place / "config.json")
    shutil.copy(TINY / "tokenizer_config.json", place)
    size = json.loads(model_config.read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {f"\u0120{token}": token for token in range(len(words), size)}  # \u0120 is a space
    (place / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def get(url: str) -> str:
    """What a URL answers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


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
    asked, config = loads(options, kind), out / f"serve-{kind}.yaml"
    for path in asked:
        path.unlink(missing_ok=True)  # of an earlier run
    config.write_text(yaml.safe_dump(serve_config(options, model, kind), sort_keys=False))
    sets = [word for each in options.set for word in ("--set", each)]
    began = time.monotonic()
    try:
        root = Path(tempfile.mkdtemp(prefix="jd"))
        with serving(["--config", str(config), *sets], options.port, keep=out, root=root) as url:
            start_s = time.monotonic() - began
            print(f"{kind}: ready after {start_s:.1f} s", flush=True)
            codes, turns = list[int](), iter(options.turn.split(","))
            for path, words in asked.items():
                if role := next(turns, ""):
                    threading.Timer(options.duration / 2, turn, (root, role, codes)).start()
                codes.append(run_load(url, model, path, words))
            (row,) = json.loads(get(f"{url}/v1/models"))["data"]
            sums = totals(url)
            about = {
                "options": shown(options), "start_s": start_s, "totals": sums,
                "load": ",".join(path.name for path in asked),
                "config": json.loads(get(f"{url}/config")), SIMULATED: row.get(SIMULATED, 0.0),
            }  # fmt: skip
    finally:
        if (out / "cluster.log").exists():
            (out / "cluster.log").rename(out / f"cluster-{kind}.log")
    write(out / f"cluster-{kind}.json", about)
    pulled = sums.get(PULLED, 0.0)
    is_whole = options.mode != "always" or pulled > 0
    for path in asked:
        requests = [summary["requests"] for summary in read(path).summaries]
        sent, num = (sum(counts[name] for counts in requests) for name in ("sent", "served"))
        is_whole &= num == sent
        print(f"{path.stem}: {num} of {sent} served", flush=True)
    print(f"{pulled / 1e9:.3f} GB of KV pulled", flush=True)
    return next(filter(None, codes), 0 if is_whole else 1)


def main() -> int:
    """0 if every request of every kind was served."""
    options = parse()
    enter_namespace_of("benchmarks.gpu_cluster")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as place:
        make_model(options.model_config, Path(place))
        codes = [measure(options, Path(place), kind) for kind in options.kind.split(",")]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
