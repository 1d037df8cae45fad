"""Random delays on scheduler, streams, messages and pulls change no output (issue 5, point 5).

Both workers, in lockstep: first as fast as they go, then with delays from several seeds. Where the
schedule is the same, not a bit of an answer may differ; where it is drawn too, no token.
"""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.support.delay_mix import Delays, Plain, differing, leaving, mix, sections
from tests.support.engines import Answer, running, value
from tests.support.lockstep import DECODE, PREFILL, Ask, Lockstep
from tests.support.pairwise import in_whole
from worker.api import FinishReason
from worker.cache.pages import PageAllocator
from worker.run.flight import Step, StepResult
from worker.run.stream import HostEvent

BIG_CHUNKS: dict[str, dict[str, object]] = {"engine": {"max_prefill_tokens": 64}}
LONG_S = 0.006  # longer than a message and a pull take


def served(
    asked: Sequence[Ask],
    *,
    num_prefill: int = 1,
    delays: int | None = None,
    schedule: int | None = None,
    longest_s: float = 0.002,
    num_groups: int = 1,
    slowest: str = DECODE,
    first_token: str = "prefill",
) -> tuple[list[Answer], Lockstep]:
    """The answers of fresh workers, which are closed by then."""
    config = sections("cpu", "always" if num_prefill else "never", num_groups, first_token)
    workers = Lockstep(
        config, num_prefill=num_prefill, decode_sections=BIG_CHUNKS, schedule=schedule
    )
    try:
        put = Delays(workers, delays, longest_s, slowest) if delays is not None else None
        answers = workers.serve(asked)
        assert put is None or put.num_on_device > 100
    finally:
        workers.close()
    return answers, workers


@pytest.fixture(scope="module")
def mixed() -> Plain:
    """Requests of every kind, and their answers by one worker without delays."""
    asked = mix()
    answers, workers = served(asked, num_prefill=0)
    engine = workers.engines[DECODE]
    assert value(engine.metrics.preemptions) > 3, "pages were not short enough"
    assert value(engine.metrics.cached_tokens) > 0, "nothing was shared"
    reasons = [each.finish_reason for ask, each in zip(asked, answers, strict=True) if not ask.cut]
    assert min(reasons.count(each) for each in (FinishReason.STOP, FinishReason.LENGTH)) > 2
    return asked, answers


@pytest.fixture(scope="module")
def left() -> Plain:
    """Clients that leave while others pull, and the answers of the others."""
    asked = leaving()
    return asked, served(asked, num_prefill=0)[0]


@pytest.mark.parametrize("seed", [1, *in_whole((2,))])
def test_delays_change_not_a_bit(seed: int, mixed: Plain) -> None:
    asked, wanted = mixed
    found, _ = served(asked, num_prefill=0, delays=seed)
    assert not differing(asked, found, wanted, exact=True)


@pytest.mark.parametrize(
    ("seed", "num_groups", "first_token"),
    [
        (5, 2, "decode"),
        *in_whole((None, 2, "prefill"), (3, 1, "prefill")),
        *in_whole((None, 1, "decode"), (4, 1, "prefill"), (3, 2, "prefill"), (4, 2, "decode")),
    ],
)
def test_delays_messages_and_pulls_change_no_token(seed, num_groups, first_token, mixed) -> None:
    """Some router has found a stop string in the first token, and its KV is still on its way."""
    asked, wanted = mixed
    found, workers = served(
        asked, delays=seed or 3, schedule=seed, num_groups=num_groups, first_token=first_token
    )
    assert not differing(asked, found, wanted, exact=False)
    for peer in (DECODE, PREFILL):
        metrics = workers.engines[peer].metrics
        assert (value(metrics.pulled_bytes("shm/shm")) > 0) == (peer == DECODE)


@pytest.mark.parametrize("schedule", [6, *in_whole((None,))])
def test_a_client_that_leaves_in_a_chunk_spoils_no_pull(schedule: int | None, left: Plain) -> None:
    asked, wanted = left
    found, _ = served(asked, delays=6, schedule=schedule, longest_s=LONG_S)
    assert sum(answer.finish_reason is FinishReason.ABORT for answer in found) > 10
    assert not differing(asked, found, wanted, exact=False)


def free_at_once(self: PageAllocator, pages: Iterable[int]) -> None:
    """A freed page does not cool: a pull may write where the step in flight still writes."""
    for page in pages:
        self._settled.add(page)


WAIT: Callable[[Step], StepResult] = Step.wait


def wait_for_tokens_only(self: Step) -> StepResult:
    """A step that draws nothing counts as settled at once: KV is announced that is not there.

    So where it shows, no prefill step may draw.
    """
    return WAIT(self) if self.plan.sampled_rows else StepResult([], (), "eager", 0)


def is_whole(ask: Ask) -> bool:
    return not (ask.cut or ask.abort or ask.abort_in_chunk)


def threaded(asked: Sequence[Ask], seed: int) -> list[list[int]]:
    """The tokens of those that are served whole, by workers with threads and sockets of their own.

    Only so is a pull of the first layer groups under way while the step computes the others.
    """
    whole = [ask for ask in asked if is_whole(ask)]
    config = sections("cpu", "always", num_groups=2)
    with running(config) as cluster:
        workers = {DECODE: cluster.workers["decode-0"], PREFILL: cluster.workers["prefill-0"]}
        served = SimpleNamespace(
            loops={peer: worker.loop for peer, worker in workers.items()},
            engines={peer: worker.engine for peer, worker in workers.items()},
        )
        Delays(served, seed, LONG_S, PREFILL)
        answers = cluster.answers([ask.prompt for ask in whole], [ask.sampling for ask in whole])
    return [answer.tokens for answer in answers]


def whole_of(asked: Sequence[Ask], answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for ask, answer in zip(asked, answers, strict=True) if is_whole(ask)]


@pytest.mark.parametrize("kind", ["left", *in_whole(("mixed",))])
def test_layer_groups_pulled_during_a_step_change_no_token(kind: str, request) -> None:
    asked, answers = request.getfixturevalue(kind)
    assert threaded(asked, 8) == whole_of(asked, answers)


@pytest.mark.whole
def test_the_same_check_fails_when_layer_groups_are_told_early(left: Plain) -> None:
    early = {"query": lambda self: True, "synchronize": lambda self: None}
    with mock.patch.multiple(HostEvent, **early):
        assert any(threaded(left[0], seed) != whole_of(*left) for seed in range(4))


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "slowest", "num_groups"),
    [
        (PageAllocator, "free", free_at_once, DECODE, 2),
        # Groups have events of their own.
        *in_whole((Step, "wait", wait_for_tokens_only, PREFILL, 1)),
    ],
)
def test_the_same_check_fails_without_the_fence(owner, name, wrong, slowest, num_groups, left):
    asked, wanted = left
    how = {"slowest": slowest, "num_groups": num_groups, "first_token": "decode"}
    with mock.patch.object(owner, name, wrong):
        runs = (served(asked, delays=seed, longest_s=LONG_S, **how)[0] for seed in range(6))
        assert any(differing(asked, found, wanted, exact=False) for found in runs)
