"""The life of a request when workers refuse, die, repeat or leave out, over the real wire.

Every test asks a served router by HTTP. Replies run in threads, so that the test can play worker.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import router.dispatch.claims
from router.dispatch.members import MIN_AHEAD, NONE_EXPECTED
from router.dispatch.suspect import INNOCENT_TOKENS, MAX_ABSENT, Suspect
from router.dispatch.turns import NUM_TIMED
from router.errors import ApiError
from router.http.app import RouterServer
from tests.fault.router_doubles import (
    TOLD_STAGES,
    Ask,
    DecodeDouble,
    Serve,
    ended,
    events,
    failed,
    flat,
    metric,
    speak,
    wait_until,
)
from tests.support.patience import HANG_S
from worker.api import Abort, Ack, Claim, Claimed, FinishReason, Stages, Stop, WorkerStats
from worker.config import PingConfig

LENGTH = FinishReason.LENGTH
FULL = WorkerStats(max_num_reqs=1, num_running=1)
FOREIGN = 'wire_refused_total{model="small",role="router",what="message"'
Ids = tuple[int, ...]


def decoders(num: int) -> list[DecodeDouble]:
    return [DecodeDouble(f"decode-{i}") for i in range(num)]


def holder_and_other(doubles: list[DecodeDouble]) -> list[DecodeDouble]:
    """The worker that a request has come to, then those that have none."""
    wait_until(lambda: any(not double.taken.empty() for double in doubles))
    return sorted(doubles, key=lambda double: double.taken.empty())


def speaks_to_the_end(ids: Ids, double: DecodeDouble, item: Any, future: Any, at: int = 0) -> None:
    """The worker says the rest of the letters, and the client has got all of them."""
    speak(ids[at:], at=at)(double, *item)
    assert ended(future) == ("abcdefgh", "stop", None)


def came(router: RouterServer) -> int:
    """Output tokens that the router has of the requests that have not ended."""
    return sum(len(req.tokens) for req in list(router.front.dispatcher._reqs.values()))


def test_refused_request_goes_to_another_worker(serve: Serve, ask: Ask, ids: Ids) -> None:
    doubles = decoders(3)
    num_sent = []

    def refuse_twice(double: DecodeDouble, peer: str, generate: Any) -> None:
        num_sent.append((double.member.name, generate.dispatch))
        if len(num_sent) < 3:
            double.stats = FULL  # a Pong that tells of free rows would end the pause
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


def test_waiting_request_is_woken_by_a_pong_that_shows_room(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, _ = serve(DecodeDouble(stats=FULL))
    future = ask(url)
    peer, generate = double.take()
    double.refuse(peer, generate, retry_after_s=10_000)
    wait_until(lambda: metric(url, "requests_waiting") == 1)
    double.stats = WorkerStats(max_num_reqs=1, num_free_pages=9)
    speaks_to_the_end(ids, double, double.take(), future)


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


def test_who_would_wait_too_long_is_told_at_once(serve: Serve, ask: Ask, ids: Ids) -> None:
    stats = WorkerStats(max_num_reqs=1, num_free_pages=9)
    double, url, router = serve(DecodeDouble(stats=stats), queue_timeout_s=30)
    queue, answers, held = router.front.dispatcher._queue, [], []
    for num in range(1 + MIN_AHEAD + 4):
        answers.append(ask(url))
        if num <= MIN_AHEAD:
            held.append(double.take())
        else:
            wait_until(lambda num=num: metric(url, "requests_waiting") == num - MIN_AHEAD)
    client = queue._waiting._clients["127.0.0.1"]
    client.between_s.extend([10.0] * NUM_TIMED)
    client.turn_at = time.monotonic()
    status, code, headers = failed(ask(url))
    assert (status, code, headers["retry-after"]) == (429, "busy", "25"), "4 turns, 15 s allowed"
    while len(answers) > len(held):
        speak(ids)(double, *held[-1])
        held.append(double.take())
    speak(ids)(double, *held[-1])
    for peer, generate in held[:MIN_AHEAD]:
        speak(ids)(double, peer, generate)
    assert {answer.result().status_code for answer in answers} == {200}


def test_a_client_that_asks_much_keeps_nobody_waiting(
    serve: Serve, tmp_path: Path, ids: Ids
) -> None:
    """Its requests wait here once a worker has some more than rows; the other's is soon next."""
    (tmp_path / "keys").write_text("much\nlittle\n")
    double, url, _ = serve(
        DecodeDouble(stats=WorkerStats(max_num_reqs=1, num_free_pages=9)),
        api_key_file=str(tmp_path / "keys"),
        admin_access="open",  # `metric` has no key
    )

    def asked(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "x-request-id": key}
        body = {"model": "small", "prompt": "a", "max_tokens": 20}
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(asked, "much") for _ in range(15)]
        first = [double.take() for _ in range(1 + MIN_AHEAD)]
        wait_until(lambda: metric(url, "requests_waiting") == 15 - len(first))
        answers.append(pool.submit(asked, "little"))
        wait_until(lambda: metric(url, "requests_waiting") == 16 - len(first))
        assert double.taken.empty()
        order = []
        for _ in range(16):
            peer, generate = first.pop(0) if first else double.take()
            order.append(generate.req_id.split("-")[0])
            speak(ids)(double, peer, generate)
        assert "little" in order[1 + MIN_AHEAD : 3 + MIN_AHEAD]
        assert {answer.result().status_code for answer in answers} == {200}


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
    doubles = decoders(2)
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
    speaks_to_the_end(ids, other, (peer, after), future)


@pytest.mark.parametrize("stream", [True, False])
def test_lost_in_mid_stream_goes_on_elsewhere_unseen(
    serve: Serve, ask: Ask, ids: Ids, stream: bool
) -> None:
    """From the token after the last that came, which the client has not seen twice."""
    doubles = decoders(2)
    _, url, router = serve(*doubles)
    future = ask(
        url, stream=stream, logprobs=1, stream_options={"include_usage": True} if stream else None
    )
    dead, other = holder_and_other(doubles)
    peer, before = dead.take()
    dead.chunk(peer, before, ids[:3], cached=1, stages=TOLD_STAGES)
    wait_until(lambda: came(router) == 3)
    router.update_members([other.member])
    peer, after = other.take()
    assert (after.dispatch, after.req_id) == (2, before.req_id)
    assert after.tokens == (*before.tokens, *ids[:3])
    assert after.num_prompt_tokens == before.num_prompt_tokens == len(before.tokens)
    assert after.sampling == before.sampling
    speak(ids[3:], at=3, cached=2, stages=Stages(9, 9, 9, 9, 9, "prefill-9/x"))(other, peer, after)
    response = future.result()
    found = events(response) if stream else [response.json()]
    choices = [choice for part in found for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abcdefgh"
    assert choices[-1]["finish_reason"] == "stop"
    assert sum(len(flat(choice["logprobs"])) for choice in choices) == len(ids)
    usage = found[-1]["usage"]
    assert usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1, "what the first worker had found"
    assert metric(url, "resumed_total") == 1
    assert metric(url, "generation_tokens_total") == len(ids)
    assert stream or f";dur={1e3 * TOLD_STAGES.prefill_s:.1f}" in response.headers["server-timing"]


def test_begun_stream_waits_for_a_worker_beyond_the_queue_timeout(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, router = serve(DecodeDouble(), queue_timeout_s=0.05)
    future = ask(url)
    double.chunk(*double.take(), ids[:2])
    wait_until(lambda: came(router) == 2)
    unbegun = ask(url)
    double.take()
    router.update_members([])
    assert failed(unbegun)[:2] == (503, "no_worker")
    other = DecodeDouble("decode-1", speak(ids[2:], at=2))
    try:
        router.update_members([other.member])
        assert ended(future) == ("abcdefgh", "stop", None)
    finally:
        other.die()


def test_requests_end_at_once_where_no_decode_worker_is_expected_and_wait_where_one_is(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    double, url, router = serve(DecodeDouble())
    begun = ask(url)
    double.chunk(*double.take(), ids[:2])
    waits = ask(url)
    double.take()
    wait_until(lambda: came(router) == 2)
    router.update_members([], roles=["router"])
    assert ended(begun) == ("ab", None, "no_worker")
    status, code, headers = failed(waits)
    assert (status, code, headers["retry-after"]) == (503, "no_worker", "10")
    assert failed(ask(url))[:2] == (503, "no_worker")
    for path in ("health", "ready"):
        assert httpx.get(f"{url}/{path}").json()["reason"] == NONE_EXPECTED
    found = httpx.get(f"{url}/dashboard/data").json()
    assert found["state"] == "bad"
    assert found["summary"].startswith("Requests get 503: all decode workers were drained")
    router.update_members([], roles=["decode", "router"])
    wait_until(lambda: "no decode worker answers" in httpx.get(f"{url}/ready").text)
    waits = ask(url)
    double.script = speak(ids)
    router.update_members([double.member], roles=["decode", "router"])
    assert ended(waits) == ("abcdefgh", "stop", None)


def test_what_one_model_has_begun_no_other_goes_on_with(serve: Serve, ask: Ask, ids: Ids) -> None:
    first = DecodeDouble("decode-0", digest="one")
    _, url, router = serve(first)
    begun = ask(url, stream=False)
    first.chunk(*first.take(), ids[:2])
    late = ask(url)
    first.take()
    wait_until(lambda: came(router) == 2)
    other = DecodeDouble("decode-1", speak(ids), digest="two")
    same = DecodeDouble("decode-2", digest="one", stats=FULL)
    same.stats = replace(same.stats, num_running=9)  # it has no room yet
    try:
        router.update_members([other.member, same.member])
        assert ended(late) == ("abcdefgh", "stop", None)
        assert not begun.done()
        same.stats = WorkerStats(max_num_reqs=8, num_free_pages=9)
        peer, generate = same.take()
        assert generate.tokens[-2:] == ids[:2]
        same.chunk(peer, generate, ids[2:3], at=2)
        same.stats = replace(same.stats, draining=True)
        known = router.front.dispatcher._members.get(same.member.peer)
        wait_until(lambda: came(router) == 3 and known.stats.draining)
        router.update_members([other.member])
        assert failed(begun)[:2] == (502, "worker_lost")
    finally:
        other.die()
        same.die()


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_request_present_at_two_deaths_is_not_tried_a_third_time(
    serve: Serve, ask: Ask, ids: Ids, num_tokens: int
) -> None:
    doubles = decoders(3)
    _, url, router = serve(*doubles)
    future = ask(url)
    left = list(doubles)
    for at in (0, num_tokens):
        victim, *left = holder_and_other(left)
        victim.chunk(*victim.take(), ids[at : at + num_tokens], at=at)
        (req,) = router.front.dispatcher._reqs.values()
        wait_until(lambda at=at, req=req: req.suspect.has_row and came(router) == at + num_tokens)
        router.update_members([double.member for double in left])
    if num_tokens:
        assert ended(future) == ("abcd", None, "internal_error")
    else:
        status, code, headers = failed(future)
        assert (status, code) == (500, "internal_error")
        assert headers["x-should-retry"] == "false"
    assert left[0].taken.empty()


@pytest.mark.parametrize("order", ["at once", "before", "behind"])
def test_a_death_beside_that_of_another_worker_casts_no_suspicion(
    serve: Serve, ask: Ask, ids: Ids, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node ends: two such deaths, one alone, and its answer; but not for ever."""
    monkeypatch.setattr("router.dispatch.suspect.MOMENT_S", HANG_S)  # whatever stands still
    left, others = decoders(4), [DecodeDouble(f"decode-{4 + i}", stats=FULL) for i in range(2)]
    _, url, router = serve(*left, *others)
    future = ask(url)
    for _ in range(3):
        victim, *left = holder_and_other(left)
        victim.chunk(*victim.take())
        (req,) = router.front.dispatcher._reqs.values()
        wait_until(lambda req=req: req.suspect.has_row)
        other = others.pop() if others else None  # alone at last
        halfway = {"at once": [], "before": [victim], "behind": [other]}[order]
        if other and halfway:
            router.update_members([double.member for double in [*left, *others, *halfway]])
        router.update_members([double.member for double in [*left, *others]])
    speak(ids)(left[0], *left[0].take())
    assert ended(future) == ("abcdefgh", "stop", None)


def test_deaths_beside_others_are_forgiven_a_few_times() -> None:
    suspect = Suspect(has_row=True)
    for at in range(MAX_ABSENT + 1):
        suspect.lost(f"decode-0/{at}", 0)
        assert suspect.died([f"decode-0/{at}", f"decode-1/{at}"], 10.0 * at) == (at == MAX_ABSENT)
    suspect = Suspect(has_row=True)  # it comes to the other one before that ends
    suspect.lost("decode-0/1", 0)
    assert not suspect.died(["decode-0/1"], 1.0)
    suspect.has_row = False
    suspect.lost("decode-1/1", 0)
    assert not suspect.died(["decode-1/1"], 2.0)
    suspect.has_row = True
    suspect.lost("decode-2/1", 0)
    assert not suspect.died(["decode-2/1"], 9.0)
    suspect, ended = Suspect(has_row=True), list[bool]()
    for at in range(MAX_ABSENT + 2):  # the other one always a second later
        suspect.lost(f"decode-0/{at}", 0)
        ended.append(suspect.died([f"decode-0/{at}"], 10.0 * at))
        assert not suspect.died([f"decode-1/{at}"], 10.0 * at + 1)
    assert ended == [False] * (MAX_ABSENT + 1) + [True]


@pytest.mark.parametrize("num_deaths", [MAX_ABSENT, MAX_ABSENT + 1])
def test_who_had_no_row_is_not_suspected_so_soon(
    serve: Serve, ask: Ask, ids: Ids, num_deaths: int
) -> None:
    doubles = decoders(num_deaths + 1)
    _, url, router = serve(*doubles)
    future, left = ask(url), list(doubles)
    for _ in range(num_deaths):
        victim, *left = holder_and_other(left)
        victim.take()
        router.update_members([double.member for double in left])
    if num_deaths > MAX_ABSENT:
        assert failed(future)[:2] == (500, "internal_error")
    else:
        speak(ids)(left[0], *left[0].take())
        assert ended(future) == ("abcdefgh", "stop", None)


def test_workers_that_drain_hand_over_and_cast_no_suspicion(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    doubles = decoders(4)
    _, url, router = serve(*doubles)
    future, left = ask(url), list(doubles)
    for at in range(3):
        leaver, *left = holder_and_other(left)
        leaver.chunk(*leaver.take(), ids[at : at + 1], at=at)
        leaver.stats = replace(leaver.stats, draining=True)
        known = router.front.dispatcher._members.get(leaver.member.peer)
        wait_until(lambda at=at, known=known: came(router) == at + 1 and known.stats.draining)
        router.update_members([double.member for double in left])
    speaks_to_the_end(ids, left[0], left[0].take(), future, 3)


def test_two_deaths_far_apart_are_no_fault_of_the_request(serve: Serve, ask: Ask, ids: Ids) -> None:
    """It has drawn tokens since, so it had not caused the first."""
    doubles = decoders(4)
    _, url, router = serve(*doubles)
    future, at, left = ask(url, max_tokens=200), 0, list(doubles)
    text = ids * INNOCENT_TOKENS
    for _ in range(3):
        victim, *left = holder_and_other(left)
        peer, generate = victim.take()
        num = len(generate.tokens) - generate.num_prompt_tokens
        assert num == at, "what had come goes along"
        victim.chunk(peer, generate, text[at : at + INNOCENT_TOKENS], at=at)
        at += INNOCENT_TOKENS
        wait_until(lambda at=at: came(router) == at)
        router.update_members([double.member for double in left])
    speak(text[at : at + 1], at=at)(left[0], *left[0].take())
    assert ended(future)[1:] == ("stop", None)


def test_a_link_that_breaks_is_no_death(serve: Serve, ask: Ask, ids: Ids) -> None:
    """As after a pause of the router's own: its workers have given it up, and live on."""
    double, url, router = serve(DecodeDouble())
    future, wire = ask(url), router.front.dispatcher._wire
    for at in range(4):
        peer, generate = double.take()
        assert generate.dispatch == at + 1
        double.chunk(peer, generate, ids[at : at + 1], at=at)
        wait_until(lambda at=at: came(router) == at + 1)
        wire.lose(double.member.peer, "a test")
    speaks_to_the_end(ids, double, double.take(), future, 4)


@pytest.mark.parametrize("num", [0, 2])
def test_a_gap_moves_the_request_and_old_chunks_are_dropped(
    serve: Serve, ask: Ask, ids: Ids, num: int
) -> None:
    doubles = decoders(2)
    _, url, _ = serve(*doubles)
    future = ask(url)
    bad, good = holder_and_other(doubles)
    peer, before = bad.take()
    bad.chunk(peer, before, ids[:num])
    bad.chunk(peer, before, ids[num + 1 :], at=num + 1)
    _, after = good.take()
    assert bad.expect(Abort).dispatch == 1
    bad.chunk(peer, before, ids[num + 1 :], at=num + 1)
    assert bad.expect(Abort).dispatch == 1  # it still works for nobody
    bad.chunk(peer, before, ids[7:], finish=LENGTH)
    assert bad.expect(Ack).dispatch == 1  # dropped, but acknowledged
    speaks_to_the_end(ids, good, (peer, after), future, num)
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


def test_prompts_that_are_computed_wait_at_no_prefill_worker(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    workers = DecodeDouble(), DecodeDouble("prefill-0", role="prefill")
    double, url, _ = serve(*workers, ping=PingConfig(interval_s=1.0, max_misses=300))
    told: list[int] = []
    for _ in range(4):  # between two Pongs
        future = ask(url)
        item = double.take()
        told.append(item[1].candidates[0].num_queued_tokens)
        speaks_to_the_end(ids, double, item, future)
    assert told == [0] * 4


def test_what_nobody_claims_to_have_is_computed_like_any_other(
    serve: Serve, ask: Ask, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answers no claim is not waited for for ever; who says later that it has it lets it be."""
    monkeypatch.setattr(router.dispatch.claims, "CLAIM_S", 0.2)
    double, url, _ = serve(DecodeDouble())
    future = ask(url, {"idempotency-key": "k"}, n=2)
    claims = [double.expect(Claim) for _ in range(2)]
    assert claims[0].key != claims[1].key
    taken = [double.take() for _ in range(2)]
    assert [each.dispatch for _, each in taken] == [2, 2]
    assert [each.key for _, each in taken] == [each.key for each in claims]
    assert [each.after for _, each in taken] == ["", taken[0][1].req_id], "they share the prompt"
    double.answer(Claimed(claims[0].req_id, 1, found=True))
    late = double.expect(Abort)
    assert (late.req_id, late.dispatch, late.keep) == (claims[0].req_id, 1, True)
    for each in taken:
        speak(ids)(double, *each)
    assert "idempotent-replayed" not in future.result().headers


def test_a_worker_speaks_for_its_own_requests_only(
    serve: Serve, ask: Ask, ids: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    """One gone bad refuses nobody else's request, and has none that it was not asked for."""
    doubles = decoders(2)
    _, url, server = serve(*doubles)
    future = ask(url)
    holder, other = holder_and_other(doubles)
    peer, generate = holder.take()
    other.refuse(peer, generate, "invalid_value")
    wait_until(lambda: metric(url, FOREIGN) == 1)
    speaks_to_the_end(ids, holder, (peer, generate), future)
    future = ask(url, {"idempotency-key": "k"})
    claims = [double.expect(Claim) for double in doubles]
    for _ in range(2):
        doubles[0].answer(Claimed(claims[0].req_id, claims[0].dispatch, found=False))
    wait_until(lambda: metric(url, FOREIGN) == 2)
    doubles[0].answer(Claimed(claims[0].req_id, claims[0].dispatch, found=True))
    assert doubles[0].expect(Abort).keep
    doubles[1].answer(Claimed(claims[1].req_id, claims[1].dispatch, found=True))
    wait_until(lambda: server.front.dispatcher._reqs[claims[0].req_id].was_claimed)
    speak(ids)(doubles[1], peer, replace(generate, req_id=claims[1].req_id, dispatch=1))
    assert ended(future) == ("abcdefgh", "stop", None)
    told = [each.getMessage() for each in caplog.records if "is another's" in each.getMessage()]
    assert len(told) == 2


def test_a_worker_that_is_lost_claims_nothing(
    serve: Serve, ask: Ask, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.dispatch.claims, "CLAIM_S", 60.0)
    doubles = decoders(2)
    _, url, server = serve(*doubles)
    future = ask(url, {"idempotency-key": "k"})
    claim = doubles[1].expect(Claim)
    server.update_members([doubles[1].member])
    doubles[1].answer(Claimed(claim.req_id, claim.dispatch, found=False))
    speaks_to_the_end(ids, doubles[1], doubles[1].take(), future)


@pytest.mark.parametrize("code", ["taken_over", "timeout"])
def test_what_another_try_cannot_mend_is_not_tried_again(code: str) -> None:
    assert ApiError(code, "x").headers["x-should-retry"] == "false"
