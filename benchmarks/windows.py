"""Tokens a second with speculation against without, one engine: `python -m benchmarks.windows`.

    python -m benchmarks.windows --model-config benchmarks/models/qwen3-8b.json \\
        --drafter benchmarks/models/qwen3-8b-eagle3.json --batch 1,8,32,64,128,256 \\
        --fixed 5x3.3@1,4x2.9@32,2x1.7@64 --accept 1.2,2.9 --sync 4@32 --json out.json
    python -m benchmarks.windows --model-config benchmarks/models/small.json \\
        --drafter benchmarks/models/small-eagle3.json --batch 1,4 --prompt-len 64 --output-len 32 \\
        --fixed 4x2.9@4 --accept 1.2,2.9 --sync 4@4 --steps 40 --windows 40 --widths 1,2,4

Random weights: how many drafts are accepted is SIMULATED (`--accept`, or the number behind the x of
`--fixed`: tokens of a step on average; below 1 the share of drafts that count where all before them
did, so that wider windows keep more), all else is done. First an engine without a drafter, then one
with: steps of a fixed width, then of widths that are chosen as a decode worker does. `--sync
WIDTH@ROWS`: the same steps each waited for before the next is launched; with `--profile` traces of
both, for `benchmarks.idle`. On a GPU a line `device` follows: the device's own time of such a step,
by CUDA events and without a profiler, each step launched behind work that lasts until all of it is
enqueued. What a synchronous step takes longer is its idle time.

Only steps count in which every row decodes. They are repeated from the same prompts, of which only
the first is computed, until there are `--steps` of them; what the choice has learnt stays.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import Bench, add_engine_options, build, ints, profile, synchronize
from benchmarks.load.result import machine
from worker.api import Sampling
from worker.draw.simulated import SimulatedAcceptance
from worker.plan import Plan
from worker.run.engine import Engine
from worker.run.flight import Step
from worker.run.stream_cuda import step_stream
from worker.schedule.width import WidthPolicy

WORK_CYCLES = 6_000_000  # of the device's clock, 3 ms: some times what a launch takes


@dataclass(slots=True)
class Rate:
    """What steps of one kind yielded. `run` fills it."""

    rows: int
    width: str  # a number, or auto
    accept: float  # tokens of a step that were asked for; 1 without speculation
    launched: str  # overlap, sync, or device: sync, of which only the device's own time counts
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    widths: Counter[int] | None = None  # steps of each

    @property
    def tokens_per_s(self) -> float:
        """Of all rows."""
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """From one step's end to the next one's."""
        return 1e3 * self.seconds / self.steps

    def line(self, plain: float) -> str:
        """A row of the table; plain: tokens a second without speculation."""
        shares = {each: round(num / self.steps, 2) for each, num in (self.widths or {}).items()}
        return (
            f"{self.rows:5} {self.width:>5} {self.accept:7.2f} {self.launched:>8}"
            f"{self.step_ms:9.3f}{self.tokens / self.steps / self.rows:9.3f}"
            f"{self.tokens_per_s:10.0f}{self.tokens_per_s / plain:8.3f}  {shares}"
        )


def run(bench: Bench, rate: Rate, policy: WidthPolicy, options: argparse.Namespace) -> Rate:
    """Decode until `rate` has options.steps steps, and options.windows windows."""
    bench.scheduler.widths = policy
    once(bench, Rate(rate.rows, "", 0, rate.launched, widths=Counter()), policy, options)
    while rate.steps < options.steps or rate.steps * rate.rows < options.windows:
        once(bench, rate, policy, options)
    return rate


def once(bench: Bench, rate: Rate, policy: WidthPolicy, options: argparse.Namespace) -> None:
    """From the prompts to the last token of every row; counts the steps in which all decode."""
    engine, scheduler = bench.engine, bench.scheduler
    sampling = Sampling(options.output_len, ignore_eos=True, temperature=0.0)
    bench.admit(rate.rows, options.prompt_len, sampling, seed=0)
    synchronize()
    pending: Step | None = None
    num_left, began, seen = rate.rows, 0.0, rate.widths
    assert seen is not None

    def settle(step: Step, device_s: float | None = None) -> None:
        nonlocal num_left, began
        drawn = engine.runner.settle(step)
        now, plan = time.perf_counter(), step.plan
        if plan.decode:
            policy.took(len(plan.decode), plan.width, engine.meter.took_s)
            policy.observe(plan.width, drawn)
        settled = scheduler.settle(plan.step, drawn)
        for req, _, _, reason in settled:
            if reason is not None:
                scheduler.finish(req)
                num_left -= 1
        if len(plan.decode) < rate.rows or num_left < rate.rows:
            return
        if began:
            rate.steps += 1
            rate.seconds += now - began if device_s is None else device_s
            rate.tokens += sum(num for _, _, num, _ in settled)
            seen[plan.width] += 1
        began = now

    while num_left or pending is not None:
        plan = scheduler.plan()
        if rate.launched == "device" and plan is not None:
            step, took_s = launch_behind_work(engine, plan)
            if step is not None:
                settle(step, took_s)
            continue
        step = engine.runner.launch(plan) if plan is not None else None
        if pending is not None:
            settle(pending)
        if rate.launched == "sync" and step is not None:
            settle(step)
            step = None
        pending = step


def launch_behind_work(engine: Engine, plan: Plan) -> tuple[Step | None, float]:
    """Launch `plan` and wait for it.

    Returns:
        the step, and the device's seconds from its first copy to its last kernel.
    """
    stream = step_stream(engine.pool.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WORK_CYCLES)
    begin.record(stream)
    step = engine.runner.launch(plan)
    late = "the launch took longer than the work before it"
    assert plan.chunks or not begin.query(), late
    end.record(stream)
    end.synchronize()
    return step, begin.elapsed_time(end) / 1e3


def accept(bench: Bench, mean_len: float) -> None:
    """So many tokens of a step count from now on, in graphs that were captured too; see above."""
    simulated = bench.engine.runner.loaded.state.accept
    assert isinstance(simulated, SimulatedAcceptance)
    simulated.change(mean_len)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_options(parser)
    add = parser.add_argument
    add("--batch", type=ints, default=[1, 8, 32, 64, 128, 256], help="rows")
    add("--fixed", default="", metavar="5x3.3@1", help="width x accepted @ rows; several")
    add("--accept", default="", help="tokens of a step, on average, that widths are chosen for")
    add("--sync", default="", metavar="4@32", help="width @ rows")
    add("--steps", type=int, default=600, help="of each line, at least")
    add("--windows", type=int, default=4000, help="of each line, at least: of all rows together")
    add("--profile", type=Path, help="chrome traces: FILE, and FILE.sync")
    add("--json", type=Path)
    parser.set_defaults(widths=[1, 2, 4, 8], cached=True, output_len=256, phase="decode")
    options = parser.parse_args()
    if options.model_config is None:
        parser.error("--model-config is required")
    return options


def without(options: argparse.Namespace) -> tuple[list[Rate], float]:
    """Each batch without a drafter; and seconds of the start."""
    began = time.perf_counter()
    plain = argparse.Namespace(**{**vars(options), "widths": [1], "drafter": None})
    bench = Bench(build(plain, max(options.batch)))
    start_s = time.perf_counter() - began
    rates = []
    with torch.inference_mode():
        for rows in options.batch:
            rate = Rate(rows, "1", 1, "overlap", widths=Counter())
            rates.append(run(bench, rate, WidthPolicy((1,)), options))
            print(rate.line(rate.tokens_per_s), flush=True)
    bench.engine.close()
    return rates, start_s


def wanted(options: argparse.Namespace) -> list[Rate]:
    """What is asked for beside no speculation."""
    rates = []
    for each in filter(None, options.fixed.split(",")):
        (width, mean), rows = each.split("@")[0].split("x"), int(each.split("@")[1])
        rates.append(Rate(rows, width, float(mean), "overlap", widths=Counter()))
    for each in filter(None, options.sync.split(",")):
        width, rows = each.split("@")
        kinds = ["overlap", "sync", "overlap", "sync"] + ["device"] * torch.cuda.is_available()
        for launched in kinds:
            mean = (1 + int(width)) / 2
            rates.append(Rate(int(rows), width, mean, launched, widths=Counter()))
    for mean in (float(each) for each in options.accept.split(",") if each):
        rates += [Rate(rows, "auto", mean, "overlap", widths=Counter()) for rows in options.batch]
    return rates


def with_drafter(options: argparse.Namespace, plain: dict[int, float]) -> tuple[list[Rate], float]:
    """Every line that was asked for; and seconds of the start."""
    began = time.perf_counter()
    bench = Bench(build(options, max(options.batch)))
    start_s = time.perf_counter() - began
    rates = wanted(options)
    with torch.inference_mode():
        for rate in rates:
            accept(bench, rate.accept)
            chosen = tuple(options.widths) if rate.width == "auto" else (int(rate.width),)
            policy = WidthPolicy(chosen, bench.engine.step_s)
            run(bench, rate, policy, options)
            print(rate.line(plain[rate.rows]), flush=True)
        if options.profile:
            trace(bench, options)
    bench.engine.close()
    return rates, start_s


def trace(bench: Bench, options: argparse.Namespace) -> None:
    """Chrome traces of some steps of `--sync`, launched either way."""
    width, rows = (int(part) for part in options.sync.split(",")[0].split("@"))
    few = argparse.Namespace(**{**vars(options), "output_len": min(options.output_len, 20 * width)})
    for launched, path in (
        ("overlap", options.profile),
        ("sync", options.profile.with_suffix(f".sync{options.profile.suffix}")),
    ):
        rate = Rate(rows, str(width), 1, launched, widths=Counter())
        policy = bench.scheduler.widths = WidthPolicy((width,))
        profile(path, lambda rate=rate, policy=policy: once(bench, rate, policy, few))


def written(rate: Rate) -> dict[str, Any]:
    """For JSON. asdict copies a Counter as if its items were keys."""
    return asdict(replace(rate, widths=None)) | {"widths": dict(rate.widths or {})}


def main() -> None:
    """Measure, print a table, write JSON."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    print("acceptance is SIMULATED")
    print(" rows width  accept launched  step ms accepted   tokens/s  x none  share of each width")
    plain, plain_start_s = without(options)
    rates, start_s = with_drafter(options, {each.rows: each.tokens_per_s for each in plain})
    print(f"seconds of a start: {plain_start_s:.1f} without a drafter, {start_s:.1f} with")
    if options.json:
        whole: dict[str, Any] = {
            "options": {k: str(v) for k, v in vars(options).items()}, "machine": machine(),
            "torch": torch.__version__, "simulated": True, "start_s": [plain_start_s, start_s],
            "rates": [written(each) for each in plain + rates],
        }  # fmt: skip
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
