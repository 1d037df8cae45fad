"""aiperf and our own harness on one trace and one server: do they say the same?

    python -m benchmarks.judges.served --dummy 512x8 --serve "--set ..." -- \\
        python -m benchmarks.judges.agree --url '{url}' --model dummy --rounds 5 --out agree.json

Both read the very same file: the trace with its prompts written out (`text_input`), because each
would make another text of a hash id. They take turns; a replay before the first round is thrown
away. Compared is the median over the rounds of each figure, in aiperf's definitions: time to first
token from the send, mean inter-token latency of each request, requests per second. The same over
the requests of all rounds together is written down beside it: a disturbance of one round is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judges.common import REPOSITORY, TOKENIZER
from benchmarks.load import result, tokens
from benchmarks.load.workload import workload

TRACE = REPOSITORY / "benchmarks" / "load" / "traces" / "tiny.mooncake.jsonl"
BODY = {"ignore_eos": True, "temperature": 0}  # of every request, on both sides
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "requests_per_s", "tokens_per_s")

Row = dict[str, float]


@dataclass(slots=True)
class Replay:
    """One replay by one tool."""

    own: Row  # what the tool itself says
    ttft_ms: list[float]  # of every request, from the send
    itl_ms: list[float]  # of every request with several pieces, their mean
    num_tokens: int  # of all answers
    wall_s: float
    says: Any  # about how late it was itself


def written_out(options: argparse.Namespace, path: Path) -> int:
    """Write the trace with its prompts as text to `path`; the number of requests."""
    work = workload(
        f"mooncake:{options.trace}",
        None,
        num_sessions=options.requests,
        duration_s=None,
        seed=0,
        tokenizer=tokens.load(str(TOKENIZER)),
        options={"block_size": options.block_size, "time_scale": options.time_scale},
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


def aiperf(options: argparse.Namespace, trace: Path, place: Path) -> Replay:
    """One replay by aiperf; its own files stay in `place`."""
    out = place / "figures.json"
    module = ["-m", "benchmarks.judges.run_aiperf", "--trace", str(trace), "--out", str(out)]
    where = ["--url", options.url, "--model", options.model, "--venv", str(options.venv)]
    _run([*module, *where, "--keep", str(place)])
    found = json.loads(out.read_text())
    own = {
        "ttft_p50": found["ttft_ms"]["p50"],
        "ttft_p99": found["ttft_ms"]["p99"],
        "itl_p50": found["itl_ms"]["p50"],
        "itl_p99": found["itl_ms"]["p99"],
        "requests_per_s": found["request_per_s"],
        "tokens_per_s": found["output_tokens_per_s"],
    }
    raw = (place / "artifacts" / "profile_export.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line)["metrics"] for line in raw.splitlines()]
    return Replay(
        own,
        [row["time_to_first_token"]["value"] for row in rows],
        [row["inter_token_latency"]["value"] for row in rows if "inter_token_latency" in row],
        sum(row["output_sequence_length"]["value"] for row in rows),
        found["wall_s"],
        found["notes"],
    )


def ours(options: argparse.Namespace, trace: Path, place: Path) -> Replay:
    """One replay by benchmarks.load; its result stays in `place`."""
    out = place / "result.json"
    _run(
        [
            *("-m", "benchmarks.load", "--source", f"mooncake:{trace}", "--url", options.url),
            *("--model", options.model, "--extra", json.dumps(BODY), "--warmup", "0"),
            *("--json", str(out), "--quiet"),
        ]
    )
    found = result.read(out)
    summary, served = found.summaries[0], [each for each in found.runs[0].outcomes if each.chunk_s]
    latency = summary["latency"]
    own = {
        "ttft_p50": 1e3 * latency["ttft_from_send_s"]["p50"],
        "ttft_p99": 1e3 * latency["ttft_from_send_s"]["p99"],
        "itl_p50": 1e3 * latency["tpot_s"]["p50"],
        "itl_p99": 1e3 * latency["tpot_s"]["p99"],
        "requests_per_s": summary["throughput"]["requests_per_s"],
        "tokens_per_s": summary["throughput"]["output_tokens_per_s"],
    }
    return Replay(
        own,
        [1e3 * (each.chunk_s[0] - each.sent_s) for each in served],
        [1e3 * each.tpot_s for each in served if each.tpot_s is not None],
        sum(each.num_output_tokens for each in served),
        found.runs[0].wall_s,
        summary["harness_says"],
    )


def _run(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def pooled(replays: list[Replay]) -> Row:
    """The figures over the requests of all replays of one tool."""
    wall_s = sum(each.wall_s for each in replays)
    ttft = np.percentile([value for each in replays for value in each.ttft_ms], (50, 99))
    itl = np.percentile([value for each in replays for value in each.itl_ms], (50, 99))
    counts = [
        sum(len(each.ttft_ms) for each in replays) / wall_s,
        sum(each.num_tokens for each in replays) / wall_s,
    ]
    return dict(zip(FIGURES, map(float, [*ttft, *itl, *counts]), strict=True))


def compared(replays: dict[str, list[Replay]]) -> dict[str, dict[str, Any]]:
    """Of each figure: every round's own values, their medians, the pooled values, and ratios."""
    both = {tool: pooled(each) for tool, each in replays.items()}
    found: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        rounds = {tool: [one.own[name] for one in each] for tool, each in replays.items()}
        medians = {tool: statistics.median(each) for tool, each in rounds.items()}
        found[name] = {
            "rounds": rounds,
            "median": medians,
            "ratio": medians["ours"] / medians["aiperf"],
            "pooled": {tool: row[name] for tool, row in both.items()},
            "ratio_pooled": both["ours"][name] / both["aiperf"][name],
        }
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake format, with hash ids")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a hash id")
    parser.add_argument("--requests", type=int, help="the trace's first so many; all without it")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allowed", type=float, default=0.05, help="1 +- this (%(default)g)")
    parser.add_argument("--venv", type=Path, default=Path("/root/judges/aiperf"))
    parser.add_argument("--place", type=Path, default=Path("/tmp/agree"), help="for every file")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def measured(options: argparse.Namespace, trace: Path) -> dict[str, list[Replay]]:
    """The replays of both tools, after one that is thrown away."""
    replays: dict[str, list[Replay]] = {"aiperf": [], "ours": []}
    order = [("ours", ours)]
    for number in range(options.rounds + 1):
        for name, replay in order:
            place = options.place / f"{name}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            found = replay(options, trace, place)
            if number:
                replays[name].append(found)
                shown = "  ".join(f"{key} {value:.2f}" for key, value in found.own.items())
                print(f"round {number} {name:7}{shown}", flush=True)
        order = [("aiperf", aiperf), ("ours", ours)][:: 1 if number % 2 == 0 else -1]
    return replays


def main() -> int:
    """1 if a ratio of medians is further from 1 than allowed."""
    options = parse()
    options.place.mkdir(parents=True, exist_ok=True)
    trace = options.place / "text.mooncake.jsonl"
    num = written_out(options, trace)
    replays = measured(options, trace)
    found = compared(replays)
    worst = max(abs(each["ratio"] - 1) for each in found.values())
    print(f"{'':16}{'aiperf':>10}{'ours':>10}{'ratio':>8}{'pooled':>8}   rounds of aiperf, of ours")
    for name, each in found.items():
        spreads = "   ".join(f"{min(v):.2f}..{max(v):.2f}" for v in each["rounds"].values())
        line = f"{each['median']['aiperf']:10.2f}{each['median']['ours']:10.2f}"
        ratios = f"{each['ratio']:8.3f}{each['ratio_pooled']:8.3f}"
        print(f"{name:16}{line}{ratios}   {spreads}")
    record = {
        "about": f"{num} requests a replay, {options.rounds} rounds, in turn; ms",
        "model": options.model,
        "trace": str(options.trace),
        "time_scale": options.time_scale,
        "compared": found,
        "own_lag": [each.says for each in replays["ours"]],
        "aiperf_notes": [each.says for each in replays["aiperf"]],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"largest difference {100 * worst:.1f} % (allowed: {100 * options.allowed:g} %)")
    return int(worst > options.allowed)


if __name__ == "__main__":
    sys.exit(main())
