"""Run aiperf 0.13 against a server and write its figures in our format.

    python -m benchmarks.judges.run_aiperf --trace T.jsonl [--block-size 16] --out aiperf.json
    python -m benchmarks.judges.run_aiperf --rate 4 --requests 80 --input 200 --output 32
    python -m benchmarks.judges.run_aiperf --concurrency 8 --requests 80

A trace is replayed at its own times. Settings are those under which aiperf's own error is smallest
on two cores: one worker, one record processor, no screen, no scraping of anything during the run.
Token counts are the server's (`usage`): text of a small model does not tokenize back to as many.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.judges.common import (
    HUB_NAME,
    PATHS,
    Figures,
    Spread,
    arguments,
    run,
    tokenizer_cache,
    version,
    workplace,
    write,
)

# The progress reports of its services are the only work it does between requests.
QUIET = {
    "AIPERF_UI_REALTIME_METRICS_ENABLED": "false",
    "AIPERF_SERVICE_CREDIT_PROGRESS_REPORT_INTERVAL": "60",
    "AIPERF_SERVICE_RECORDS_PROGRESS_REPORT_INTERVAL": "60",
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("aiperf 0.13 as a judge", "/root/judges/aiperf")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", type=Path, help="Mooncake format")
    load.add_argument("--rate", type=float, help="requests a second")
    load.add_argument("--concurrency", type=int)
    parser.add_argument("--arrivals", choices=("constant", "poisson"), default="constant")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a trace's hash id")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--input", type=int, default=200, help="tokens of a synthetic prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--warmup", type=int, default=0, help="requests before the measured ones")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--extra", action="append", default=[], metavar="KEY:VALUE")
    return parser.parse_args()


def load_of(options: argparse.Namespace) -> list[str]:
    """The arguments that say what is sent when."""
    if options.trace is not None:
        return [
            *("--input-file", str(options.trace.resolve())),
            *("--custom-dataset-type", "mooncake_trace"),
            *("--isl-block-size", str(options.block_size)),
            "--fixed-schedule",
        ]
    lengths = ["--isl", str(options.input), "--osl", str(options.output)]
    count = ["--request-count", str(options.requests)]
    if options.concurrency is not None:
        return [*lengths, *count, "--concurrency", str(options.concurrency)]
    pattern = ["--arrival-pattern", options.arrivals]
    return [*lengths, *count, "--request-rate", str(options.rate), *pattern]


def command_of(options: argparse.Namespace, place: Path) -> list[str]:
    """The whole command line of aiperf."""
    extra = ["ignore_eos:true", "temperature:0", *options.extra]
    command = [
        *(str(options.venv / "bin" / "aiperf"), "profile"),
        *("--model", options.model, "--tokenizer", HUB_NAME, "--url", options.url),
        *("--endpoint-type", options.endpoint, "--endpoint", PATHS[options.endpoint]),
        "--streaming",
        "--use-server-token-count",
        *load_of(options),
        *("--extra-inputs", *extra),
        *("--random-seed", str(options.seed)),
        *("--workers-max", str(options.workers), "--record-processors", "1"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--export-level", "records", "--artifact-dir", str(place / "artifacts")),
    ]
    if options.warmup:
        command += ["--warmup-request-count", str(options.warmup), "--warmup-concurrency", "1"]
    return command


def spread(summary: dict[str, Any], name: str) -> Spread:
    """One of its metrics; empty if it has none."""
    metric: dict[str, float] = summary.get(name) or {}
    return {ours: metric[its] for ours, its in (("p50", "p50"), ("p99", "p99"), ("mean", "avg"))}


def scalar(summary: dict[str, Any], name: str) -> float:
    """One that is a single number, 0 if it is absent."""
    return float((summary.get(name) or {}).get("avg") or 0.0)


def late(output: str) -> int:
    """How often one of its own event loops was blocked for 25 ms: its times are then not good."""
    return output.count("Event loop for ")


def main() -> None:
    """Run it, read what it wrote."""
    options = parse()
    with workplace(options.keep) as place:
        cache = tokenizer_cache(options.tokenizer, place / "hf")
        command = command_of(options, place)
        run(command, {**cache, **QUIET, "HOME": str(place)}, place)
        summary = json.loads((place / "artifacts" / "profile_export_aiperf.json").read_text())
        blocked = late((place / "output").read_text(errors="replace"))
    names = ("p50", "p90", "p99")
    lag = {q: scalar(summary, f"replay_sched_lag_{q}") for q in names}
    figures = Figures(
        tool="aiperf",
        version=version(options.venv, "aiperf"),
        command=command,
        label="trace" if options.trace is not None else " ".join(load_of(options)),
        requests=int(scalar(summary, "request_count")),
        errors=int(scalar(summary, "error_request_count")),
        wall_s=scalar(summary, "benchmark_duration"),
        request_per_s=scalar(summary, "request_throughput"),
        output_tokens_per_s=scalar(summary, "output_token_throughput"),
        ttft_ms=spread(summary, "time_to_first_token"),
        itl_ms=spread(summary, "inter_token_latency"),
        gaps_ms=spread(summary, "inter_chunk_latency"),
        notes={
            "input_tokens_mean": scalar(summary, "input_sequence_length"),
            "output_tokens_mean": scalar(summary, "output_sequence_length"),
            "own_lag_ms": lag
            if options.trace is not None
            else None,  # against its least late request
            "own_credit_to_start_ms": scalar(summary, "credit_to_start_latency"),
            "own_blocked_event_loops": blocked,
        },
    )
    write([figures], options.out)


if __name__ == "__main__":
    main()
