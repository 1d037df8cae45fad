"""How long the engine thread of a decode worker is busy with one step, apart from the device.

    python -m benchmarks.turn --rows 32,64,128,256

A real decode loop with a real scheduler and page book; the steps return at once and draw the same
token for every row. So all time is Python's: plan, settle (with the chunks it makes), replies
(with their encoding), and the rest of a turn. One thread: nothing competes for the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from worker.api import AnyMessage, Generate, PeerId, Refused, Sampling, WorkerStats, encode
from worker.config import WorkerConfig
from worker.decode import DecodeLoop
from worker.plan import Drawn, Plan
from worker.run.engine import Engine
from worker.start.build import build_engine

ROUTER: PeerId = "router/1"
PROMPT_TOKENS = 64
WARM_STEPS = 20
CALIBRATION = 1_000_000  # turns of an empty loop, to compare machines


class _Step:
    """A step that has finished."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.path = "none"

    def done(self) -> bool:
        return True

    def wait(self) -> list[Drawn]:
        return [Drawn((7,), finished=False) for _ in self.plan.sampled_rows]


class _Thread:
    """What the loop knows of its thread: it sends as `Wire.send` does, up to the socket."""

    me: PeerId = "decode-0/1"

    def __init__(self) -> None:
        self.stats = WorkerStats()

    def send(self, peer: PeerId, message: AnyMessage) -> None:
        assert not isinstance(message, Refused), message
        encode(message)

    def post(self, event: object) -> None:
        """Nothing posts here."""

    connect = disconnect = post

    def wake(self) -> None:
        """Each turn is asked for."""


class _Clock:
    """Wraps functions and adds up their time, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time `owner.name`."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[part] += time.thread_time() - began

        setattr(owner, name, timed)


def measure(
    num_rows: int, num_steps: int, built: Callable[[Engine], object] = id
) -> dict[str, float]:
    """Microseconds a step, medians: plan, settle, replies, turn (all of them and the rest).

    built: is given the engine before the loop is.
    """
    # Rows that start first draw tokens while the prompts of others are still computed.
    max_len = PROMPT_TOKENS + WARM_STEPS + num_steps + num_rows // 2 + 8
    pages = num_rows * (max_len // 16 + 1) + 1
    config = WorkerConfig.model_validate({
        "role": "decode",
        "engine": {"device": "cpu", "threads": 1, "num_pages": pages, "max_num_reqs": num_rows},
    })  # fmt: skip
    engine = build_engine(config, name="decode-0", host="127.0.0.1")
    engine.runner.launch = lambda plan, *_: _Step(plan)  # type: ignore[assignment,return-value]
    built(engine)
    loop = DecodeLoop(engine, _Thread(), "1")  # type: ignore[arg-type]
    clock = _Clock()
    clock.wrap(loop._scheduler, "plan", "plan")
    clock.wrap(loop._flight, "_settle", "settle")
    clock.wrap(loop._replies, "flush", "replies")
    sampling = Sampling(temperature=0, max_tokens=max_len - PROMPT_TOKENS, ignore_eos=True)
    asked = [
        (
            ROUTER,
            Generate(f"r{i}", 1, tuple(range(9, 9 + PROMPT_TOKENS)), PROMPT_TOKENS, sampling, 1e3),
        )
        for i in range(num_rows)
    ]
    loop.turn(list(asked))
    while len(loop._scheduler.running) < num_rows:
        loop.turn([])
    taken: list[dict[str, float]] = []
    gc.collect()
    gc.freeze()
    for _ in range(WARM_STEPS + num_steps):
        clock.spent.clear()
        began = time.thread_time()
        loop.turn([])
        taken.append({**clock.spent, "turn": time.thread_time() - began})
    engine.close()
    return {
        name: 1e6 * statistics.median(each[name] for each in taken[WARM_STEPS:])
        for name in ("plan", "settle", "replies", "turn")
    }


def calibration() -> float:
    """Nanoseconds of one turn of an empty Python loop."""
    began = time.thread_time()
    for _ in range(CALIBRATION):
        pass
    return 1e9 * (time.thread_time() - began) / CALIBRATION


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="32,64,128,256", help="%(default)s")
    parser.add_argument("--steps", type=int, default=300, help="%(default)s")
    asked = parser.parse_args(argv)
    print(f"empty loop: {calibration():.1f} ns a turn")
    print("rows   plan  settle  replies   turn (us a step)")
    for text in asked.rows.split(","):
        found = measure(int(text), asked.steps)
        print(f"{text:>4}  " + "  ".join(f"{found[name]:6.0f}" for name in found))


if __name__ == "__main__":
    main()
