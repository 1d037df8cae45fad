"""A start that is interrupted at any moment ends, and leaves nothing.

With --whole; `python -m tests.fault.interrupts --num 200` tries more.
"""

import random
import signal

import pytest

from tests.e2e.harness import SIGNALS
from tests.e2e.shared import Clusters
from tests.fault.interrupts import SPAN_S, interrupt


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_an_interrupted_start_leaves_nothing(number: signal.Signals, clusters: Clusters) -> None:
    clusters.end_all()
    done = interrupt(number, random.uniform(0, SPAN_S))
    assert done.problems == [], f"at {done.at_s:.3f} s:\n{done.output}"
