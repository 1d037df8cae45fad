"""What clients of a server see by load: one table for any servers that get the same requests.

    python -m benchmarks.serving --name kvlane --json kvlane.json.gz --tokenizer MODEL
    python -m benchmarks.serving --name two --json two.json.gz --tokenizer MODEL \\
        --url http://127.0.0.1:8001,http://127.0.0.1:8002
    python -m benchmarks.serving report kvlane.json.gz two.json.gz

A load is a rate (Poisson arrivals for --duration) or `full` (--full requests at any time). Starts,
lengths and texts follow from the load's place among the rates and from the tokenizer, so that all
runs send the same. Several addresses are replicas behind a good balancer: a client process sends
each request where the fewest of its own run. All other flags are those of `kvlane bench`; stages
come from kvlane alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import measurement, options, result
from benchmarks.load.measure import STAGES
from benchmarks.load.records import Result
from benchmarks.load.report import aligned, ms, percent, pick, side_by_side
from benchmarks.output import described

RATES = "16,32,48,full"  # requests per second
LENGTHS = "64+lognormal(446,0.5),32+lognormal(270,0.4)"  # tokens in and out
FULL_LENGTHS = "512,256"
OBJECTIVES = "ttft=300ms,itl=8ms"
GOOD_SHARE = 0.9  # of requests: what the highest rate is asked to hold


def parser() -> argparse.ArgumentParser:
    """Our own flags."""
    made = described(__doc__)
    add = made.add_argument
    add("--name", default="server", help="in the table")
    add("--rates", default=RATES, help="loads (%(default)s)")
    add("--duration", type=float, default=10.0, help="of a rate, s (%(default)g)")
    add("--lengths", default=LENGTHS, help="of a rate's requests: IN,OUT (%(default)s)")
    add("--full", type=int, default=256, help="requests of `full` at a time (%(default)s)")
    add("--full-lengths", default=FULL_LENGTHS, help="IN,OUT (%(default)s)")
    add("--slo", default=OBJECTIVES, help="a good request's (%(default)s)")
    add("--json", type=Path, required=True, metavar="FILE", help="what was measured")
    return made


def measure(argv: Sequence[str]) -> Result:
    """All loads, one run each, as one result; raises as `measurement.measured` does."""
    given, rest = parser().parse_known_args(argv)
    common = [*rest, "--slo", given.slo]
    measured: list[Result] = []
    loads: list[str] = given.rates.split(",")
    for load in loads:
        if load == "full":
            num = str(given.full)
            how = ["--source", f"synthetic:{given.full_lengths}", "--concurrency", num]
            how += ["--num", str(4 * given.full)]
        else:
            how = ["--source", f"synthetic:{given.lengths}", "--rate", load]
            how += ["--duration", str(given.duration)]
        print(f"{given.name}: {load}", file=sys.stderr)
        how += ["--seed", str(len(measured))]
        measured.append(measurement.measured(options.parse([*common, *how])))
    about = {"name": given.name, "loads": loads, "each": [one.workload for one in measured]}
    summaries = [one.summaries[0] for one in measured]
    runs = [one.runs[0] for one in measured]
    shown = {**measured[0].options, "argv": list(argv)}
    made = Result(result.KIND, shown, result.machine(), about, summaries, runs)
    about["name"] = made.named(given.name)
    result.write(given.json, made)
    return made


def report(results: Sequence[Result]) -> list[str]:
    """The table of all loads, the stages at each load, and the highest rate of each server."""
    by_load = [
        (server.workload["name"], zip(server.workload["loads"], server.summaries, strict=True))
        for server in results
    ]
    figures = {(load, name): of for name, loads in by_load for load, of in loads}
    names = (*STAGES, "unaccounted_s")
    titles = [f"{name[:-2].replace('_', ' ')} p50" for name in names]
    rows, stages, held = [], [["ms", *titles]], dict[str, float]()
    for load in dict.fromkeys(load for load, _ in figures):
        for (_, name), of in ((key, of) for key, of in figures.items() if key[0] == load):
            rows.append((f"{load if load == 'full' else load + '/s'}  {name}", [of]))
            if of["stages"]:
                stages.append([rows[-1][0], *(ms(pick(of, "stages", n, "p50")) for n in names)])
            held.setdefault(name, 0.0)
            if load != "full" and (of["goodput"]["share"] or 0.0) >= GOOD_SHARE:
                held[name] = max(held[name], float(load))
    rates = {name: f"{rate:g}/s" if rate else "none" for name, rate in held.items()}
    ends = [f"{name}: highest rate with {percent(GOOD_SHARE)} good: {rates[name]}" for name in held]
    below = ["", *aligned(stages)] if len(stages) > 1 else []
    return [*side_by_side(rows), *below, "", *ends]


def main(argv: Sequence[str]) -> int:
    """0, or 2 for a user's mistake; with `report`, of results that exist."""
    try:
        if argv[:1] == ["report"]:
            asked = argparse.ArgumentParser(prog="python -m benchmarks.serving report")
            asked.add_argument("results", nargs="+", type=Path)
            results = [result.read(path) for path in asked.parse_args(argv[1:]).results]
        else:
            results = [measure(argv)]
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
