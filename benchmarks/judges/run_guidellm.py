"""Run guidellm 0.8 against a server and write its figures in our format, one row a strategy.

    python -m benchmarks.judges.run_guidellm --profile constant --rate 4 --seconds 20
    python -m benchmarks.judges.run_guidellm --profile concurrent --streams 1 4 8 --requests 40
    python -m benchmarks.judges.run_guidellm --profile sweep --sweep-size 4 --seconds 10
    python -m benchmarks.judges.run_guidellm --trace T.jsonl --block-size 16

Its Poisson arrivals are off (asked 10/s, sent 14 to 16/s), so no profile here uses them. It does
not tell the gaps between chunks. Requests that still run when a strategy's time is over are cut off
and counted as incomplete.
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

# By default it starts ten processes, each of which imports torch: a minute of start-up on two
# cores, and then they fight with the server for them.
QUIET = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "OMP_NUM_THREADS": "1"}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("guidellm 0.8 as a judge", "/root/judges/guidellm")
    parser.add_argument("--profile", choices=("constant", "concurrent", "sweep"))
    parser.add_argument("--trace", type=Path, help="Mooncake format, replayed at its own times")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a trace's hash id")
    parser.add_argument("--rate", type=float, nargs="+", default=[4.0], help="of constant")
    parser.add_argument("--streams", type=int, nargs="+", default=[4], help="of concurrent")
    parser.add_argument("--sweep-size", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="each strategy's time")
    parser.add_argument("--requests", type=int, help="each strategy's requests")
    parser.add_argument("--input", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    options = parser.parse_args()
    if (options.profile is None) == (options.trace is None):
        parser.error("one of --profile and --trace")
    return options


def load_of(options: argparse.Namespace) -> list[str]:
    """The arguments that say what is sent when."""
    if options.trace is not None:
        data = {
            "kind": "mooncake",
            "source": {"kind": "json_file", "path": str(options.trace.resolve())},
            "hash_id_block_size": options.block_size,
        }
        profile: dict[str, Any] = {"kind": "replay", "time_scale": 0.001}  # the trace is in ms
    else:
        data = {
            "kind": "synthetic_text",
            "prompt_tokens": options.input,
            "output_tokens": options.output,
        }
        profile = {
            "constant": {"kind": "constant", "rate": options.rate},
            "concurrent": {"kind": "concurrent", "streams": options.streams},
            "sweep": {"kind": "sweep", "sweep_size": options.sweep_size},
        }[options.profile]
    limits = []
    if options.seconds is not None:
        limits.append({"kind": "max_duration", "seconds": options.seconds})
    if options.requests is not None:
        limits.append({"kind": "max_requests", "count": options.requests})
    found = ["--data", json.dumps(data), "--profile", json.dumps(profile)]
    for limit in limits:
        found += ["--constraint", json.dumps(limit)]
    return found


def command_of(options: argparse.Namespace, place: Path) -> list[str]:
    """The whole command line of guidellm."""
    backend = {
        "kind": "openai_http",
        "target": options.url,
        "model": options.model,
        "request_format": PATHS[options.endpoint],
    }
    return [
        *(str(options.venv / "bin" / "guidellm"), "run"),
        *("--backend", json.dumps(backend)),
        *load_of(options),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": HUB_NAME})),
        *("--seed", json.dumps({"kind": "static", "value": options.seed})),
        *("--output", json.dumps({"kind": "json", "path": str(place / "result.json")})),
        "--disable-console-interactive",
    ]


def spread(metrics: dict[str, Any], name: str) -> Spread:
    """One of its metrics, over the requests that succeeded."""
    found = (metrics[name] or {}).get("successful")  # None where nothing was due at a time
    if found is None:
        return {}
    percentiles = found["percentiles"]
    return {"p50": percentiles["p50"], "p99": percentiles["p99"], "mean": found["mean"]}


def figures_of(benchmark: dict[str, Any], command: list[str], tool_version: str) -> Figures:
    """One strategy."""
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    strategy = benchmark["config"]["strategy"]
    return Figures(
        tool="guidellm",
        version=tool_version,
        command=command,
        label=" ".join(str(strategy[k]) for k in ("type_", "rate", "streams") if strategy.get(k)),
        requests=totals["successful"],
        errors=totals["errored"],
        wall_s=benchmark["duration"],
        request_per_s=metrics["requests_per_second"]["successful"]["mean"],
        output_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
        ttft_ms=spread(metrics, "time_to_first_token_ms"),
        itl_ms=spread(metrics, "inter_token_latency_ms"),
        notes={
            "incomplete": totals["incomplete"],
            "own_lag_s": spread(metrics, "request_dispatch_delay"),  # of a rate or a trace only
        },
    )


def main() -> None:
    """Run it, read what it wrote."""
    options = parse()
    with workplace(options.keep) as place:
        cache = tokenizer_cache(options.tokenizer, place / "hf")
        command = command_of(options, place)
        run(command, {**cache, **QUIET, "HOME": str(place)}, place)
        report = json.loads((place / "result.json").read_text())
    found = version(options.venv, "guidellm")
    write([figures_of(b, command, found) for b in report["benchmarks"]], options.out)


if __name__ == "__main__":
    main()
