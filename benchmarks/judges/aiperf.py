"""aiperf 0.13 replays a trace against a server; its figures under our names. Run by `agree`.

Settings are those under which aiperf's own error is smallest on two cores: one worker, one record
processor, no screen, no scraping of anything during the run. Token counts are the server's
(`usage`): text of a small model does not tokenize back to as many.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.judges.served import TINY

HUB_NAME = "local/tiny"  # of the tokenizer inside the hub cache that `tokenizer_cache` lays out
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# The progress reports of its services are the only work it does between requests.
QUIET = {
    "AIPERF_UI_REALTIME_METRICS_ENABLED": "false",
    "AIPERF_SERVICE_CREDIT_PROGRESS_REPORT_INTERVAL": "60",
    "AIPERF_SERVICE_RECORDS_PROGRESS_REPORT_INTERVAL": "60",
}


def tokenizer_cache(home: Path) -> dict[str, str]:
    """Lay the bundled tokenizer out as a Hugging Face hub cache; the environment that finds it.

    aiperf looks a tokenizer up by repository name only once it is offline, and its trace replay
    goes offline by itself, so a plain directory does not do.
    """
    commit = hashlib.sha1((TINY / "tokenizer.json").read_bytes()).hexdigest()  # only a name
    repository = home / "hub" / ("models--" + HUB_NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, snapshot / name)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def command_of(options: argparse.Namespace, trace: Path, place: Path) -> list[str]:
    """The whole command line of aiperf."""
    return [
        *(str(options.venv / "bin" / "aiperf"), "profile"),
        *("--model", options.model, "--tokenizer", HUB_NAME, "--url", options.url),
        *("--endpoint-type", options.endpoint, "--endpoint", PATHS[options.endpoint]),
        "--streaming",
        "--use-server-token-count",
        *("--input-file", str(trace.resolve()), "--custom-dataset-type", "mooncake_trace"),
        *("--isl-block-size", str(options.block_size), "--fixed-schedule"),
        *("--extra-inputs", "ignore_eos:true", "temperature:0"),
        *("--workers-max", "1", "--record-processors", "1"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--artifact-dir", str(place / "artifacts")),
    ]


def replay(options: argparse.Namespace, trace: Path, place: Path) -> dict[str, Any]:
    """Replay `trace` at its own times; its figures. Its files and its output stay in `place`.

    Raises SystemExit if it fails.
    """
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    own = {"HOME": str(place), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    log = place / "output"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command_of(options, trace, place),
            cwd=place,
            env={**kept, **tokenizer_cache(place / "hf"), **QUIET, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    said = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode:
        raise SystemExit(f"aiperf ended with exit code {done.returncode}:\n{said[-6000:]}")
    summary = json.loads((place / "artifacts" / "profile_export_aiperf.json").read_text())
    return figures(summary) | {
        # Its times are not good where one of its event loops was blocked for 25 ms.
        "own_blocked_event_loops": said.count("Event loop for "),
    }


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """What `agree` compares, times in ms, and how late aiperf itself was."""

    def of(name: str, column: str = "avg") -> float:
        return float((summary.get(name) or {}).get(column) or 0.0)

    ttft, itl = "time_to_first_token", "inter_token_latency"
    return {
        "ttft_p50": of(ttft, "p50"), "ttft_p99": of(ttft, "p99"), "itl_p50": of(itl, "p50"),
        "itl_p99": of(itl, "p99"),
        "requests_per_s": of("request_throughput"),
        "tokens_per_s": of("output_token_throughput"),
        "requests": of("request_count"),
        "errors": of("error_request_count"),
        "own_lag_ms": {q: of(f"replay_sched_lag_{q}") for q in ("p50", "p90", "p99")},
    }  # fmt: skip
