"""Whole decode steps as graphs, on the CPU, where a graph is a list of ops: see recorded.py.

tests/gpu/test_graphs_on_cuda.py has the same laws for real graphs.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.equivalence.test_windows import scripts
from tests.support.any_width import AnyWidth
from tests.support.changed_asks import changed_asks, same_answers
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.oracle import Oracle
from tests.support.pairwise import in_whole, more, whole
from tests.support.recorded import RecordedMemory, RecordedSteps, noted_by
from tests.support.shallow import shallow
from worker.config.engine import MAX_WIDTH
from worker.draw.sampler import Draws
from worker.plan import Plan, max_rows
from worker.run import eager as eager_module
from worker.run import full as full_module
from worker.run.full import FullDecode, buckets_of, decode_buckets

ROWS = 6
SECTIONS: dict[str, dict[str, object]] = {
    "model": {"path": str(shallow()), "max_model_len": 192},
    "engine": {"max_num_reqs": ROWS, "num_pages": 200, "strict": True, "penalty_rows": 4},
}


@cache
def asks() -> list[Ask]:
    return changed_asks(27) if whole else changed_asks(9, 12)


def served(cluster: Lockstep) -> list[Any]:
    return cluster.serve(asks())


@pytest.fixture(scope="module")
def eager() -> list[Any]:
    cluster = Lockstep(SECTIONS, num_prefill=0)
    try:
        return served(cluster)
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def full() -> Iterator[tuple[Lockstep, FullDecode]]:
    cluster = Lockstep(SECTIONS, num_prefill=0)
    runner = cluster.engines[DECODE].runner
    graphs = RecordedSteps(runner.loaded, RecordedMemory())
    checks = graphs.capture()  # strict: a difference from eager is an error
    assert tuple(check.bucket for check in checks) == graphs.buckets == (1, 2, 4, ROWS)
    runner.graphs = replace(runner.graphs, decode=graphs)
    yield cluster, graphs
    cluster.close()


def test_texts_and_logprobs_through_graphs_equal_eager(full, eager) -> None:
    cluster, graphs = full
    replayed: Counter[object] = Counter()
    for kind, found in (("step", graphs._captured), ("tail", graphs._tails)):
        for key, captured in found.items():
            captured.replay = counting(captured.replay, replayed, (kind, key[2]))
    assert same_answers(served(cluster), eager)
    tails = {("tail", False), ("tail", True)}
    assert set(replayed) >= {("step", "none"), ("step", "greedy")} | tails
    assert replayed["step", "none"] == replayed["tail", False] + replayed["tail", True]


def counting(replay: Any, into: Counter[object], key: object) -> Any:
    def call() -> None:
        into[key] += 1
        replay()

    return call


@torch.inference_mode()
def test_a_replay_tells_how_many_tokens_it_computed_with_padding(full) -> None:
    _, graphs = full
    no_requests = Plan(0, decode=(1, 2, 3), max_seq_len_ub=16)
    decoded = graphs.launch(no_requests, "none")
    assert (len(decoded.hidden), decoded.num_tokens) == (3, 4)


def test_a_step_without_masks_ignores_those_of_the_step_before(full, eager) -> None:
    """Masks lie in memory that all steps share: here it forbids nearly everything."""
    cluster, graphs = full
    graphs._masks.words[1:].zero_()
    graphs._masks.line.fill_(1)
    free = [i for i, ask in enumerate(asks()) if not ask.sampling.grammar]
    answers = cluster.serve([replace(asks()[i], at=0) for i in free])
    assert same_answers(answers, [eager[i] for i in free])


@pytest.mark.parametrize("drafter", ["oracle", *in_whole(("ngram",))])
def test_windows_through_graphs_change_no_token(drafter: str) -> None:
    """Widths that change, drafts; the same texts and logprobs as step by step."""
    asked = [ask.but(seed=1000 + number) for number, ask in enumerate(asks())]
    base = Lockstep(SECTIONS, num_prefill=0)
    wanted = base.serve(asked)
    base.close()
    widths = [1, 4, *more(2)]
    spec = {"drafter": "none" if drafter == "oracle" else drafter, "widths": widths}
    cluster = Lockstep({**SECTIONS, "spec": spec}, num_prefill=0)
    cluster.decode.scheduler.widths = AnyWidth(widths, random.Random(3))
    runner = cluster.engines[DECODE].runner
    if drafter == "oracle":
        Oracle(cluster.engines[DECODE], scripts(asked, wanted))
    graphs = RecordedSteps(runner.loaded, RecordedMemory())
    checks = graphs.capture()
    assert {(each.bucket, each.width) for each in checks} == set(product(graphs.buckets, widths))
    runner.graphs = replace(runner.graphs, decode=graphs)
    found = cluster.serve(asked)
    cluster.close()
    assert same_answers(found, wanted)
    most = 4 if drafter == "oracle" else 2
    assert any(window.num >= most for windows in cluster.windows.values() for window in windows)


def test_the_start_up_check_finds_a_tail_that_reads_another_row_s_mask() -> None:
    cluster = Lockstep(SECTIONS, num_prefill=0)
    graphs = FullDecode(cluster.engines[DECODE].runner.loaded, RecordedMemory())
    draw = graphs._draw_all

    def shifted(forwarded: Any, num_logprobs: int) -> Any:
        graphs._masks.line.copy_(graphs._masks.line.roll(1))
        return draw(forwarded, num_logprobs)

    graphs._draw_all = shifted  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="differs from eager"):
        graphs.capture()
    cluster.close()


def test_kernels_are_compiled_for_every_shape_that_is_captured(monkeypatch) -> None:
    cluster = Lockstep(SECTIONS, num_prefill=0)
    graphs = FullDecode(cluster.engines[DECODE].runner.loaded, RecordedMemory())
    ran: set[object] = set()

    def noted(original: Any) -> Any:
        def call(loaded: Any, decoded: Any, draws: Draws) -> Any:
            ran.add((len(decoded.hidden), *draws[:3]))
            return original(loaded, decoded, draws)

        return call

    for module in (full_module, eager_module):
        draw = noted(module.draw_and_propose)
        monkeypatch.setattr(module, "draw_and_propose", draw)
    ahead = noted_by(ran, graphs.run_buckets)
    assert not graphs._captured
    captures = [partial(graphs._capture_shape, *shape) for shape in graphs._shapes]
    assert noted_by(ran, *captures) == ahead
    cluster.close()


@pytest.mark.parametrize("most", [6, 64, 100, 140, 256, 300])
@pytest.mark.parametrize("width", range(1, MAX_WIDTH + 1))
def test_every_number_of_rows_that_may_have_a_width_has_a_bucket(most: int, width: int) -> None:
    buckets = buckets_of(tuple(decode_buckets(most)), width)
    limit = max_rows(width, most)
    for num_rows in range(1, limit + 1):
        assert any(num_rows <= bucket <= limit for bucket in buckets)
