"""Tokens a second with speculation against without, on one engine.

    python -m benchmarks.windows --model-config benchmarks/models/qwen3-8b.json \\
        --drafter benchmarks/models/qwen3-8b-eagle3.json --batch 1,8,32,64,128,256 \\
        --fixed 5x3.3@1,4x2.9@32,2x1.7@64 --sync 5x3.3@1 --accept 1.2,2.9 --json out.json

Random weights: acceptance is SIMULATED (`--accept`, or the number behind the x of `--fixed`: mean
tokens of a step; below 1 the share of drafts that count where all before them did), all else is
done. First an engine without a drafter, then one with. `--sync` waits for each step before it plans
the next; `replay ms` is what the device alone took at the start, with short contexts.

Only steps count in which every row decodes. They are repeated from the same prompts, of which only
the first is computed; what the choice of widths has learnt stays.
"""

import argparse
import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.instruments import Bench, add_engine_options, build
from benchmarks.output import ints, parser, shown, write
from worker.api import Sampling
from worker.plan import Drawn, Plan
from worker.schedule.width import WidthPolicy


@dataclass(slots=True)
class Rate:
    """Steps of one kind. `run` counts what they yield."""

    rows: int
    width: str  # a number, or auto
    accept: float  # tokens of a step that were asked for; 1 without speculation
    overlap: bool = True
    steps: int = 0
    tokens: int = 0  # of all rows
    seconds: float = 0.0
    widths: Counter[int] = field(default_factory=Counter)  # steps by their width

    def line(self, plain: dict[int, float]) -> str:
        """What is printed; plain: tokens a second without speculation, by rows."""
        per_s, accepted = self.tokens / self.seconds, self.tokens / self.steps / self.rows
        how = f"{self.rows} rows, width {self.width}{', sync' * (not self.overlap)}"
        took = f"{1e3 * self.seconds / self.steps:.3f} ms a step, {accepted:.3f} accepted"
        times = per_s / plain.get(self.rows, per_s)
        asked = f"{self.accept:.2f} asked, {per_s:.0f} tokens/s, {times:.3f} x none"
        return f"{how}: {took} of {asked}; share of each width {self.shares()}"

    def shares(self) -> dict[int, float]:
        """Of the steps, by width."""
        return {width: round(num / self.steps, 3) for width, num in self.widths.items()}

    def written(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"widths": self.shares()}


def run(bench: Bench, rate: Rate, widths: list[int], options: argparse.Namespace) -> Rate:
    """Decode until `rate` has options.steps steps and options.windows windows."""
    policy = bench.verify_with(widths, chosen=len(widths) > 1)
    bench.overlap = rate.overlap
    once(bench, replace(rate, widths=Counter()), policy, options)  # warms up
    while rate.steps < options.steps or rate.steps * rate.rows < options.windows:
        once(bench, rate, policy, options)
    return rate


def once(bench: Bench, rate: Rate, policy: WidthPolicy, options: argparse.Namespace) -> None:
    """From the prompts to the last token of every row; counts the steps in which all decode."""
    began = 0.0

    def count(plan: Plan, drawn: list[Drawn], num_tokens: int, all_run: bool) -> None:
        nonlocal began
        now = time.perf_counter()
        if plan.decode:
            policy.took(len(plan.decode), plan.width, bench.engine.meter.took_s)
            policy.observe(plan.width, drawn)
        if len(plan.decode) < rate.rows or not all_run:
            return
        if began:
            rate.steps += 1
            rate.seconds += now - began
            rate.tokens += num_tokens
            rate.widths[plan.width] += 1
        began = now

    sampling = Sampling(options.output_len, ignore_eos=True, temperature=0.0)
    bench.generate(rate.rows, options.prompt_len, sampling, seed=0, watch=count)


def wanted(options: argparse.Namespace) -> list[Rate]:
    """What is asked for beside no speculation."""
    rates = []
    for overlap, parts in (True, options.fixed), (False, options.sync):
        for part in filter(None, parts.split(",")):
            (width, mean), rows = part.split("@")[0].split("x"), int(part.split("@")[1])
            rates.append(Rate(rows, width, float(mean), overlap))
    for mean in filter(None, options.accept.split(",")):
        rates += [Rate(rows, "auto", float(mean)) for rows in options.batch]
    return rates


def measured(
    options: argparse.Namespace, rates: list[Rate], plain: dict[int, float]
) -> tuple[list[Rate], float]:
    """`rates` on one engine, each printed; and seconds of its start.

    plain: tokens a second without speculation, by rows; {}: `rates` are these.
    """
    began = time.perf_counter()
    bench = Bench(build(options, max(options.batch)))
    start_s = time.perf_counter() - began
    with torch.inference_mode():
        for rate in rates:
            if plain:
                bench.accept(rate.accept)
            widths = options.widths if rate.width == "auto" else [int(rate.width)]
            run(bench, rate, widths, options)
            alone_ms = [
                f"{1e3 * took_s:.3f} of {width}"
                for (rows, width), took_s in bench.engine.step_s.items()
                if rows == rate.rows and width in widths
            ]
            print(rate.line(plain), "; replay ms", ", ".join(alone_ms), flush=True)
    bench.engine.close()
    return rates, start_s


def main() -> None:
    """Measure, print lines, write JSON."""
    made = parser(__doc__)
    add_engine_options(made)
    add = made.add_argument
    add("--batch", type=ints, default=[1, 8, 32, 64, 128, 256], help="rows")
    add("--fixed", default="", metavar="5x3.3@1", help="width x accepted @ rows; several")
    add("--sync", default="", metavar="5x3.3@1", help="the same, without overlap")
    add("--accept", default="", help="tokens of a step, on average, that widths are chosen for")
    add("--steps", type=int, default=600, help="of each line, at least")
    add("--windows", type=int, default=4000, help="of each line, at least: of all rows together")
    made.set_defaults(widths=[1, 2, 4, 8], cached=True, output_len=256, phase="decode")
    options = made.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    print("acceptance is SIMULATED")
    alone = argparse.Namespace(**{**vars(options), "widths": [1], "drafter": None})
    plain, plain_start_s = measured(alone, [Rate(rows, "1", 1) for rows in options.batch], {})
    speeds = {rate.rows: rate.tokens / rate.seconds for rate in plain}
    rates, start_s = measured(options, wanted(options), speeds)
    print(f"seconds of a start: {plain_start_s:.1f} without a drafter, {start_s:.1f} with")
    about = {"options": shown(options), "simulated": True, "start_s": [plain_start_s, start_s]}
    write(options.json, about | {"rates": [rate.written() for rate in plain + rates]})


if __name__ == "__main__":
    main()
