"""What a user is told when Ray has no room; what a node is asked; which router listens alone."""

import asyncio
from typing import get_args

import pytest

from cluster.config import load
from cluster.diagnose.facts import Driver
from cluster.resolve import with_devices
from cluster.sites import ray_site
from cluster.sites.placement import SPANS, Ask, Node, explain, shortage, strategy, too_much
from cluster.sites.shared_port import SharedPort
from tests.support.asynchronous import asynchronous
from worker.api import Member
from worker.config import EngineConfig
from worker.errors import UserError

NODES = [
    Node("id1", "10.0.0.1", {"CPU": 4, "rdma": 1}, {"CPU": 1, "rdma": 1}),
    Node("id2", "10.0.0.2", {"CPU": 8, "GPU": 1}, {"CPU": 8}),
]


@pytest.mark.parametrize(
    ("bundle", "reason"),
    [
        ({"nvme": 1}, "no node has any nvme"),
        ({"CPU": 64}, "the most CPU a node has is 8"),
        ({"rdma": 1, "GPU": 1}, "no single node has all of it"),  # they do not add up
        ({"CPU": 4, "rdma": 1}, ""),  # an empty node could hold it
    ],
)
def test_what_no_node_could_hold_is_named(bundle: dict[str, float], reason: str) -> None:
    assert shortage(Ask("p", bundle), NODES) == reason


def test_asks_that_fit_one_by_one_may_be_too_much_together() -> None:
    halves = [Ask(f"w-{i}", {"CPU": 1, "GPU": 0.5}) for i in range(3)]
    assert not too_much(halves[:2], NODES)
    assert too_much(halves, NODES)
    assert too_much([Ask("p", {"CPU": 64})], NODES)


def test_the_message_lists_asks_and_nodes() -> None:
    asks = [Ask("decode-0", {"CPU": 1, "GPU": 2}), Ask("prefill-0", {"CPU": 4, "rdma": 1})]
    assert explain(asks, NODES, 30.0).splitlines()[:6] == [
        "Ray has no room within 30 s for 2 of the processes asked for:",
        "  decode-0 needs CPU 1, GPU 2: the most GPU a node has is 1",
        "  prefill-0 needs CPU 4, rdma 1: nodes that are large enough have too little free",
        "nodes (free of total):",
        "  10.0.0.1: CPU 1/4, rdma 1/1",
        "  10.0.0.2: CPU 8/8, GPU 0/1",
    ]
    assert "nodes: none" in explain(asks, [], 0.0)


GPUS = [Node(f"id{i}", f"10.0.0.{i}", {"CPU": 8, "GPU": n}, {}) for i, n in ((1, 4), (2, 2))]
RANK = {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize(
    ("num", "span", "strategy_", "reason"),
    [
        (1, "if_needed", "STRICT_PACK", ""),
        (4, "if_needed", "STRICT_PACK", ""),
        (4, "never", "STRICT_PACK", ""),
        (4, "at_will", "PACK", ""),
        (6, "if_needed", "PACK", ""),
        (6, "never", "STRICT_PACK", "the most that a node can hold is 4"),
        (8, "if_needed", "PACK", "all nodes together can hold 6"),
        (8, "at_will", "PACK", "all nodes together can hold 6"),
    ],
)
def test_ranks_span_nodes_only_where_no_node_is_large_enough(num, span, strategy_, reason) -> None:
    ask = Ask("decode-0", RANK, num, span)
    assert (strategy(ask, GPUS), shortage(ask, GPUS)) == (strategy_, reason)
    assert too_much([ask], GPUS) is bool(reason)


def test_every_collective_says_whether_its_ranks_may_span_nodes() -> None:
    names = get_args(EngineConfig.model_fields["collective"].annotation)
    assert set(SPANS) == {each for name in names for each in get_args(name) or (name,)}


def test_workers_of_several_ranks_are_counted_rank_by_rank() -> None:
    fours = [Ask(f"decode-{i}", RANK, 4) for i in range(2)]
    assert not too_much(fours[:1], GPUS)
    assert too_much(fours, GPUS)
    tenths = Ask("decode-0", {"GPU": 0.1}, 20)
    assert shortage(tenths, [Node("id", "a", {"GPU": 2}, {})]) == ""


def test_the_message_says_how_many_ranks_need_what() -> None:
    asks = [Ask("decode-0", RANK, 6, "never"), Ask("prefill-0", RANK, 8)]
    lines = explain(asks, GPUS, 0.0).splitlines()
    assert lines[:3] == [
        "Ray has no room for 14 of the processes asked for:",
        "  decode-0 needs 6 times CPU 1, GPU 1, all on one node: "
        "the most that a node can hold is 4",
        "  prefill-0 needs 8 times CPU 1, GPU 1: all nodes together can hold 6",
    ]
    assert "With fewer ranks: --set prefill.tp=1 --set decode.tp=1" in lines
    assert "Over several nodes, slower: --set decode.engine.collective=nccl" in lines
    assert not any("To share a GPU" in line for line in lines)


FREE = 4711
TAKEN = UserError("cannot listen", "cluster.port")


class Routers:
    def __init__(self, port: int) -> None:
        self.port, self.calls = SharedPort(port), list[tuple[int, bool]]()

    async def enter(self, name: str, error: Exception | None = None) -> Member:
        async def listen(port: int, joins: bool) -> Member:
            self.calls.append((port, joins))
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return Member("router", "router", "1", f"http://x:{port or FREE}")

        return await self.port.enter(name, listen)


@asynchronous
async def test_one_of_those_that_come_at_once_listens_alone_and_the_others_join_it() -> None:
    routers = Routers(0)
    await asyncio.gather(*map(routers.enter, "abc"))
    assert routers.calls == [(0, False), (FREE, True), (FREE, True)]


@asynchronous
async def test_where_the_first_one_fails_the_next_is_the_first() -> None:
    routers = Routers(8000)
    entering = routers.enter("a", TAKEN), routers.enter("b")
    assert (await asyncio.gather(*entering, return_exceptions=True))[0] is TAKEN
    assert routers.calls == [(8000, False), (8000, False)]
    with pytest.raises(UserError):
        await routers.enter("c", TAKEN)
    assert routers.calls[2:] == [(8000, True)]


@asynchronous
async def test_a_router_that_is_replaced_joins_those_that_live_or_takes_the_port_alone() -> None:
    routers = Routers(0)
    for name in "ab":
        await routers.enter(name)
    for name in "aa":
        routers.port.leave(name)
    await routers.enter("a again")
    for name in ("a again", "b"):
        routers.port.leave(name)
    await routers.enter("c")
    assert routers.calls == [(0, False), (FREE, True), (FREE, True), (FREE, False)]


@pytest.mark.parametrize(
    ("nodes", "has_gpus", "sets", "access"),
    [
        ("a", True, "", False),
        ("ab", True, "", None),
        ("a", False, "", None),
        ("a", True, "transport.kind=tcp", None),
    ],
)
@asynchronous
async def test_a_node_is_asked_about_its_gpus_where_the_transport_depends_on_them(
    nodes: str, has_gpus: bool, sets: str, access: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver("580", "13.0", ("H200",) * 2, ((0, 1), (1, 0)))
    monkeypatch.setattr(ray_site, "read_driver", lambda: driver)
    config = with_devices(load(None, sets.split()), has_gpus=has_gpus)
    here = ray_site.Home("a", "10.0.0.1", local=True)
    assert await ray_site.peer_access_of(config, set(nodes), here) is access
