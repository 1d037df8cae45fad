"""aiperf and our own harness on one trace and one server: do they say the same?

    python -m benchmarks.judges.served --model-config benchmarks/models/small.json -- \\
        python -m benchmarks.judges.agree --url '{url}' --model dummy --rounds 5 --out agree.json

Both read the very same file: the trace with its prompts written out (`text_input`), because each
would make another text of a hash id. They take turns; a replay before the first round is thrown
away. Compared is the median over the rounds of each figure, in aiperf's definitions: time to first
token from the send, mean inter-token latency of each request, requests per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.judges import aiperf
from benchmarks.judges.served import REPOSITORY
from benchmarks.load import prompts, result, tokens
from benchmarks.load.workload import workload

TRACE = REPOSITORY / "benchmarks" / "load" / "traces" / "tiny.mooncake.jsonl"
BODY = {"ignore_eos": True, "temperature": 0}  # of every request, on both sides
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "requests_per_s", "tokens_per_s")


def written_out(options: argparse.Namespace, path: Path) -> int:
    """Write the trace with its prompts as text to `path`; the number of requests."""
    work = workload(
        f"mooncake:{options.trace}",
        None,
        num_sessions=options.requests,
        duration_s=None,
        seed=0,
        tokenizer=tokens.load("tiny"),
        options=prompts.Options(block_size=options.block_size, time_scale=options.time_scale),
    )
    with path.open("w", encoding="utf-8") as out:
        for session in work.sessions:
            (turn,) = session.turns
            assert session.start_s is not None
            row = {
                "timestamp": 1000 * session.start_s,
                "text_input": turn.prompt,
                "output_length": turn.max_tokens,
            }
            out.write(json.dumps(row) + "\n")
    return len(work.sessions)


def ours(options: argparse.Namespace, trace: Path, place: Path) -> dict[str, Any]:
    """One replay by benchmarks.load; its result stays in `place`.

    Raises:
        SystemExit: it fails.
    """
    out = place / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.load", "--source", f"mooncake:{trace}"),
            *("--url", options.url, "--model", options.model, "--endpoint", options.endpoint),
            *("--extra", json.dumps(BODY), "--warmup", "0", "--json", str(out), "--quiet"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"benchmarks.load:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    (summary,) = result.read(out).summaries
    ttft, itl = (summary["latency"][name] for name in ("ttft_from_send_s", "tpot_s"))
    return {
        "ttft_p50": 1e3 * ttft["p50"],
        "ttft_p99": 1e3 * ttft["p99"],
        "itl_p50": 1e3 * itl["p50"],
        "itl_p99": 1e3 * itl["p99"],
        "requests_per_s": summary["throughput"]["requests_per_s"],
        "tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "own_lag": summary["harness_says"],
    }


REPLAYS = {"aiperf": aiperf.replay, "ours": ours}


def measured(options: argparse.Namespace, trace: Path) -> dict[str, list[dict[str, Any]]]:
    """The replays of both tools, in turn, after one that is thrown away."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in REPLAYS}
    order = ["ours"]
    for number in range(options.rounds + 1):
        for name in order:
            place = options.place / f"{name}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            row = REPLAYS[name](options, trace, place)
            if number:
                found[name].append(row)
                shown = "  ".join(f"{key} {row[key]:.2f}" for key in FIGURES)
                print(f"round {number} {name:7}{shown}", flush=True)
        order = sorted(REPLAYS, reverse=number % 2 == 1)
    return found


def compared(replays: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each figure: every round's own values, their medians, and the ratio of these."""
    found: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        rounds = {tool: [row[name] for row in rows] for tool, rows in replays.items()}
        medians = {tool: statistics.median(values) for tool, values in rounds.items()}
        ratio = medians["ours"] / medians["aiperf"]
        found[name] = {"rounds": rounds, "median": medians, "ratio": ratio}
    return found


def main() -> int:
    """1 if a ratio of medians is further from 1 than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--endpoint", choices=tuple(aiperf.PATHS), default="chat")
    parser.add_argument("--venv", type=Path, default=Path("/root/judges/aiperf"), help="aiperf's")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a trace's hash id")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake format, with hash ids")
    parser.add_argument("--requests", type=int, help="the trace's first so many; all without it")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allowed", type=float, default=0.05, help="1 +- this (%(default)g)")
    parser.add_argument("--place", type=Path, default=Path("/tmp/agree"), help="for every file")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.place = options.place.resolve()
    options.place.mkdir(parents=True, exist_ok=True)
    trace = options.place / "text.mooncake.jsonl"
    num = written_out(options, trace)
    replays = measured(options, trace)
    found = compared(replays)
    print(f"{'':16}{'aiperf':>10}{'ours':>10}{'ratio':>8}   rounds of aiperf, of ours")
    for name, each in found.items():
        spreads = "   ".join(f"{min(v):.2f}..{max(v):.2f}" for v in each["rounds"].values())
        line = f"{each['median']['aiperf']:10.2f}{each['median']['ours']:10.2f}"
        print(f"{name:16}{line}{each['ratio']:8.3f}   {spreads}")
    record = {
        "about": f"{num} requests a replay, {options.rounds} rounds, in turn; ms",
        "model": options.model,
        "trace": str(options.trace),
        "time_scale": options.time_scale,
        "compared": found,
        "replays": replays,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    worst = max(abs(each["ratio"] - 1) for each in found.values())
    print(f"largest difference {100 * worst:.1f} % (allowed: {100 * options.allowed:g} %)")
    return int(worst > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
