"""What metrics cost: of a decode step on its worker, and of a chunk on the router.

    python -m benchmarks.metrics_cost

worker: a real decode loop with so many rows (`benchmarks.turn`: the device takes no time). Every
call of a metric of it is written down, from the first request on, and timed alone afterwards, many
times over. Its share is of the loop's Python, and of a step of STEP_MS on a GPU.
Windows of drafts and sums among ranks come on top; they are timed alone, of such a step.
router: what a frame with a chunk of each stream counts, timed alone, as a share of the CPU time
that a real router's process takes for the chunks (`benchmarks.router`), and of such a step; and the
same of one whole request. CPU times of the process are scaled as there.

A share above MAX_SHARE ends with exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import turn
from benchmarks.calibration import CALIBRATION_S, calibration_s
from benchmarks.router import parties
from router.observe.metrics import ITL_BUCKETS, RouterMetrics
from router.observe.spent import Spent
from router.observe.tally import Tally
from worker.api import Stages
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.peers.base import SingleCollective
from worker.peers.table import choose, default_table
from worker.plan import Plan
from worker.run.engine import Engine
from worker.run.sums import Sums

MAX_SHARE = 0.01
STEP_MS = 5.0  # of 256 rows on a GPU
WIDTH = 4  # of its windows, the widest for so many rows
REPEATS = 200
PARTS = 21

Call = tuple[Any, tuple[str, ...], str, tuple[Any, ...]]  # family, labels, method, arguments


class Recorded:
    """Stands for a family of a worker's metrics, and writes down what is called."""

    def __init__(self, family: Any, calls: list[Call], labels: tuple[str, ...] = ()) -> None:
        self._family, self._calls, self._labels = family, calls, labels

    def __call__(self, *labels: str) -> Recorded:
        return Recorded(self._family, self._calls, labels)

    def inc(self, *amount: float) -> None:
        self._calls.append((self._family, self._labels, "inc", amount))

    def observe(self, value: float) -> None:
        self._calls.append((self._family, self._labels, "observe", (value,)))

    def set(self, value: float) -> None:
        self._calls.append((self._family, self._labels, "set", (value,)))

    def set_function(self, function: Callable[[], float]) -> None:
        """It is read when scraped."""


def timed_us(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """CPU of one run, the median of PARTS, scaled."""
    found: list[float] = []
    for _ in range(PARTS):
        scale, began = CALIBRATION_S / calibration_s(), time.thread_time()
        for _ in range(repeats):
            work()
        found.append(scale * (time.thread_time() - began) / repeats)
    return 1e6 * statistics.median(found)


def of_worker(num_rows: int, num_steps: int) -> tuple[float, float]:
    """Microseconds a step: of its metrics, and of all Python of the loop."""
    calls: list[Call] = []
    steps = 0

    def built(engine: Engine) -> None:
        families = vars(engine.metrics)
        for name, family in list(families.items()):
            if callable(family) or hasattr(family, "inc") or hasattr(family, "observe"):
                families[name] = Recorded(family, calls)
        settled = engine.meter.settled

        def counted(plan: Plan, path: str) -> None:
            nonlocal steps
            steps += 1
            settled(plan, path)

        engine.meter.settled = counted

    scale = CALIBRATION_S / statistics.median(calibration_s() for _ in range(PARTS))
    whole_us = scale * turn.measure(num_rows, num_steps, built)["turn"]

    def again() -> None:
        for family, labels, method, arguments in calls:
            getattr(family(*labels) if labels else family, method)(*arguments)

    return timed_us(again, 1) / steps, whole_us


def of_windows(num_rows: int) -> float:
    """Microseconds of what a step counts of its windows, of any number of drafts and accepted."""
    meter = StepMeter(WorkerMetrics(model="tiny", role="decode", worker="decode-0"))
    meter.verifies(WIDTH)
    nums = [1 + row % WIDTH for row in range(num_rows)]
    drafts = [(7,) * (row % WIDTH) + (-1,) * (WIDTH - 1 - row % WIDTH) for row in range(num_rows)]
    return timed_us(lambda: meter.verified(WIDTH, nums, drafts))


def of_sums(num_rows: int) -> float:
    """Microseconds of what a step of a worker of several ranks counts of its sums."""

    class Chosen(SingleCollective):
        """As CustomCollective chooses."""

        def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
            return choose(default_table(2), num_bytes)

    model: Any = SimpleNamespace(
        embedding=SimpleNamespace(weight=torch.empty(1, 4096)), collective=Chosen()
    )
    metrics = WorkerMetrics(model="tiny", role="decode", worker="decode-0")
    step: Any = SimpleNamespace(plan=Plan(1, decode=(1,)), num_tokens=num_rows)
    sums = Sums(model, metrics)
    return timed_us(lambda: sums.settled(step))


def of_router(num_streams: int, seconds: float) -> tuple[float, float, float, float]:
    """Microseconds of a chunk's metrics, of all of a chunk; the same of a request."""
    itl, streams = Tally(ITL_BUCKETS), [0.0] * num_streams

    def empty() -> None:
        for _ in streams:
            pass

    def frame() -> None:  # as `Dispatcher` does
        lasts: list[float] = []
        for at in streams:
            lasts.append(at)
        itl.observe_since(0.012, lasts)

    metrics = RouterMetrics("tiny", "router-0")
    stages = Stages(0.1, 0.2, 0.01, 0.0, 0.01, "prefill-0/1")
    spent = Spent(0.0, stages, 1.0, 0.3, "decode-0/1")

    def request() -> None:  # as `Dispatcher` does
        metrics.first_token("pulled", 0.3)
        metrics.spent(spent, 20)
        metrics.ended("stop")
        metrics.e2e.observe(1.3)
        metrics.queue_time.observe(0.0)
        metrics.prompt_tokens.inc(40)
        metrics.prompt_length.observe(40)
        metrics.generation_tokens.inc(20)
        metrics.output_length.observe(20)
        metrics.cached_tokens.inc(16)

    with parties() as bench:
        chunk_us = bench.chunk_us(num_streams, 5000.0, seconds)
        request_us = bench.request_us(bench.short, round(40 * seconds))
    frame_us = timed_us(frame) - timed_us(empty)
    return frame_us / num_streams, chunk_us, timed_us(request), request_us


def main() -> int:
    """See the module."""
    plain = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0, help="of the router's chunks")
    asked = parser.parse_args()
    step_us = 1e3 * STEP_MS
    metrics_us, python_us = of_worker(asked.rows, asked.steps)
    windows_us, sums_us = of_windows(asked.rows), of_sums(asked.rows)
    chunk_us, of_chunk_us, request_us, of_request_us = of_router(asked.rows, asked.seconds)
    shares = {
        f"worker, step of {asked.rows} rows, of its Python": (metrics_us, python_us),
        f"worker, step of {asked.rows} rows, of {STEP_MS:g} ms": (metrics_us, step_us),
        f"worker, with windows of {WIDTH} and sums, of {STEP_MS:g} ms": (
            metrics_us + windows_us + sums_us,
            step_us,
        ),
        "router, chunk, of its CPU": (chunk_us, of_chunk_us),
        f"router, {asked.rows} chunks, of {STEP_MS:g} ms": (asked.rows * chunk_us, step_us),
        "router, request of one token, of its CPU": (request_us, of_request_us),
    }
    for name, (part, whole) in shares.items():
        print(f"{name:48s} {part:8.2f} of {whole:8.1f} us {100 * part / whole:6.2f} %")
    return int(any(part / whole > MAX_SHARE for part, whole in shares.values()))


if __name__ == "__main__":
    sys.exit(main())
