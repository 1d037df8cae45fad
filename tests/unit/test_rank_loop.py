"""A rank's loop: what it is told is done in order, and waits for its own steps where it has to."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.api import Lost, WorkerStats
from worker.errors import PeerLost
from worker.plan import Drawn, Ended, Launch, Launched, Plan
from worker.rank import FromLeader, RankLoop, Ranks, from_rank, wrapped
from worker.run.base import PaddedShape
from worker.run.flight import StepResult
from worker.transfer.ranked import CancelPull, PullPages

LEADER = "decode-0/1"


class Step:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> StepResult:
        assert self.ended, "the loop must not block"
        return StepResult([Drawn((self.plan.step,), finished=False)], (), "eager", 1)


class Rank:
    """A RankLoop over steps of the test; `done` has what it launched and what reached its pulls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.steps: list[Step] = []
        self.sent: list[Any] = []
        pulls = SimpleNamespace(
            on=self.done.append, poll=lambda: None, poll_after_s=lambda _: float("inf")
        )
        monkeypatch.setattr("worker.rank.RankPulls", lambda *_: pulls)
        engine = SimpleNamespace(
            runner=SimpleNamespace(launch=self.launch, check_ranks=lambda: None),
            local_rank=lambda: None,
            config=SimpleNamespace(engine=SimpleNamespace(strict=True)),
            rank_group=SimpleNamespace(rank=1),
            rows=(),
        )  # fmt: skip
        self.thread = SimpleNamespace(
            wake=lambda: None,
            stats=WorkerStats(),
            post=None,
            send=lambda _, wrapped: self.sent.append(from_rank(wrapped.body)),
        )
        self.loop = RankLoop(engine, self.thread)  # type: ignore[arg-type]

    def launch(self, plan: Plan, shape: PaddedShape) -> Step:
        self.done.append(plan.step)
        self.steps.append(Step(plan))
        return self.steps[-1]

    def told(self, *messages: FromLeader) -> float:
        return self.loop.turn([(LEADER, wrapped(each)) for each in messages])


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def launch(step: int) -> Launch:
    return Launch(Plan(step, decode=(1,)))


def test_a_third_step_waits_for_the_first(rank: Rank) -> None:
    assert rank.told(launch(1), launch(2), launch(3)) == 0.0, "it looks again at once"
    assert rank.done == [1, 2]
    rank.steps[0].ended = True
    rank.told()
    assert rank.done == [1, 2, 3]
    assert rank.thread.stats.num_steps == 1
    assert rank.thread.stats.has_work


def test_a_pull_waits_for_as_many_steps_as_the_leader_has_settled(rank: Rank) -> None:
    """Until then a step of this rank may still write to the pages that are pulled into."""
    pull = PullPages(7, 1, ((3, 4),), 0, 1, after_steps=1)
    rank.told(launch(1), pull, CancelPull(7))
    assert rank.done == [1], "and what follows it waits, too"
    rank.steps[0].ended = True
    rank.told()
    assert rank.done == [1, pull, CancelPull(7)]
    rank.told(PullPages(8, 1, ((3, 4),), 0, 1, after_steps=1))
    assert len(rank.done) == 4, "the step has ended"


def test_a_lost_leader_is_the_end_unless_it_has_said_so(rank: Rank) -> None:
    rank.told(launch(1))
    with pytest.raises(PeerLost, match="the leader of this rank is lost: silent"):
        rank.loop.turn([(LEADER, Lost("silent"))])
    rank.loop.turn([(LEADER, wrapped(Ended())), (LEADER, Lost("it has closed the link"))])
    assert rank.loop.over.is_set()


def test_ranks_whose_steps_come_to_something_else_are_noticed(rank: Rank) -> None:
    rank.told(launch(5))
    rank.steps[0].ended = True
    rank.told()
    (found,) = rank.sent
    leader = Ranks(("decode-0.1/1", "decode-0.2/1"), lambda *_: None, compared=True)
    own: Any = SimpleNamespace(plan=Plan(5))
    leader.reported(found)
    leader.settled(own, [Drawn((5,), finished=False)])
    leader.reported(found)
    leader.settled(own, [Drawn((5,), finished=False)])  # all three have told: it is forgotten
    with pytest.raises(AssertionError, match="ranks differ"):
        leader.reported(Launched(5, found.drawn + 1))
