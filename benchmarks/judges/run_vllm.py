"""Run vLLM's `bench serve` (0.22.1) against a server and write its figures in our format.

    python -m benchmarks.judges.run_vllm --rate 4 --requests 60 --out vllm.json
    python -m benchmarks.judges.run_vllm --concurrency 8 --endpoint completions

Its random dataset: prompts of `--input` tokens (within `--range`), answers of `--output` tokens,
always that long (`--ignore-eos`). Without `--rate` all requests are sent at once, or as
`--concurrency` lets them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.judges.common import PATHS, Figures, Spread, arguments, run, workplace, write

BACKENDS = {"chat": "openai-chat", "completions": "openai"}
RESULT = "result.json"
SHIM = Path(__file__).with_name("vllm_bench.py")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("vLLM's benchmark client as a judge", "/root/judges/vllm")
    parser.add_argument("--source", type=Path, default=Path("/root/judges/vllm-src"))
    parser.add_argument("--rate", type=float, help="requests a second; at once without it")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson")
    parser.add_argument("--concurrency", type=int, help="most requests at a time")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--input", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--range", type=float, default=0.0, help="lengths vary by this ratio")
    parser.add_argument("--warmup", type=int, default=0, help="requests before the measured ones")
    return parser.parse_args()


def command_of(options: argparse.Namespace, place: Path) -> list[str]:
    """The whole command line of the shim, which is that of `vllm bench serve`."""
    backend, path = BACKENDS[options.endpoint], PATHS[options.endpoint]
    command = [
        *(str(options.venv / "bin" / "python"), str(SHIM)),
        *("--backend", backend, "--base-url", options.url, "--endpoint", path),
        *("--model", options.model, "--tokenizer", str(options.tokenizer.resolve())),
        *("--dataset-name", "random", "--num-prompts", str(options.requests)),
        *("--random-input-len", str(options.input), "--random-output-len", str(options.output)),
        *("--random-range-ratio", str(options.range)),
        *("--ignore-eos", "--temperature", "0", "--seed", str(options.seed)),
        *("--num-warmups", str(options.warmup), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(place), "--result-filename", RESULT),
    ]
    if options.rate is not None:
        command += ["--request-rate", str(options.rate), "--burstiness", str(options.burstiness)]
    if options.concurrency is not None:
        command += ["--max-concurrency", str(options.concurrency)]
    return command


def spread(result: dict[str, Any], name: str) -> Spread:
    """One of its metrics."""
    return {
        "p50": result[f"p50_{name}_ms"],
        "p99": result[f"p99_{name}_ms"],
        "mean": result[f"mean_{name}_ms"],
    }


def label_of(options: argparse.Namespace) -> str:
    """Short, of the load."""
    rate = "all at once" if options.rate is None else f"{options.rate}/s"
    limit = "" if options.concurrency is None else f", at most {options.concurrency} at a time"
    return f"{options.endpoint}, {rate}{limit}"


def main() -> None:
    """Run it, read what it wrote."""
    options = parse()
    with workplace(options.keep) as place:
        command = command_of(options, place)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        run(command, {**offline, "PYTHONPATH": str(options.source), "HOME": str(place)}, place)
        result = json.loads((place / RESULT).read_text())
    figures = Figures(
        tool="vllm bench serve",
        version=next(options.source.glob("vllm-*.dist-info"))
        .name.split("-")[1]
        .removesuffix(".dist"),
        command=command,
        label=label_of(options),
        requests=result["completed"],
        errors=result["failed"],
        wall_s=result["duration"],
        request_per_s=result["request_throughput"],
        output_tokens_per_s=result["output_throughput"],
        ttft_ms=spread(result, "ttft"),
        itl_ms=spread(result, "tpot"),  # its TPOT is a mean over one request, its ITL a chunk gap
        gaps_ms=spread(result, "itl"),
        notes={
            "input_tokens": result["total_input_tokens"],
            "output_tokens": result["total_output_tokens"],
            "wanted_output_tokens": options.requests * options.output
            if not options.range
            else None,
        },
    )
    write([figures], options.out)


if __name__ == "__main__":
    main()
