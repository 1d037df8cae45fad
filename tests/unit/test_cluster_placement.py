"""What a user is told when Ray has no room."""

from __future__ import annotations

from cluster.placement import Ask, Node, explain, shortage, too_much

NODES = [
    Node("id1", "10.0.0.1", {"CPU": 4, "rdma": 1}, {"CPU": 1, "rdma": 1}),
    Node("id2", "10.0.0.2", {"CPU": 8, "GPU": 1}, {"CPU": 8}),
]


def test_a_resource_that_no_node_has_is_named() -> None:
    assert shortage(Ask("p", {"nvme": 1}), NODES) == "no node has any nvme"


def test_too_much_of_a_resource_names_the_most_there_is() -> None:
    assert shortage(Ask("p", {"CPU": 64}), NODES) == "the most CPU a node has is 8"


def test_resources_of_different_nodes_do_not_add_up() -> None:
    assert shortage(Ask("p", {"rdma": 1, "GPU": 1}), NODES) == "no single node has all of it"


def test_what_an_empty_node_could_hold_is_no_shortage() -> None:
    assert shortage(Ask("p", {"CPU": 4, "rdma": 1}), NODES) == ""


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


def test_the_message_without_any_node() -> None:
    assert "nodes: none" in explain([Ask("p", {"CPU": 1})], [], 0.0)
