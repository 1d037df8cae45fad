"""What long prompts do to chats that are being answered, with a prefill worker for them or without.

    python -m benchmarks.interference --gpus 2 --kind nvlink --out DIR
    python -m benchmarks.interference --gpus 2 --layouts both-512 --out DIR    # one more, same load
    python -m benchmarks.interference show DIR    # the table of all layouts measured in DIR

`split` is 1 prefill + 1 decode worker; `both-CHUNK` is two workers that each do both, prompts in
chunks of CHUNK tokens. Each gets the same recorded loads: `alone.jsonl` has the chats,
`mixed.jsonl` the same chats and the prompts between them. Both are in DIR, and by layout the
results of the load (`LAYOUT-LOAD.json.gz`). `interference.json` has of each layout the machine,
versions and configuration, and the figures by class of request. Runs in a network namespace of its
own (root), unless KVLANE_JUDGES_NAMESPACE is set.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from benchmarks.gpu_cluster import (
    PULLED,
    about,
    cluster_options,
    run_load,
    serve_config,
    started,
)
from benchmarks.judges.served import enter_namespace, make_model
from benchmarks.load import arrivals, report, result
from benchmarks.load.lengths import pair
from benchmarks.load.measure import summary
from benchmarks.load.records import Objectives, Result

SPLIT = "split"
LOADS = ("alone", "mixed")
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


def kept(rows: Sequence[Row], load: str) -> list[Row]:
    """Those that are in `load`."""
    return [row for row in rows if load == "mixed" or row.type == "chat"]


def write_loads(options: Namespace) -> list[Row]:
    """Both loads into `options.out`; the rows of the mixed one.

    Raises:
        ValueError: layouts there were asked something else.
    """
    rows = recorded(options)
    for load in LOADS:
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in kept(rows, load))
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


def measure(
    options: Namespace, tree: dict[str, Any], model: Path, layout: str, rows: Sequence[Row]
) -> int:
    """One layout, from its start to its end; 0 if every request of both loads was served."""
    figures: dict[str, Any] = {}
    num_failed = 0
    with started(options, tree, layout) as (url, start_s):
        for load in LOADS:
            path = options.out / f"{layout}-{load}.json.gz"
            repeat = options.repeat if load == "mixed" else 1
            code = run_load(
                url, model, path, "--source", f"mooncake:{options.out / load}.jsonl",
                "--warmup", str(WARMUP), "--repeat", str(repeat),
            )  # fmt: skip
            if code:
                return code
            found = result.read(path)
            num_failed += sum(each["requests"]["failed"] for each in found.summaries)
            figures[load] = by_class(found, kept(rows, load))
        told = about(url, start_s)
    asked = {name: str(value) for name, value in vars(options).items() if name != "out"}
    keep(options.out, layout, told | {"options": asked} | figures)
    pulled = told["totals"].get(PULLED, 0.0)
    if bool(pulled) != (layout == SPLIT):
        print(f"{layout}: {pulled} bytes of KV were pulled", file=sys.stderr)
        return 1
    return int(num_failed > 0)


def by_class(found: Result, rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Class of request -> summaries of the runs (`benchmarks.load.measure`) over it alone.

    Rates are over the time of the whole run, and the harness's lag is that of the whole.
    """
    # The harness numbers sessions in the order of their starts, which is that of the rows.
    kinds = [row.type for row in rows]
    figures: dict[str, list[dict[str, Any]]] = {kind: [] for kind in sorted(set(kinds))}
    for run in found.runs:
        for kind, summaries in figures.items():
            part = [each for each in run.outcomes if kinds[each.session] == kind]
            of_kind = msgspec.structs.replace(run, outcomes=part, schedule=[])
            summaries.append(summary(of_kind, Objectives()))
    return figures


def read(out: Path) -> dict[str, Any]:
    """Layout -> its figures, `split` first, then by chunk; empty if nothing was measured."""
    path = out / "interference.json"
    layouts = json.loads(path.read_text())["layouts"] if path.exists() else {}
    names = sorted(layouts, key=lambda name: (name != SPLIT, len(name), name))
    return {name: layouts[name] for name in names}


def keep(out: Path, layout: str, figures: dict[str, Any]) -> None:
    """Write the figures of `layout` beside those of others."""
    layouts = read(out) | {layout: figures}
    (out / "interference.json").write_text(json.dumps({"layouts": layouts}, indent=1) + "\n")


def show(out: Path) -> int:
    """Print a line for each layout, load and class of request; 2 if nothing was measured."""
    lines = [
        (f"{layout}, {load}: {kind}s", summaries)
        for layout, figures in read(out).items()
        for load in LOADS
        for kind, summaries in figures[load].items()
    ]
    if not lines:
        print(f"error: {out} has no figures of a layout", file=sys.stderr)
        return 2
    print("\n".join(report.side_by_side(lines)))
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
        codes = [measure(options, tree, model, layout, rows) for layout, tree in trees.items()]
    show(options.out)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
