"""`return_trace`: what a request is told of its windows is what the scheduler settled."""

from itertools import pairwise

import pytest

from tests.equivalence.test_windows import requests, scripts, workers
from tests.support.counted import value
from tests.support.lockstep import DECODE
from tests.support.oracle import Oracle
from tests.support.pairwise import more
from worker.api import Window

WIDTHS = (1, 2, 4, 8)


@pytest.mark.parametrize("num_prefill", [1, *more(0)])
def test_a_request_that_asks_has_a_line_for_each_of_its_decode_steps(num_prefill: int) -> None:
    """Of requests that share rows, are preempted, cut and given up; every second one asks."""
    asked = requests()
    asked[::2] = [ask.but(return_trace=True) for ask in asked[::2]]
    base = workers(num_prefill, 16, (1,))
    plain = base.serve(asked)
    base.close()
    made = workers(num_prefill, 16, WIDTHS)
    Oracle(made.engines[DECODE], scripts(asked, plain))
    found = made.serve(asked)
    made.close()
    assert value(made.engines[DECODE].metrics.preemptions) > 0
    accepted = set[int]()
    for number, (ask, answer) in enumerate(zip(asked, found, strict=True)):
        if not ask.sampling.return_trace:
            assert not answer.windows
            continue
        if ask.abort is not None or ask.abort_in_chunk or ask.cut is not None:
            continue  # its last chunk may have come too late to be taken
        settled = made.windows[number]
        assert answer.windows == [
            Window(each.position, each.width, each.drafts, each.num - 1) for each in settled
        ]
        for before, after in pairwise(answer.windows):  # tokens of a prefill may lie between
            assert before.position + before.num_accepted + 1 <= after.position
        accepted |= {each.num_accepted for each in answer.windows}
    assert min(accepted) == 0
    assert max(accepted) > 1
    wide = [each for settled in made.windows.values() for each in settled if each.width > 1]
    windows = made.engines[DECODE].meter.windows
    assert windows.num_windows == len(wide)
    assert windows.accepted == [
        sum(each.num > place for each in wide) for place in range(1, max(WIDTHS))
    ]
