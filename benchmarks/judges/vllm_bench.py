"""`vllm bench serve` from the wheel's Python files alone, without its compiled parts.

Run by the judge's own Python with the unpacked wheel on PYTHONPATH (see README.md):

    PYTHONPATH=/root/judges/vllm-src /root/judges/vllm/bin/python vllm_bench.py --backend openai ...

The arguments are those of `vllm bench serve`. The `vllm` command itself imports the engine.
"""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    parser = argparse.ArgumentParser("vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
