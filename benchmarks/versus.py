"""Servers side by side: each is sent the same requests at the same times, in turns.

    python -m benchmarks.versus kvlane=http://a:8000#2 vllm=http://b:8000,http://c:8000#2 \\
        --load "--rate 8 --duration 60 --source random:512,256 --slo ttft=300ms,itl=8ms" \\
        --load "--concurrency 32 --num 256 --source sharegpt:FILE" --tokenizer DIR

A server is NAME=URL, or several URLs of one model, which share its load; #N: of so many GPUs. A
load is in the flags of `kvlane bench`, which also says what its figures are. No two rounds have
prompts in common, so none finds the other's cached, and each begins with another server.

Prints medians of the rounds, how far these lie apart, and ratios to the first server. Exits with 1
if one has served nothing of a load.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load import measurement, options
from benchmarks.load.report import Summary, aligned, ms, number, percent, pick
from benchmarks.load.result import machine

KIND = "kvlane.versus/1"

COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float | None], str], bool], ...] = (
    # label, where it stands in a summary, how it is shown, whether it is a GPU's part
    ("requests/s", ("throughput", "requests_per_s"), number, False),
    ("tokens/s/GPU", ("throughput", "output_tokens_per_s"), number, True),
    ("ttft p50", ("latency", "ttft_s", "p50"), ms, False),
    ("p99", ("latency", "ttft_s", "p99"), ms, False),
    ("tpot p50", ("latency", "tpot_s", "p50"), ms, False),
    ("p99", ("latency", "tpot_s", "p99"), ms, False),
    ("good", ("goodput", "share"), percent, False),
    ("good/s/GPU", ("goodput", "good_per_s"), lambda value: number(value, 2), True),
)


@dataclass(frozen=True, slots=True)
class Server:
    """One of those that are compared."""

    name: str
    urls: tuple[str, ...]
    num_gpus: int


def server_of(text: str) -> Server:
    """NAME=URL,URL#N as a record; raises ValueError."""
    name, equals, rest = text.partition("=")
    urls, _, gpus = rest.partition("#")
    found = tuple(url.rstrip("/").removesuffix("/v1") for url in urls.split(",") if url)
    if not (name and equals and found and (gpus or "1").isdigit() and int(gpus or 1)):
        raise ValueError(f"{text!r} is not NAME=URL[,URL...][#GPUS]")
    return Server(name, found, int(gpus or 1))


def measured(
    servers: Sequence[Server], load: options.Options, num_rounds: int
) -> tuple[list[str], dict[str, list[Summary]]]:
    """Digests of the rounds' requests, and by server the figures of each round."""
    digests: list[str] = []
    found: dict[str, list[Summary]] = {server.name: [] for server in servers}
    for number_of in range(num_rounds):
        first = number_of % len(servers)
        seen = set[str]()
        for server in (*servers[first:], *servers[:first]):
            asked = replace(load, urls=server.urls, seed=load.seed + number_of)
            result = measurement.measured(asked)
            found[server.name] += result.summaries
            seen.add(str(result.workload["digest"]))
        assert len(seen) == 1, "they were sent different requests"
        digests += seen
    return digests, found


def table(servers: Sequence[Server], found: dict[str, list[Summary]]) -> list[str]:
    """A line of medians for each server and one of spreads; then ratios to the first."""
    rows = [["ms", *(label for label, *_ in COLUMNS), "failed"]]
    medians: list[list[float | None]] = []
    for server in servers:
        values = [
            [
                value / (server.num_gpus if is_part else 1)
                for each in found[server.name]
                if (value := pick(each, *path)) is not None
            ]
            for _, path, _, is_part in COLUMNS
        ]
        middle = [statistics.median(column) if column else None for column in values]
        medians.append(middle)
        shown = [show(value) for (_, _, show, _), value in zip(COLUMNS, middle, strict=True)]
        failed = sum(each["requests"]["failed"] for each in found[server.name])
        rows.append([server.name, *shown, str(failed)])
        apart = [
            percent((max(column) - min(column)) / of) if of and len(column) > 1 else "-"
            for column, of in zip(values, middle, strict=True)
        ]
        rows.append(["  apart by", *apart, ""])
    for server, middle in zip(servers[1:], medians[1:], strict=True):
        pairs = zip(middle, medians[0], strict=True)
        ratios = [f"{a / b:.2f} x" if a is not None and b else "-" for a, b in pairs]
        rows.append([f"{server.name} / {servers[0].name}", *ratios, ""])
    doubts = [
        f"{name}: {each['harness_says']}"
        for name, summaries in found.items()
        for each in summaries
        if not each["harness_ok"]
    ]
    return aligned(rows) + doubts


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Server], list[options.Options]]:
    """The command line; raises ValueError, which names what is wrong."""
    lines = (__doc__ or "").splitlines()
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.versus", allow_abbrev=False, description=lines[0],
        epilog="\n".join(lines[2:]), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("servers", nargs="+", metavar="NAME=URL[,URL…][#GPUS]")
    made.add_argument("--load", action="append", required=True, metavar="FLAGS")
    made.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    made.add_argument("--tokenizer", default="", help="as of kvlane bench, for all loads")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    given = made.parse_args(argv)
    servers = [server_of(text) for text in given.servers]
    if len({server.name for server in servers}) < max(2, len(servers)):
        raise ValueError("at least two servers, each with a name of its own")
    loads: list[options.Options] = []
    for text in given.load:
        load = options.parse(shlex.split(text))
        if load.search or load.sessions or load.repeat > 1 or load.json_path or load.agree:
            raise ValueError(f"{text!r}: --rounds repeat it, --json writes it, and rates are given")
        loads.append(replace(load, tokenizer=given.tokenizer or load.tokenizer))
    if given.rounds < 1:
        raise ValueError("--rounds: at least 1")
    return given, servers, loads


def main(argv: Sequence[str] | None = None) -> int:
    """0 if each server has served something of each load, 2 for the user's mistake."""
    try:
        given, servers, loads = parse(sys.argv[1:] if argv is None else argv)
        told: list[dict[str, Any]] = []
        for text, load in zip(given.load, loads, strict=True):
            digests, found = measured(servers, load, given.rounds)
            print("\n".join([f"\n{text}  (requests {', '.join(digests)})", *table(servers, found)]))
            told.append({"load": text, "digests": digests, "figures": found})
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if given.json:
        of = {server.name: msgspec.to_builtins(server) for server in servers}
        whole = {"kind": KIND, "machine": machine(), "servers": of, "loads": told}
        given.json.write_bytes(msgspec.json.encode(whole))
    figures = (rounds for each in told for rounds in each["figures"].values())
    return int(any(not sum(s["requests"]["served"] for s in rounds) for rounds in figures))


if __name__ == "__main__":
    # Client processes are spawned: they import this module under another name.
    sys.exit(main())
