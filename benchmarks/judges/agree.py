"""aiperf and our own harness on one trace and one server: do they say the same?

    python -m benchmarks.judges.served --serve "--set ..." -- \\
        python -m benchmarks.judges.agree --url '{url}' --rounds 5 --out agree.json

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

from benchmarks.judges.common import HUB_NAME, REPOSITORY, TOKENIZER
from benchmarks.load import tokens
from benchmarks.load.workload import workload

TRACE = REPOSITORY / "benchmarks" / "load" / "traces" / "tiny.mooncake.jsonl"
BODY = {"ignore_eos": True, "temperature": 0}  # of every request, on both sides
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "requests_per_s", "tokens_per_s")

Row = dict[str, float]


def written_out(trace: Path, block_size: int, path: Path, time_scale: float) -> int:
    """Write `trace` with its prompts as text to `path`; the number of requests."""
    work = workload(
        f"mooncake:{trace}",
        None,
        num_sessions=None,
        duration_s=None,
        seed=0,
        tokenizer=tokens.load(str(TOKENIZER)),
        options={"block_size": block_size, "time_scale": time_scale},
    )
    with path.open("w", encoding="utf-8") as out:
        for session in work.sessions:
            (turn,) = session.turns
            assert isinstance(turn.prompt, str)
            assert session.start_s is not None
            row = {
                "timestamp": 1000 * session.start_s,
                "text_input": turn.prompt,
                "output_length": turn.max_tokens,
            }
            out.write(json.dumps(row) + "\n")
    return len(work.sessions)


def aiperf(options: argparse.Namespace, trace: Path, out: Path) -> tuple[Row, dict[str, Any]]:
    """One replay by aiperf: its figures, and all that its script wrote."""
    module = ["-m", "benchmarks.judges.run_aiperf", "--trace", str(trace), "--out", str(out)]
    _run([*module, "--url", options.url, "--model", options.model, "--venv", str(options.venv)])
    found = json.loads(out.read_text())
    row = {
        "ttft_p50": found["ttft_ms"]["p50"],
        "ttft_p99": found["ttft_ms"]["p99"],
        "itl_p50": found["itl_ms"]["p50"],
        "itl_p99": found["itl_ms"]["p99"],
        "requests_per_s": found["request_per_s"],
        "tokens_per_s": found["output_tokens_per_s"],
    }
    return row, found


def ours(options: argparse.Namespace, trace: Path, out: Path) -> tuple[Row, dict[str, Any]]:
    """One replay by benchmarks.load."""
    _run(
        [
            *("-m", "benchmarks.load", "--source", f"mooncake:{trace}", "--url", options.url),
            *("--model", options.model, "--extra", json.dumps(BODY), "--warmup", "0"),
            *("--json", str(out), "--quiet"),
        ]
    )
    found = json.loads(out.read_text())["summaries"][0]
    latency = found["latency"]
    row = {
        "ttft_p50": 1e3 * latency["ttft_from_send_s"]["p50"],
        "ttft_p99": 1e3 * latency["ttft_from_send_s"]["p99"],
        "itl_p50": 1e3 * latency["tpot_s"]["p50"],
        "itl_p99": 1e3 * latency["tpot_s"]["p99"],
        "requests_per_s": found["throughput"]["requests_per_s"],
        "tokens_per_s": found["throughput"]["output_tokens_per_s"],
    }
    return row, found


def _run(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def compared(rows: dict[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """Of each figure: every round's value of both, their medians, and ours / aiperf's."""
    found: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        values = {tool: [row[name] for row in each] for tool, each in rows.items()}
        medians = {tool: statistics.median(each) for tool, each in values.items()}
        found[name] = {
            "rounds": values,
            "median": medians,
            "ratio": medians["ours"] / medians["aiperf"],
        }
    return found


def main() -> int:
    """1 if a ratio of medians is further from 1 than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake format, with hash ids")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a hash id")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allowed", type=float, default=0.05, help="1 +- this (%(default)g)")
    parser.add_argument("--venv", type=Path, default=Path("/root/judges/aiperf"))
    parser.add_argument("--place", type=Path, default=Path("/tmp/agree"), help="for every file")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    trace = options.place / "text.mooncake.jsonl"
    num = written_out(options.trace, options.block_size, trace, options.time_scale)
    ours(options, trace, options.place / "thrown-away.json")
    rows: dict[str, list[Row]] = {"aiperf": [], "ours": []}
    details: dict[str, list[Any]] = {"aiperf": [], "ours": []}
    for number in range(options.rounds):
        pair = [("aiperf", aiperf), ("ours", ours)]
        for name, replay in pair if number % 2 == 0 else reversed(pair):
            row, whole = replay(options, trace, options.place / f"{name}-{number}.json")
            rows[name].append(row)
            details[name].append(whole)
            shown = "  ".join(f"{key} {value:.2f}" for key, value in row.items())
            print(f"round {number + 1} {name:7}{shown}", flush=True)
    found = compared(rows)
    worst = max(abs(each["ratio"] - 1) for each in found.values())
    print(f"{'':16}{'aiperf':>10}{'ours':>10}{'ratio':>8}   spread of aiperf, of ours")
    for name, each in found.items():
        spreads = "   ".join(f"{min(v):.2f}..{max(v):.2f}" for v in each["rounds"].values())
        line = f"{each['median']['aiperf']:10.2f}{each['median']['ours']:10.2f}"
        print(f"{name:16}{line}{each['ratio']:8.3f}   {spreads}")
    record = {
        "about": f"{num} requests a replay, {options.rounds} rounds, in turn; ms; {HUB_NAME}",
        "url": options.url,
        "trace": str(options.trace),
        "time_scale": options.time_scale,
        "compared": found,
        "own_lag": [each["harness_says"] for each in details["ours"]],
        "aiperf_notes": [each["notes"] for each in details["aiperf"]],
        "versions": {"aiperf": details["aiperf"][0]["version"]},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"largest difference {100 * worst:.1f} % (allowed: {100 * options.allowed:g} %)")
    return int(worst > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
