"""Whose turn it is: nobody waits for a client that asks more, and nothing is lost on the way."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from router.dispatch.turns import OUTPUT_WEIGHT, SLACK, Turns


@dataclass(eq=False)
class One:
    req_id: str
    client: str = ""
    priority: int = 0


def ids(turns: Turns[One]) -> list[str]:
    return [turns.pop().req_id for _ in range(len(turns))]


def test_one_client_is_served_by_priority_then_in_order() -> None:
    turns = Turns[One]()
    for i, priority in enumerate((0, 5, -1, 0, -1)):
        turns.add(One(str(i), priority=priority))
    turns.add(One("again", priority=9), first=True)
    turns.add(One("again too"), first=True)
    assert ids(turns) == ["again too", "again", "2", "4", "0", "3", "1"]
    with pytest.raises(KeyError):
        turns.pop()


def test_a_priority_is_among_the_requests_of_one_client() -> None:
    turns = Turns[One]()
    for i in range(3):
        turns.add(One(f"a{i}", "a", priority=-100))
    turns.add(One("b0", "b"))
    order = []
    while len(turns):
        one = turns.pop()
        order.append(one.req_id)
        turns.charge(one.client, 10)
    assert order[:2] == ["a0", "b0"]


@pytest.mark.parametrize("num_asked", [1, 10])
def test_clients_that_wait_get_equal_shares_of_tokens(num_asked: int) -> None:
    """However many requests each of them has, and however long they are."""
    rng, turns, served = random.Random(5), Turns[One](), Counter[str]()
    lengths = {"few": 300, "many": 30}
    for number in range(2000):
        for client, num in (("few", 1), ("many", num_asked * 10)):
            for i in range(num):
                turns.add(One(f"{number}.{client}.{i}", client))
        one = turns.pop()
        tokens = rng.randint(1, 2 * lengths[one.client])
        turns.charge(one.client, OUTPUT_WEIGHT * tokens)
        served[one.client] += tokens
    assert abs(served["few"] - served["many"]) < 4 * max(lengths.values())


def test_who_was_away_saves_up_no_turns() -> None:
    turns = Turns[One]()
    for i in range(100):
        turns.add(One(f"a{i}", "a"))
    for _ in range(50):
        turns.charge(turns.pop().client, 10)
    for i in range(20):
        turns.add(One(f"b{i}", "b"))
    order = []
    for _ in range(20):
        one = turns.pop()
        order.append(one.client)
        turns.charge(one.client, 10)
    assert Counter(order) == {"a": 10, "b": 10}


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
    assert turns.pop() is stays
    assert not turns._waiting
