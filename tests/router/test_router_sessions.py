"""Sessions: who is asked for, where turns go, and what workers are told of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from msgspec.structs import replace

from router.dispatch.members import Known
from router.dispatch.sessions import FORGOTTEN_S, LEAST_S, MOST_S, UNKNOWN_S, Sessions
from router.observe.board import Board
from tests.fault.router_doubles import DecodeDouble, Serve, metric, speak
from tests.support.patience import HANG_S
from worker.api import Member, WorkerStats

ROWS, NUM_TOKENS = 16, 1000
HELLO = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
CLAUDE = json.dumps({"session_id": "u", "device_id": "x"})


def workers(num: int, *, first: int = 0) -> list[Known]:
    stats = WorkerStats(max_num_reqs=ROWS, num_free_pages=9)
    names = [f"decode-{i}" for i in range(first, first + num)]
    members = [Member(name, "decode", "1", "tcp://x:1") for name in names]
    return [Known(member, stats, live=True) for member in members]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def turn(sessions: Sessions, name: str, decode: list[Known]) -> tuple[str, str]:
    """Whereto a turn goes that is over at once, and where that was."""
    sessions.begin(name)
    known = sessions.choose(name, decode, NUM_TOKENS)
    assert known is not None
    where = sessions.sent(name, known.peer)
    sessions.end(name)
    return known.peer, where


def test_turns_go_home_and_new_sessions_spread() -> None:
    sessions, decode = Sessions(), workers(4)
    homes = {f"s{i}": turn(sessions, f"s{i}", decode) for i in range(64)}
    assert {where for _, where in homes.values()} == {"new"}
    assert set(Counter(peer for peer, _ in homes.values()).values()) == {16}
    for name, (peer, _) in homes.items():
        assert turn(sessions, name, decode) == (peer, "home")


def test_a_turn_leaves_a_hot_worker_and_one_that_is_gone() -> None:
    sessions, decode = Sessions(), workers(3)
    home, _ = turn(sessions, "owner/s", decode)
    (hot,) = [known for known in decode if known.peer == home]
    hot.num_sent = ROWS
    away, where = turn(sessions, "owner/s", decode)
    assert (away != home, where) == (True, "moved")
    hot.num_sent = 0
    assert turn(sessions, "owner/s", decode) == (away, "home"), "its KV is there by now"
    left = [known for known in decode if known.peer != away]
    assert turn(sessions, "owner/s", left)[1] == "moved"
    for known in decode:
        known.num_sent = ROWS
    at = sessions.choose("owner/s", decode, NUM_TOKENS)
    assert at is None, "all are hot: the policy's own cost decides"


def test_a_turn_leaves_home_while_prompts_wait_there_alone() -> None:
    """Of more than a part of its own tokens, and another worker is idle: it is sooner there."""
    sessions, decode = Sessions(), workers(3)
    home, _ = turn(sessions, "owner/s", decode)
    (busy,) = [known for known in decode if known.peer == home]
    others = [known for known in decode if known is not busy]
    busy.num_sent = others[0].num_sent = others[1].num_sent = 1
    busy.stats = replace(busy.stats, num_queued_tokens=NUM_TOKENS)
    assert turn(sessions, "owner/s", decode) == (home, "home"), "nobody is idle"
    others[1].num_sent = 0
    assert turn(sessions, "owner/s", decode) == (others[1].peer, "moved")
    assert turn(sessions, "owner/s", decode) == (others[1].peer, "home")
    busy.stats = replace(busy.stats, num_queued_tokens=NUM_TOKENS // 5)
    sessions.sent("owner/s", home)
    assert turn(sessions, "owner/s", decode) == (home, "home"), "few wait"


def test_routers_agree_by_what_workers_tell() -> None:
    """Each turn comes to another router, and finds its session where the turn before was."""
    routers, decode = [Sessions() for _ in range(3)], workers(4)
    known = [workers(4) for _ in routers]
    turns: dict[str, list[tuple[int, str]]] = {known.peer: [] for known in decode}
    for number in range(200):
        name, router = f"s{number % 20}", routers[(number + number // 20) % 3]
        peer, where = turn(router, name, decode)
        turns[peer].append((number + 1, name))
        assert where == ("new" if number < 20 else "home"), number
        for each, its_own in zip(routers, known, strict=True):
            for worker in its_own:
                each.heard(worker, turns[worker.peer][-8:])
    assert [len(each) for each in routers] == [20] * 3


def test_routers_that_know_the_same_place_a_session_alike() -> None:
    decode, names = workers(4), [f"s{i}" for i in range(200)]
    chosen = [[turn(Sessions(), name, decode)[0] for name in names] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert min(Counter(chosen[0]).values()) > 30
    more = [*decode, *workers(1, first=4)]
    moved = [turn(Sessions(), name, more)[0] for name in names]
    left = [b for a, b in zip(chosen[0], moved, strict=True) if a != b]
    assert set(left) == {"decode-4/1"}, "a worker that comes takes its part, no more"


def test_what_a_worker_tells_late_does_not_win_over_a_turn_under_way() -> None:
    sessions, decode = Sessions(), workers(2)
    home, _ = turn(sessions, "owner/s", decode)
    (away,) = (known for known in decode if known.peer != home)
    sessions.begin("owner/s")
    sessions.heard(away, [(1, "owner/s")])
    sessions.end("owner/s")
    sessions.heard(away, [(1, "owner/s")])
    assert turn(sessions, "owner/s", decode) == (home, "home")
    sessions.heard(away, [(1, "owner/s"), (2, "owner/s")])
    assert turn(sessions, "owner/s", decode) == (away.peer, "home")


def test_a_busy_worker_gets_no_new_session() -> None:
    sessions, decode = Sessions(), workers(4)
    decode[0].num_sent = ROWS - 1
    peers = {turn(sessions, f"s{i}", decode)[0] for i in range(40)}
    assert peers == {known.peer for known in decode[1:]}


def test_pages_are_kept_for_the_pauses_that_an_owner_makes() -> None:
    clock = Clock()
    sessions, decode = Sessions(clock), workers(1)
    assert sessions.pause_s("owner/s") == UNKNOWN_S
    for i in range(100):  # of ten pauses one is long
        turn(sessions, "owner/s", decode)
        clock.now += 200 if i % 10 == 0 else 20
    assert sessions.pause_s("owner/s") == 200
    assert sessions.pause_s("another/s") == UNKNOWN_S
    for pause_s, told in ((0.1, LEAST_S), (FORGOTTEN_S - 1, MOST_S)):
        for _ in range(140):
            turn(sessions, "owner/s", decode)
            clock.now += pause_s
        assert sessions.pause_s("owner/s") == told
    sessions.begin("owner/s")
    clock.now += FORGOTTEN_S
    turn(sessions, "owner/other", decode)
    assert len(sessions) == 1
    sessions.end("owner/s")  # of one that was forgotten
    assert sessions.sent("owner/s", "decode-0/1") == "new"


def asked(url: str, double: DecodeDouble, *, path: str = "chat/completions", **how: Any) -> Any:
    """What the worker is told of a request."""
    how = {"json": HELLO, **how}
    response = httpx.post(f"{url}/v1/{path}", timeout=HANG_S, **how)
    assert response.status_code == 200, response.text
    return double.take()[1]


def test_the_first_name_counts(url: str, double: DecodeDouble, ids: tuple[int, ...]) -> None:
    double.script = speak(ids, kept=True)
    fields = {"prompt_cache_key": "k", "metadata": {"user_id": CLAUDE}}
    names = [  # from the last that counts to the first
        ({"metadata": {"user_id": CLAUDE}}, {}),
        ({"prompt_cache_key": "k"}, {}),
        ({}, {"session-id": "codex"}),
        ({}, {"x-claude-code-session-id": "c"}),
        ({}, {"x-session-affinity": "a"}),
        ({}, {"x-dynamo-session-id": "d"}),
        ({}, {"x-session-id": "x"}),
        ({"session_id": "s"}, {}),
    ]
    assert asked(url, double).session == ""
    body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    seen = list[str]()
    for fields, own in names:
        body |= fields
        headers |= own
        alone = asked(url, double, json=HELLO | fields, headers=own)
        together = asked(url, double, json=HELLO | body, headers=headers)
        assert alone.session == together.session, (fields, own)
        seen.append(alone.session)
    assert len(set(seen)) == len(names)
    child = {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "child"}
    assert asked(url, double, headers=child).session not in seen
    user = {"metadata": {"user_id": "user_1"}}
    assert asked(url, double, json=HELLO | user).session == "", "that text is no session"


def test_anthropic_s_clients_name_theirs(
    url: str, double: DecodeDouble, ids: tuple[int, ...]
) -> None:
    double.script = speak(ids, kept=True)
    body = HELLO | {"metadata": {"user_id": CLAUDE}}
    told = asked(url, double, path="messages", json=body)
    assert told.session == asked(url, double, json=HELLO | {"prompt_cache_key": "u"}).session


def test_a_response_goes_on_with_the_session_of_the_one_before(
    client: openai.OpenAI, double: DecodeDouble, ids: tuple[int, ...]
) -> None:
    double.script = speak(ids, kept=True)

    def told(**fields: Any) -> tuple[str, str]:
        made = client.responses.create(model="small", input="hello", **fields)
        return made.id, double.take()[1].session

    first, begun = told()
    second, other = told()
    assert begun != other
    later, same = told(previous_response_id=first)
    assert same == begun == told(previous_response_id=later)[1]
    assert told(previous_response_id=second)[1] == other
    named, keyed = told(previous_response_id=later, prompt_cache_key="k")
    assert keyed != begun
    assert told(previous_response_id=named)[1] == keyed
    assert told(store=False)[1] == ""


def test_ttl_is_what_was_asked_for(url: str, double: DecodeDouble, ids: tuple[int, ...]) -> None:
    double.script = speak(ids, kept=True)
    named = {"session_id": "s"}
    assert LEAST_S <= asked(url, double, json=HELLO | named).keep_s <= UNKNOWN_S
    assert asked(url, double, json=HELLO | named | {"cache_ttl": 7.5}).keep_s == 7.5
    assert asked(url, double, json=HELLO | {"cache_ttl": 3}).keep_s == 3, "also of no session"


def test_ttl_of_openai_s_and_anthropic_s_forms(
    url: str, double: DecodeDouble, ids: tuple[int, ...]
) -> None:
    """The longest that any part of a message asks for; `cache_ttl` says it in seconds, and wins."""
    double.script = speak(ids, kept=True)
    asks = {"prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}
    told = asked(url, double, json=HELLO | asks)
    assert (told.keep_s, bool(told.session)) == (1800, True)
    assert asked(url, double, json=HELLO | asks | {"cache_ttl": 7}).keep_s == 7
    response = {"model": "small", "input": "hello", "store": False}
    assert asked(url, double, path="responses", json=response | asks).keep_s == 1800

    def part(ttl: str | None) -> dict[str, Any]:
        control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
        return {"type": "text", "text": "hello", "cache_control": control}

    def message(ttl: str | None, **fields: Any) -> float:
        body = HELLO | {"messages": [{"role": "user", "content": [part(ttl)]}], **fields}
        return asked(url, double, path="messages", json=body | {"session_id": "s"}).keep_s

    assert message("5m") == 300
    assert message("5m", system=[part("1h")]) == message("1h", system=[part("5m")]) == 3600
    assert message("1h", cache_ttl=7) == 7
    assert message(None, cache_control={"type": "ephemeral", "ttl": "5m"}) == 300
    assert message(None, prompt_cache_options={"ttl": "12h"}) == 43_200
    assert message(None) <= UNKNOWN_S


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a",
            "cache_control": {"ttl": "2h"}}]}]}, "messages.0.content.0.cache_control.ttl"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"ttl": 300}}]},
            "system.0.cache_control.ttl"),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": {"ttl": []}}]},
            "tools.0.cache_control.ttl"),
        ({"cache_control": {"ttl": "10m"}}, "cache_control.ttl"),
    ],
)  # fmt: skip
def test_mistakes_of_messages_name_the_part(url: str, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{url}/v1/messages", json=HELLO | fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: must be 5m or 1h")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "31m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": "30m"}, "prompt_cache_options"),
        ({"cache_ttl": -1}, "cache_ttl"),
        ({"cache_ttl": 1e9}, "cache_ttl"),
        ({"session_id": 5}, "session_id"),
        ({"prompt_cache_key": "x" * 2000}, "prompt_cache_key"),
    ],
)
def test_mistakes_name_the_field(url: str, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=HELLO | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_sessions_are_of_one_key_and_no_secret_leaves(
    serve: Serve, tmp_path: Path, ids: tuple[int, ...]
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a name=alice\nsk-b name=bob\n")
    double = DecodeDouble("decode-0", script=speak(ids, kept=True))
    _, url, _ = serve(double, api_key_file=str(file))
    told = [
        asked(url, double, headers={"authorization": f"Bearer {key}", "x-session-id": "s"}).session
        for key in ("sk-a", "sk-b", "sk-a")
    ]
    assert told[0] == told[2]
    assert told[0].split("/")[0] != told[1].split("/")[0]
    assert not any(word in repr(told) for word in ("sk-", "alice"))


def test_turns_are_sent_home_and_counted(serve: Serve, ids: tuple[int, ...]) -> None:
    doubles = [DecodeDouble(f"decode-{i}", script=speak(ids, kept=True)) for i in range(3)]
    for double in doubles:
        double.stats = WorkerStats(max_num_reqs=8, num_free_pages=9)
    _, url, _ = serve(*doubles)
    for i in range(12):
        body = HELLO | {"session_id": f"s{i % 4}"}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).is_success
    took = [[double.take()[1] for _ in range(double.taken.qsize())] for double in doubles]
    names = [{generate.session for generate in each} for each in took]
    assert sum(map(len, names)) == 4, "each session was at one worker"
    assert metric(url, 'session_turns_total{model="small",role="router",where="home"') == 8
    assert metric(url, 'session_turns_total{model="small",role="router",where="new"') == 4
    assert metric(url, "sessions{") == 4
    found = msgspec.json.decode(httpx.get(f"{url}/dashboard/data").content, type=Board)
    tokens = sum(len(generate.tokens) for each in took for generate in each) * 8 // 12
    assert (found.sessions, found.turns) == (4, {"tokens": tokens, "home": 8, "new": 4})
