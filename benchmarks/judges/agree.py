"""aiperf and our own harness on one trace and one server: do they say the same?

    python -m benchmarks.judges.agree --model-config benchmarks/models/small.json --json F \\
        --serve "--set prefill.engine.threads=1 --set disaggregation.mode=always"

Without `--url` a cluster is served for it, alone with both in a network namespace; --model-config
gives it random weights of that shape. Both tools read the very same file: the trace with its
prompts written out (`text_input`), because each would make another text of a hash id. They take
turns; a replay before the first round is thrown away. Compared is the median over the rounds of
each figure, in aiperf's definitions.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.judges import aiperf
from benchmarks.judges.served import REPOSITORY, enter_namespace, make_model, serving
from benchmarks.load import prompts, result, words
from benchmarks.load.workload import workload
from benchmarks.output import parser, shown, write

TRACE = REPOSITORY / "benchmarks" / "load" / "traces" / "tiny.mooncake.jsonl"
BODY = {"ignore_eos": True, "temperature": 0}  # of every request, on both sides
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "requests_per_s", "tokens_per_s")
PORT = 8000


def written_out(options: argparse.Namespace, path: Path) -> int:
    """Write the trace with its prompts as text to `path`; the number of requests."""
    how = prompts.Options(block_size=options.block_size, time_scale=options.time_scale)
    bounds = {"num_sessions": options.requests, "duration_s": None}
    source, tokenizer = f"mooncake:{options.trace}", words.load("tiny")
    work = workload(source, None, **bounds, seed=0, tokenizer=tokenizer, options=how)
    with path.open("w", encoding="utf-8") as out:
        for session in work.sessions:
            (turn,) = session.turns
            assert session.start_s is not None
            row = {"timestamp": 1000 * session.start_s, "text_input": turn.prompt}
            out.write(json.dumps(row | {"output_length": turn.max_tokens}) + "\n")
    return len(work.sessions)


def ours(options: argparse.Namespace, trace: Path, place: Path) -> dict[str, Any]:
    """One replay by benchmarks.load; its result stays in `place`. SystemExit: it fails."""
    out = place / "result.json"
    command = [
        *(sys.executable, "-m", "benchmarks.load", "--source", f"mooncake:{trace}"),
        *("--url", options.url, "--model", options.model, "--endpoint", options.endpoint),
        *("--extra", json.dumps(BODY), "--warmup", "0", "--json", str(out), "--quiet"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.load:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (summary,) = result.read(out).summaries
    requests, speeds = summary["requests"], summary["throughput"]
    times = {"ttft": "ttft_from_send_s", "itl": "tpot_s"}
    return {
        **{
            f"{name}_{quantile}": 1e3 * summary["latency"][latency][quantile]
            for name, latency in times.items()
            for quantile in ("p50", "p99")
        },
        "requests_per_s": speeds["requests_per_s"],
        "tokens_per_s": speeds["output_tokens_per_s"],
        "requests": requests["served"],
        "errors": requests["failed"],
        "own_lag_ms": {q: 1e3 * summary["harness"]["lag_s"][q] for q in ("p50", "p90", "p99")},
    }


REPLAYS = {"aiperf": aiperf.replay, "ours": ours}


def measured(options: argparse.Namespace, trace: Path) -> dict[str, list[dict[str, Any]]]:
    """Replays of both tools, in turn, after one that is thrown away."""
    replays: dict[str, list[dict[str, Any]]] = {name: [] for name in REPLAYS}
    order = ["ours"]
    for number in range(options.rounds + 1):
        for name in order:
            place = options.place / f"{name}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            row = REPLAYS[name](options, trace, place)
            if number:
                replays[name].append(row)
                shown = "  ".join(f"{key} {row[key]:.2f}" for key in FIGURES)
                print(f"round {number} {name:7}{shown}", flush=True)
        order = sorted(REPLAYS, reverse=number % 2 == 1)
    return replays


def compared(replays: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each figure: every round's own values, their medians, and the ratio of these."""
    by_name: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        rounds = {tool: [row[name] for row in rows] for tool, rows in replays.items()}
        medians = {tool: statistics.median(values) for tool, values in rounds.items()}
        ratio = medians["ours"] / medians["aiperf"]
        by_name[name] = {"rounds": rounds, "median": medians, "ratio": ratio}
    return by_name


def parsed() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add = made.add_argument
    add("--url", help="of a server that runs, without /v1; else one is started")
    add("--model-config", type=Path, help="of the started server: random weights of this shape")
    add("--serve", default="", help="more arguments for `serve`, as one string")
    add("--model", help="the name that the server gives it")
    add("--endpoint", choices=tuple(aiperf.PATHS), default="chat")
    add("--venv", type=Path, default=Path("/root/judges/aiperf"), help="aiperf's")
    add("--block-size", type=int, default=64, help="tokens of a trace's hash id")
    add("--trace", type=Path, default=TRACE, help="Mooncake format, with hash ids")
    add("--requests", type=int, help="the trace's first so many; all without it")
    add("--time-scale", type=float, default=1.0)
    add("--rounds", type=int, default=5)
    add("--allowed", type=float, default=0.05, help="1 +- this (%(default)g)")
    add("--place", type=Path, default=Path("/tmp/agree"), help="for every file")
    return made.parse_args()


def main() -> int:
    """1 if a ratio of medians is further from 1 than allowed."""
    options = parsed()
    options.model = options.model or ("dummy" if options.model_config else "tiny")
    if not options.url:
        enter_namespace("benchmarks.judges.agree")
    options.place = options.place.resolve()
    options.place.mkdir(parents=True, exist_ok=True)
    trace = options.place / "text.mooncake.jsonl"
    num = written_out(options, trace)
    with ExitStack() as stack:
        if not options.url:
            arguments = shlex.split(options.serve)
            if options.model_config:
                model = options.place / "dummy"
                model.mkdir(exist_ok=True)
                make_model(options.model_config, model)
                arguments += ["--model", str(model), "--set", "model.load_format=dummy"]
            options.url = stack.enter_context(serving(arguments, PORT, keep=options.place))
        replays = measured(options, trace)
    by_name = compared(replays)
    print(f"{'':16}{'aiperf':>10}{'ours':>10}{'ratio':>8}   rounds of aiperf, of ours")
    for name, figure in by_name.items():
        spreads = "   ".join(f"{min(v):.2f}..{max(v):.2f}" for v in figure["rounds"].values())
        line = f"{figure['median']['aiperf']:10.2f}{figure['median']['ours']:10.2f}"
        print(f"{name:16}{line}{figure['ratio']:8.3f}   {spreads}")
    about = {"options": shown(options), "requests": num, "compared": by_name, "replays": replays}
    write(options.json, about)
    worst = max(abs(figure["ratio"] - 1) for figure in by_name.values())
    print(f"largest difference {100 * worst:.1f} % (allowed: {100 * options.allowed:g} %)")
    return int(worst > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
