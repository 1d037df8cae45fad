"""Which files of worker/ run during one step of a decode worker; see tests.support.structure."""

import math
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.lockstep import Ask, Lockstep
from tests.support.prompts import problem_ids
from worker.api import Sampling

TURNS = range(8, 12)  # of one request: its prompt is computed before, its last token is drawn later


def files_of_a_step() -> dict[str, int]:
    """Path below worker/ -> its lines, for turns in which one stream decodes and nothing else."""
    seen: set[str] = set()
    number = -1

    def watch(frame: FrameType, event: str, _: object) -> None:
        if number in TURNS and event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(watch)  # the thread that is the CPU's stream begins with the first step
    sys.setprofile(watch)
    cluster = Lockstep({"engine": {"max_num_reqs": 4}}, num_prefill=0)
    loop: Any = cluster.decode
    turn = loop.turn

    def counted(events: list) -> float:
        nonlocal number
        number += bool(loop.requests.reqs)
        loop.requests.sweep_at = math.inf  # a sweep is no part of a step
        return turn(events)

    loop.turn = counted
    try:
        cluster.serve([Ask(tuple(problem_ids(1)[0]), Sampling(20, 0.0, ignore_eos=True))])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        cluster.close()
    here = Path(__file__).parents[2] / "worker"
    paths = sorted(path for name in seen if (path := Path(name)).is_relative_to(here))
    return {str(p.relative_to(here)): len(p.read_text().splitlines()) for p in paths}
