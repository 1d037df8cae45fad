"""The life of a request when workers refuse, die, repeat or leave out, over the real wire.

Every test asks a served router by HTTP. Replies run in threads, so that the test can play worker.
"""

import time
from typing import Any

import httpx
import openai
import pytest

from tests.fault.router_doubles import (
    Ask,
    DecodeDouble,
    Serve,
    ended,
    failed,
    metric,
    speak,
    wait_until,
)
from worker.api import Abort, Ack, FinishReason, Stop, WorkerStats
from worker.config import PingConfig

LENGTH = FinishReason.LENGTH
FULL = WorkerStats(max_num_reqs=1, num_running=1)
Ids = tuple[int, ...]


def holder_and_other(doubles: list[DecodeDouble]) -> list[DecodeDouble]:
    """The worker that a request has come to, then those that have none."""
    wait_until(lambda: any(not double.taken.empty() for double in doubles))
    return sorted(doubles, key=lambda double: double.taken.empty())


def test_refused_request_goes_to_another_worker(serve: Serve, ask: Ask, ids: Ids) -> None:
    doubles = [DecodeDouble(f"decode-{i}") for i in range(3)]
    num_sent = []

    def refuse_twice(double: DecodeDouble, peer: str, generate: Any) -> None:
        num_sent.append((double.member.name, generate.dispatch))
        if len(num_sent) < 3:
            double.refuse(peer, generate, retry_after_s=30)
        else:
            speak(ids)(double, peer, generate)

    for double in doubles:
        double.script = refuse_twice
    _, url, _ = serve(*doubles)
    assert ended(ask(url)) == ("abcdefgh", "stop", None)
    assert len({name for name, _ in num_sent}) == 3
    assert [dispatch for _, dispatch in num_sent] == [1, 2, 3]
    assert metric(url, 'retries_total{cause="refused"') == 2


def test_refused_request_is_tried_again_after_the_time_the_worker_named(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, _ = serve(DecodeDouble(stats=FULL))
    future = ask(url)
    for dispatch in (1, 2, 3):
        peer, generate = double.take()
        assert generate.dispatch == dispatch
        if dispatch < 3:
            double.refuse(peer, generate)
    speak(ids)(double, peer, generate)
    assert ended(future) == ("abcdefgh", "stop", None)


def test_waiting_request_is_woken_by_a_pong_that_shows_room(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, _ = serve(DecodeDouble(stats=FULL))
    future = ask(url)
    peer, generate = double.take()
    double.refuse(peer, generate, retry_after_s=10_000)
    wait_until(lambda: metric(url, "requests_waiting") == 1)
    double.stats = WorkerStats(max_num_reqs=1, num_free_pages=9)
    speak(ids)(double, *double.take())
    assert ended(future) == ("abcdefgh", "stop", None)


def test_waiting_request_is_woken_by_a_new_worker(serve: Serve, ask: Ask, ids: Ids) -> None:
    _, url, router = serve()
    assert httpx.get(f"{url}/ready").status_code == 503
    assert httpx.get(f"{url}/health").json()["reason"] == "no decode worker answers"
    future = ask(url)
    wait_until(lambda: metric(url, "requests_waiting") == 1)
    double = DecodeDouble(script=speak(ids))
    router.update_members([double.member])
    assert ended(future) == ("abcdefgh", "stop", None)
    assert httpx.get(f"{url}/ready").status_code == 200
    double.die()


@pytest.mark.parametrize(("num", "expected"), [(1, (429, "busy")), (0, (503, "no_worker"))])
def test_nobody_until_the_queue_timeout_is_an_error(
    serve: Serve, ask: Ask, streamed: bool, num: int, expected: tuple[int, str]
) -> None:
    full = DecodeDouble(script=lambda d, p, g: d.refuse(p, g), stats=FULL)
    _, url, _ = serve(*[full][:num], queue_timeout_s=0.3)
    status, code, headers = failed(ask(url, stream=streamed))
    assert (status, code) == expected
    assert int(headers["retry-after"]) >= 1
    full.die()


def test_queue_timeout_that_passes_at_a_worker_counts_when_it_refuses(
    serve: Serve, ask: Ask
) -> None:
    double, url, _ = serve(DecodeDouble(stats=FULL), queue_timeout_s=1.0)
    future = ask(url)
    double.refuse(*double.take())
    second = double.take()
    time.sleep(1.1)
    double.refuse(*second)
    assert failed(future)[:2] == (429, "busy")


@pytest.mark.parametrize("code", ["invalid_value", "unsupported"])
def test_refusal_that_is_the_users_mistake_is_400(
    double: DecodeDouble, url: str, ask: Ask, code: str
) -> None:
    double.script = lambda d, p, g: d.refuse(p, g, code, param="stop_token_ids")
    response = ask(url).result()
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"] == "stop_token_ids"


def test_lost_before_the_first_token_is_tried_again_unseen(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    doubles = [DecodeDouble("decode-0"), DecodeDouble("decode-1")]
    ping = PingConfig(interval_s=0.1, max_misses=15)
    _, url, _ = serve(*doubles, ping=ping)
    future = ask(url)
    dead, other = holder_and_other(doubles)
    _, before = dead.take()
    dead.die()  # found by silence
    peer, after = other.take()
    assert (after.dispatch, after.req_id) == (2, before.req_id)
    assert (after.tokens, after.sampling) == (before.tokens, before.sampling)
    assert after.timeout_s <= before.timeout_s
    speak(ids)(other, peer, after)
    assert ended(future) == ("abcdefgh", "stop", None)


def test_lost_in_mid_stream_is_one_error_event(serve: Serve, ask: Ask, ids: Ids) -> None:
    double, url, router = serve(DecodeDouble(), sse_ping_s=0.1)  # the client waits for headers
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="small", prompt="a", stream=True)
        double.chunk(*double.take(), ids[:2])
        assert next(iter(stream)).choices[0].text == "ab"
        whole = ask(url, stream=False)
        double.chunk(*double.take(), ids[:2])
        raw = ask(url)
        double.chunk(*double.take(), ids[:2])
        wait_until(lambda: metric(url, "time_to_first_token_seconds_count") == 3)
        router.update_members([])
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "worker_lost"
    assert ended(raw) == ("ab", None, "worker_lost")
    assert failed(whole)[:2] == (502, "worker_lost")
    wait_until(lambda: router.num_inflight() == 0)


def test_request_present_at_two_crashes_is_not_tried_a_third_time(serve: Serve, ask: Ask) -> None:
    doubles = [DecodeDouble(f"decode-{i}") for i in range(3)]
    _, url, router = serve(*doubles)
    future = ask(url)
    left = list(doubles)
    for _ in range(2):
        victim, *left = holder_and_other(left)
        victim.take()
        router.update_members([double.member for double in left])
    status, code, headers = failed(future)
    assert (status, code) == (500, "internal_error")
    assert headers["x-should-retry"] == "false"
    assert left[0].taken.empty()


def test_gap_after_tokens_is_the_loss_of_the_worker(
    double: DecodeDouble, url: str, ask: Ask, ids: Ids
) -> None:
    future = ask(url)
    peer, generate = double.take()
    double.chunk(peer, generate, ids[:2])
    double.chunk(peer, generate, ids[3:4], at=3)
    assert ended(future) == ("ab", None, "worker_lost")
    assert double.expect(Abort).dispatch == 1


def test_gap_before_tokens_moves_the_request_and_old_chunks_are_dropped(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    doubles = [DecodeDouble("decode-0"), DecodeDouble("decode-1")]
    _, url, _ = serve(*doubles)
    future = ask(url)
    bad, good = holder_and_other(doubles)
    peer, before = bad.take()
    bad.chunk(peer, before, ids[1:2], at=1)
    _, after = good.take()
    assert bad.expect(Abort).dispatch == 1
    bad.chunk(peer, before, ids[1:2], at=1)
    assert bad.expect(Abort).dispatch == 1  # it still works for nobody
    bad.chunk(peer, before, ids[7:], finish=LENGTH)
    assert bad.expect(Ack).dispatch == 1  # dropped, but acknowledged
    speak(ids)(good, peer, after)
    assert ended(future) == ("abcdefgh", "stop", None)
    assert metric(url, "stale_messages_dropped_total") == 2


def test_overlap_is_taken_once_and_the_final_chunk_counts_once(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, _ = serve(DecodeDouble())
    future = ask(url)
    peer, generate = double.take()
    double.chunk(peer, generate, ids[:4])
    double.chunk(peer, generate, ids[:4])
    double.chunk(peer, generate, ids[2:6], at=2)
    for _ in range(3):
        double.chunk(peer, generate, ids[6:], at=6, finish=LENGTH)
    assert ended(future) == ("abcdefgh", "length", None)
    assert [double.expect(Ack).dispatch for _ in range(3)] == [1, 1, 1]
    assert metric(url, 'requests_total{model="small",outcome="length"') == 1
    assert metric(url, "generation_tokens_total") == len(ids)


def test_stop_names_the_position_and_what_follows_is_only_acknowledged(
    double: DecodeDouble, url: str, ask: Ask, ids: Ids
) -> None:
    future = ask(url, stop="de")
    peer, generate = double.take()
    double.chunk(peer, generate, ids)
    assert ended(future) == ("abc", "stop", None)
    stop = double.expect(Stop)
    assert (stop.req_id, stop.at_position) == (generate.req_id, generate.num_prompt_tokens + 5)
    double.chunk(peer, generate, at=5, finish=LENGTH)
    assert double.expect(Ack).req_id == generate.req_id
