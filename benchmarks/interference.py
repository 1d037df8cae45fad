"""What long prompts do to chats that are being answered, with a prefill worker for them or without.

    python -m benchmarks.interference --gpus 2 --kind nvlink --out DIR
    python -m benchmarks.interference --gpus 2 --layouts both-512 --out DIR    # one more, same load
    python -m benchmarks.interference show DIR    # figures and plot of all layouts that are in DIR

`split` is 1 prefill + 1 decode worker; `both-CHUNK` is two workers that each do both, prompts in
chunks of CHUNK tokens. Each gets the same recorded loads: `alone.jsonl` has the chats,
`mixed.jsonl` the same chats and the prompts between them. Both are in DIR, and by layout the
results of the load (`LAYOUT-LOAD.json.gz`) and the machine, versions and configuration
(`LAYOUT.json`). The figures by class of request are in `interference.json`, which keeps those of
layouts whose results are not in DIR any more; `show` draws `interference.html` and, where there is
a Chromium, `interference.png`, of these figures. Runs in a network namespace of its own (root),
unless KVLANE_JUDGES_NAMESPACE is set.

The same without a GPU:

    python -m benchmarks.interference --gpus 0 --model-config worker/assets/tiny/config.json \\
        --chat 64,48 --chats constant:3 --prompt 1024,4 --prompts poisson:0.5 --duration 20 \\
        --repeat 1 --max-num-reqs 16 --layouts split,both-256 --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from benchmarks.gpu_cluster import (
    about,
    cluster_options,
    make_model,
    run_load,
    serve_config,
    started,
)
from benchmarks.interference_figures import LOADS, SPLIT, figures, table
from benchmarks.judges.served import enter_namespace
from benchmarks.load import arrivals, result
from benchmarks.load.lengths import pair

BOTH = "both-"
WARMUP = 16  # requests, the first of the load; 4 at a time

Kind = Literal["chat", "prompt"]


class Row(msgspec.Struct):
    """One line of a load, in Mooncake's form; `type` is the class of the request."""

    timestamp: int  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    type: Kind
    hash_ids: list[int] = []  # no two prompts begin alike


def parse() -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cluster_options(parser)
    add = parser.add_argument
    add("--kind", default="tcp", help="of mooncake, for split")
    add("--layouts", default=f"{SPLIT},{BOTH}2048", help="one after another (%(default)s)")
    add("--chat", default="512,256", help="tokens in and out (%(default)s)")
    add("--chats", default="constant:16", help="when they begin (%(default)s)")
    add("--prompt", default="8192,16", help="tokens in and out (%(default)s)")
    add("--prompts", default="poisson:1.5", help="when they begin (%(default)s)")
    add("--duration", type=float, default=30.0, help="seconds in which requests begin")
    add("--repeat", type=int, default=3, help="runs of the mixed load")
    add("--max-num-reqs", type=int, default=64, help="rows of a decode batch")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def recorded(options: Namespace) -> list[Row]:
    """Requests of both classes in order; each class has random numbers of its own, and lengths
    drawn as `benchmarks.load.lengths` says."""
    rows: list[Row] = []
    classes: tuple[tuple[Kind, str, str], ...] = (
        ("chat", options.chats, options.chat),
        ("prompt", options.prompts, options.prompt),
    )
    for number, (kind, times, lengths) in enumerate(classes):
        rng = np.random.default_rng([options.seed, number])
        starts = arrivals.starts(times, rng, None, options.duration)
        if not starts:
            raise ValueError(f"--{kind}s: {times} has none within {options.duration:g} s")
        draw = pair(lengths, f"--{kind}")
        # Each class begins at 0, so that the first rows, which warm up the cluster, have both.
        rows += [Row(round((at_s - starts[0]) * 1000), *draw(rng), kind) for at_s in starts]
    return sorted(rows, key=lambda row: row.timestamp)


def write_loads(options: Namespace) -> list[Row]:
    """Both loads into `options.out`; the rows of the mixed one.

    Raises:
        ValueError: layouts there were asked something else.
    """
    rows = recorded(options)
    for load in LOADS:
        kept = [row for row in rows if load == "mixed" or row.type == "chat"]
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in kept)
        path = options.out / f"{load}.jsonl"
        if path.exists() and path.read_bytes() != lines:
            raise ValueError(f"{path} is another load: use its options, or another --out")
        path.write_bytes(lines)
    return rows


def layout_config(options: Namespace, model: Path, layout: str, rows: list[Row]) -> dict[str, Any]:
    """The tree that `serve` gets.

    Raises:
        ValueError: there is no such layout.
    """
    chunk = layout.removeprefix(BOTH)
    if layout != SPLIT and not (layout.startswith(BOTH) and chunk.isdigit()):
        raise ValueError(f"--layouts: {layout!r} is neither {SPLIT} nor {BOTH}CHUNK")
    asked = {
        "prompt_len": max(row.input_length for row in rows),
        "output_len": max(row.output_length for row in rows),
        "concurrency": options.max_num_reqs,
        "mode": "always" if layout == SPLIT else "never",
    }
    tree = serve_config(Namespace(**{**vars(options), **asked}), model, options.kind)
    if layout != SPLIT:
        tree["prefill"]["replicas"] = 0
        tree["decode"]["replicas"] = 2
        tree["decode"]["engine"]["max_prefill_tokens"] = int(chunk)
    return tree


def measure(options: Namespace, tree: dict[str, Any], model: Path, layout: str) -> int:
    """One layout, from its start to its end; 0 if every request of both loads was served."""
    codes = []
    (options.out / f"{layout}.json").unlink(missing_ok=True)  # of an earlier run
    with started(options, tree, layout) as (url, start_s):
        for load in LOADS:
            path = options.out / f"{layout}-{load}.json.gz"
            path.unlink(missing_ok=True)
            repeat = options.repeat if load == "mixed" else 1
            code = run_load(
                url, model, path, "--source", f"mooncake:{options.out / load}.jsonl",
                "--warmup", str(WARMUP), "--repeat", str(repeat),
            )  # fmt: skip
            codes.append(code or any(s["requests"]["failed"] for s in result.read(path).summaries))
        told = about(url, start_s)
    asked = {name: str(value) for name, value in vars(options).items() if name != "out"}
    (options.out / f"{layout}.json").write_text(
        json.dumps(told | {"options": asked}, indent=1) + "\n"
    )
    if bool(told["kv_pulled_bytes"]) != (layout == SPLIT):
        print(f"{layout}: {told['kv_pulled_bytes']} bytes of KV were pulled", file=sys.stderr)
        return 1
    return int(any(codes))


def show(out: Path) -> int:
    """Figures and plot of the layouts in `out`; 2 if there are none."""
    from benchmarks.interference_plot import draw

    told = figures(out)
    if not told["layouts"]:
        print(f"error: {out} has neither whole results of a layout nor figures", file=sys.stderr)
        return 2
    print(table(told), end="")
    print(draw(out, told))
    return 0


def main() -> int:
    """0 if every request of every layout was served, 2 if there is nothing to show."""
    if sys.argv[1:2] == ["show"]:
        if len(sys.argv) != 3:
            print("usage: python -m benchmarks.interference show DIR", file=sys.stderr)
            return 2
        return show(Path(sys.argv[2]))
    options = parse()
    enter_namespace("benchmarks.interference")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = write_loads(options)
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as place:
        model = Path(place)
        make_model(options.model_config, model)
        trees = {
            each: layout_config(options, model, each, rows) for each in options.layouts.split(",")
        }
        codes = [measure(options, tree, model, layout) for layout, tree in trees.items()]
    print(table(figures(options.out)), end="")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
