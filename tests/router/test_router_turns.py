"""Whose turn it is: nobody waits for a client that asks more, and nothing is lost on the way."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from router.dispatch.turns import LATELY_S, LIFT, MIN_TIMED, OUTPUT_WEIGHT, SLACK, Turns
from tests.support.simulated_turns import figures


@dataclass(eq=False)
class One:
    req_id: str
    client: str = ""
    priority: int = 0


NUM_ROWS = 1000


def taken(turns: Turns[One], num_rows: int = NUM_ROWS) -> One:
    one = turns.pop(num_rows)
    assert one is not None
    return one


def fill(turns: Turns[One], num_rows: int, running: Counter[str]) -> None:
    """Send whoever may be sent, as the queue does."""
    while (one := turns.pop(num_rows)) is not None:
        turns.runs(one.client, +1)
        turns.charge(one.client, 10)
        running[one.client] += 1


def ids(turns: Turns[One]) -> list[str]:
    return [taken(turns).req_id for _ in range(len(turns))]


def test_one_client_is_served_by_priority_then_in_order() -> None:
    turns = Turns[One]()
    for i, priority in enumerate((0, 5, -1, 0, -1)):
        turns.add(One(str(i), priority=priority))
    turns.add(One("again", priority=9), first=True)
    turns.add(One("again too"), first=True)
    assert ids(turns) == ["again too", "again", "2", "4", "0", "3", "1"]
    assert turns.pop(NUM_ROWS) is None


def test_a_priority_is_among_the_requests_of_one_client() -> None:
    turns = Turns[One]()
    for i in range(3):
        turns.add(One(f"a{i}", "a", priority=-100))
    turns.add(One("b0", "b"))
    order = []
    while len(turns):
        one = taken(turns)
        order.append(one.req_id)
        turns.charge(one.client, 10)
    assert order[:2] == ["a0", "b0"]


@pytest.mark.parametrize("num_asked", [1, 10])
def test_clients_that_wait_get_equal_shares_of_tokens(num_asked: int) -> None:
    """However many requests each of them has, and however long they are."""
    rng, turns, served = random.Random(5), Turns[One](), Counter[str]()
    lengths = {"few": 300, "many": 30}
    for number in range(400):
        for client, num in (("few", 1), ("many", num_asked * 10)):
            for i in range(num):
                turns.add(One(f"{number}.{client}.{i}", client))
        one = taken(turns)
        tokens = rng.randint(1, 2 * lengths[one.client])
        turns.charge(one.client, OUTPUT_WEIGHT * tokens)
        served[one.client] += tokens
    assert abs(served["few"] - served["many"]) < 4 * max(lengths.values())


def test_who_was_away_saves_up_few_turns() -> None:
    turns = Turns[One]()
    for i in range(100):
        turns.add(One(f"a{i}", "a"))
    for _ in range(50):
        turns.charge(taken(turns).client, 10)
    for i in range(40):
        turns.add(One(f"b{i}", "b"))
    order = []
    for _ in range(30):
        one = taken(turns)
        order.append(one.client)
        turns.charge(one.client, 10)
    num_first = round(50 * (1 - LIFT))
    assert order[:num_first] == ["b"] * num_first
    assert abs(Counter(order)["b"] - num_first - (30 - num_first) / 2) <= 1, "then by turns"


def test_who_has_left_gets_no_turn_and_takes_no_room() -> None:
    turns = Turns[One]()
    stays = One("stays", "a", priority=1)
    turns.add(stays)
    for i in range(1000):
        gone = One(str(i), "a")
        turns.add(gone)
        turns.remove(gone)
        turns.remove(gone)
    assert len(turns) == 1
    assert len(turns._clients["a"].heap) <= SLACK + 3
    assert turns.pop(NUM_ROWS) is stays
    assert not turns._waiting


def test_who_asks_little_finds_rows_free_and_alone_nobody_is_bounded() -> None:
    turns, num_rows = Turns[One](), 8
    running = Counter[str]()
    for i in range(40):
        turns.add(One(f"a{i}", "a"))
    fill(turns, num_rows, running)
    assert running == {"a": 40}, "workers have bounds of their own"
    turns.add(One("b0", "b"))
    fill(turns, num_rows, running)
    assert running["b"] == 1, "whose first request has to wait for a row at its worker"
    turns.runs("a", -running.pop("a"))
    for i in range(40):
        turns.add(One(f"c{i}", "a"))
    fill(turns, num_rows, running)
    assert running["a"] == 6, "two are kept for b: what it has, and one more"
    turns.runs("b", -running.pop("b"))
    for client in turns._clients.values():
        client.noted_at -= 1000  # it is long ago
    fill(turns, num_rows, running)
    assert running["a"] == 40


def test_a_burst_of_who_asks_little_goes_before_who_asks_much() -> None:
    """Beyond its share of the rows, as it has used less of them before."""
    turns, num_rows = Turns[One](), 8
    running = Counter[str]()
    for client, tokens, num in (("a", 3000, 4), ("b", 1000, 4)):
        turns.charge(client, tokens)
        turns.runs(client, num)
        running[client] = num
    for i in range(40):
        turns.add(One(f"a{i}", "a"))
    fill(turns, num_rows, running)
    for i in range(3):
        turns.add(One(f"b{i}", "b"))
    fill(turns, num_rows, running)
    assert running == {"a": 4, "b": 4}, "no row is free"
    for num in (5, 6, 7):
        turns.runs("a", -1)
        running["a"] -= 1
        fill(turns, num_rows, running)
        assert running["b"] == num
    turns.runs("a", -1)
    running["a"] -= 1
    fill(turns, num_rows, running)
    assert running == {"a": 1, "b": 7}, "who has none is not kept waiting"


def test_a_crowd_of_a_newcomer_leaves_rows_to_who_has_few() -> None:
    """It comes with credit, and what it is served counts only when its first tokens are here."""
    turns, num_rows = Turns[One](), 64
    turns.charge("few", 6000)
    turns.runs("few", +2)
    for i in range(100):
        turns.add(One(f"a{i}", "crowd"))
    fill(turns, num_rows, Counter[str]())
    for number in range(10):
        turns.runs("few", -1)
        turns.add(One(f"b{number}", "few"))
        one = taken(turns, num_rows)
        assert one.client == "few"
        turns.runs(one.client, +1)
        assert turns.pop(num_rows) is None


def test_one_that_does_not_fit_yet_lets_others_go_first() -> None:
    turns = Turns[One]()
    for name in ("a0", "a1", "b0"):
        turns.add(One(name, name[0]))
        turns.charge(name[0], 10 * (name == "b0"))
    turns.add(One("again", "a"), first=True)
    fits = {"b0"}.__contains__
    assert turns.pop(NUM_ROWS, lambda one: fits(one.req_id)) is not None
    assert turns.pop(NUM_ROWS, lambda one: fits(one.req_id)) is None
    assert ids(turns) == ["again", "a0", "a1"]


def test_what_was_served_long_ago_counts_for_nothing() -> None:
    turns = Turns[One]()
    for client, tokens in (("a", 1e6), ("b", 1000)):
        turns.charge(client, tokens)
    for client in turns._clients.values():
        client.noted_at -= 20 * LATELY_S
    for client in "ba":
        turns.add(One(client, client))
        turns.charge(client, 10 * (client == "b"))
    assert ids(turns) == ["a", "b"]


def test_rows_are_divided_where_all_ask_for_too_much() -> None:
    turns, num_rows = Turns[One](), 9
    for client in "abc":
        turns.runs(client, +9)
        turns.runs(client, -9)
        for i in range(20):
            turns.add(One(f"{client}{i}", client))
    running = Counter[str]()
    fill(turns, num_rows, running)
    assert running == {"a": 3, "b": 3, "c": 3}


def test_a_wait_is_known_after_a_few_turns() -> None:
    turns = Turns[One]()
    for i in range(100):
        turns.add(One(str(i)))
    for _ in range(MIN_TIMED):
        assert taken(turns) is not None
        assert turns.wait_s("") == 0
    assert taken(turns) is not None
    assert turns.wait_s("") > 0
    assert turns.wait_s("another") == 0


def test_beside_three_times_what_there_is_a_client_waits_little() -> None:
    """On a clock of its own: so these times are the same on every machine."""
    seen = figures(share=0.3, seconds=60, num_seeds=3)
    assert not seen["refused"]
    assert seen["ratio"] < 1.45
    assert seen["queue_p99_ms"] < 150
    assert seen["others_per_s"] > 13
    assert seen["others_told_late"] < 10
