"""kill -9 under load: of workers, retried unseen or one typed error; of a router, its streams end.

Then everything is at its baseline.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial

import httpx
import pytest

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import MAX_TOKENS
from tests.e2e.check import NUM as NUM_KNOWN
from tests.e2e.harness import Serve, shared_memory
from tests.e2e.shared import USUAL, Clusters
from tests.fault.router_doubles import metric
from tests.support import pairwise
from tests.support.asking import CUT, Outcome, ask_all
from tests.support.patience import HANG_S
from tests.support.reference import reference_texts

NUM = 40 if pairwise.whole else 28
FIRST_TOKENS = "time_to_first_token_seconds_count{"
DRAWN = "generation_tokens_total{"
SOME = 250  # tokens that the victim has drawn: most of its streams are to go on from there
NUM_FROZEN = 3  # streams that are to stand still when it does
FROZEN_S = 0.5  # for so long; the others move in that time
NUM_ROUTER = 24  # requests while a router is killed
POLL_S = 0.02


async def load_and_kill(
    serve: Serve, victim: str, progress: Callable[[], float], num: float, num_asked: int = NUM
) -> list[Outcome]:
    """Start the load, kill -9 when `progress` has grown by `num`, wait for every request.

    A decode worker or a router is stopped first, and killed once some of the streams that clients
    have begun to read stand still, whichever of us is slow on a busy machine. If too few are left
    for that, all is asked again. Looks from a thread of its own: this one is busy with the streams.
    """
    pid, deadline = serve.status()[victim]["pid"], time.monotonic() + HANG_S
    questions = [problem.question for problem in held_out_problems(num_asked)]
    while True:
        before, outcomes = progress(), [Outcome() for _ in questions]
        load = asyncio.create_task(
            ask_all(serve.url, questions, max_tokens=MAX_TOKENS, outcomes=outcomes)
        )

        def kill(before: float = before, outcomes: list[Outcome] = outcomes) -> bool:
            while progress() < before + num:
                assert time.monotonic() < deadline
                time.sleep(POLL_S)
            if not victim.startswith("prefill"):
                os.kill(pid, signal.SIGSTOP)
                while num_frozen(outcomes) < NUM_FROZEN:
                    os.kill(pid, signal.SIGCONT)
                    if num_left(outcomes) < NUM_FROZEN:
                        return False
                    time.sleep(POLL_S)
                    os.kill(pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            return True

        if await asyncio.to_thread(kill):
            assert not load.done()
            return await load
        assert time.monotonic() < deadline, "its streams end before clients read them"
        await load


def num_frozen(outcomes: list[Outcome]) -> int:
    """Streams that have begun, have not ended, and bring nothing for a while."""
    before = [each.num_chunks for each in outcomes]
    time.sleep(FROZEN_S)
    return sum(
        0 < num == each.num_chunks and each.finish_reason is None and each.error is None
        for num, each in zip(before, outcomes, strict=True)
    )


def num_left(outcomes: list[Outcome]) -> int:
    return sum(each.finish_reason is None and each.error is None for each in outcomes)


def check_outcomes(outcomes: list[Outcome], error: str = "worker_lost") -> int:
    """Each one is complete and right, or has this error after a right beginning; how many have."""
    num_errors = 0
    known = reference_texts(NUM_KNOWN, MAX_TOKENS)
    for index, (outcome, (text, reason)) in enumerate(zip(outcomes, known, strict=False)):
        if outcome.error is None:
            assert (outcome.text, outcome.finish_reason) == (text, reason), index
            continue
        num_errors += 1
        assert outcome.error == error
        assert text.startswith(outcome.text)
        if error != CUT:
            assert outcome.finish_reason is None
            seen = index % 3 == 0 or outcome.num_chunks > 0  # every third one is not streamed
            assert seen, "a request without a token must be retried unseen"
    return num_errors


@pytest.mark.whole  # the short chaos kills them, too
def test_kill_a_prefill_then_a_decode_worker(clusters: Clusters) -> None:
    reference_texts(NUM_KNOWN, MAX_TOKENS)
    serve = clusters.take(*USUAL)
    first = serve.status()
    first_tokens = partial(metric, serve.url, FIRST_TOKENS)
    outcomes = asyncio.run(load_and_kill(serve, "prefill-0", first_tokens, NUM / 3))
    assert check_outcomes(outcomes) == 0, "a prefill worker's death is never seen by a client"
    serve.wait_status("prefill-0", restarts=1, state="ready")
    serve.wait_idle()

    groups = httpx.get(f"{serve.url}/metrics/targets").json()
    (host,) = (g["targets"][0] for g in groups if g["labels"]["worker"] == "decode-0")
    drawn = partial(metric, f"http://{host}", DRAWN)
    outcomes = asyncio.run(load_and_kill(serve, "decode-0", drawn, SOME))
    assert check_outcomes(outcomes) == 0, "nor is a decode worker's, if another lives"
    num_resumed = metric(serve.url, "resumed_total")
    assert 0 < num_resumed < NUM, "some had tokens at the dead worker, others lived elsewhere"
    serve.wait_status("decode-0", restarts=1, state="ready")
    rows = serve.wait_idle()

    for name in ("prefill-0", "decode-0"):
        assert rows[name]["incarnation"] != first[name]["incarnation"]
    few = [problem.question for problem in held_out_problems(8)]
    again = asyncio.run(ask_all(serve.url, few, max_tokens=MAX_TOKENS))
    assert check_outcomes(again) == 0
    outcomes = asyncio.run(
        load_and_kill(serve, "router-0", first_tokens, NUM_ROUTER / 3, NUM_ROUTER)
    )
    num_cut = check_outcomes(outcomes, CUT)
    assert 0 < num_cut < NUM_ROUTER, "its own, and no others"
    row = serve.wait_status("router-0", restarts=1, state="ready")
    serve.wait_idle()
    assert row["address"] == serve.url
    assert metric(serve.url, 'routers{model="tiny",role="router",state="answered"') == 2
    own = f"http://{row['metrics_address']}"
    while not metric(own, "requests_total"):  # as about every second connection
        assert httpx.post(f"{serve.url}/v1/completions", json={}).status_code == 400
    assert "HTTP Request" not in serve.output, "routers log that they ask each other"

    changes = httpx.get(f"{serve.url}/dashboard/data").json()["changes"]
    for name in ("prefill-0", "decode-0", "router-0"):  # told to each router, the new one too
        told = [(each["state"], each["text"]) for each in changes if each["name"] == name]
        assert [state for state, _ in told] == ["ready", "lost", "ready"], told
        assert told[1][1].startswith("its process died"), told

    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert shared_memory() == clusters.shm_before
    print(
        f"{num_resumed:.0f} of {NUM} requests went on at another worker, "
        f"{num_cut} of {NUM_ROUTER} with their router"
    )
