"""All ports of real clusters, Ray's included: each is known, and asks as `doctor --ports` says."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from cluster.diagnose.doors import DOORS, Asks
from tests.e2e.harness import INSIDE, Serve
from tests.e2e.shared import USUAL, Clusters, Ray
from tests.e2e.strangers import Row, gets
from tests.support.greet import listening_ports, place_of, speaks
from tests.support.patience import HANG_S

Made = TypeVar("Made")

KEY = "sk-alice"
SMALL = ("--prefill", "1", "--decode", "1", "--set", "disaggregation.mode=always")
OURS = {"api", "beside", "metrics", "wire", "core worker"}
OF_MOONCAKE = {"mooncake", "kv"}
OF_A_NODE = {"raylet", "objects", "agent", "agent page", "environments", "ray metrics"}
OR = ", or "


class OnOpenRay(Serve):
    """A cluster on a Ray without a token."""

    def environment(self) -> dict[str, str]:
        found = {k: v for k, v in super().environment().items() if k != "RAY_AUTH_TOKEN"}
        return found | {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def guarded(tmp_path: Path, clusters: Clusters) -> Iterator[Serve]:
    """Everything asks that can; a worker of two ranks."""
    clusters.end_all()
    (tmp_path / "keys").write_text(f"{KEY} name=alice\n")
    serve = Serve(tmp_path)
    serve.start(
        *SMALL, "--router", "2", "--api-key-file", str(tmp_path / "keys"), "--set", "decode.tp=2",
        "--set", "transport.name=sockets",
    )  # fmt: skip
    yield serve.wait_ready()
    serve.end()


@pytest.fixture
def open_to_all(tmp_path: Path, clusters: Clusters) -> Iterator[Serve]:
    """Nothing asks, of all that a head of Ray may have."""
    clusters.end_all()
    if not os.environ.get(INSIDE):
        pytest.skip("needs a network namespace: others could reach it")
    ray = Ray(whole=True)
    serve = OnOpenRay(tmp_path, ray=ray.address, watch=ray.watch)
    try:
        sets = ("--set", "transport.authentication=none", "--set", "transport.name=mooncake")
        yield serve.start(*SMALL, *sets).wait_ready()
    finally:
        serve.end()
        ray.end()


def ports_of(serve: Serve) -> list[Row]:
    """Of a cluster that has pulled KV once."""
    body = {"model": "tiny", "prompt": "1 2 3 4 5 6 7 8", "max_tokens": 4}
    key = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{serve.url}/v1/completions", json=body, headers=key, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    done = serve.command("doctor", "--ports", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return at_once(told_apart, json.loads(done.stdout))


def at_once(do: Callable[[Row], Made], rows: list[Row]) -> list[Made]:
    """Most of it is to wait for what does not come."""
    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(do, rows))


def told_apart(row: Row) -> Row:
    """With the one of the kinds that it may be of which a greeting shows."""
    place = place_of(row["address"])
    kinds = [kind for kind in row["kind"].split(" or ") if speaks(place, kind)]
    assert len(kinds) == 1, (row, kinds)
    return row | {"kind": kinds[0]}


def check(rows: list[Row], incarnations: dict[str, str]) -> None:
    """Strangers get in where it asks nothing, and nowhere else."""
    got = at_once(lambda row: gets(row, incarnations), rows)
    wrong = [row for row, is_in in zip(rows, got, strict=True) if is_in != asks_nothing(row)]
    assert not wrong


def asks_nothing(row: Row) -> bool:
    return "nothing" in row["asks"].split(OR)


def port_of(row: Row) -> int:
    return int(row["address"].rpartition(":")[2])


def incarnations_of(serve: Serve) -> dict[str, str]:
    done = serve.command("status", "--json")
    return {row["name"]: row["incarnation"] for row in json.loads(done.stdout)}


def test_no_port_of_a_cluster_over_mooncake_lets_in_more_than_is_said(clusters: Clusters) -> None:
    serve = clusters.lend(*USUAL)
    rows = ports_of(serve)
    assert {row["kind"] for row in rows} >= OURS | OF_MOONCAKE
    check(rows, incarnations_of(serve))


@pytest.mark.whole
def test_a_stranger_gets_nothing_where_a_port_asks_who_one_is(guarded: Serve) -> None:
    rows = ports_of(guarded)
    if os.environ.get(INSIDE):  # where nobody else listens
        assert {port_of(row) for row in rows} == listening_ports()
    assert {row["kind"] for row in rows} == OURS | OF_A_NODE | {"ranks", "gcs", "kv"}
    assert {row["process"] for row in rows} == {
        "serve", "controller", "router-0", "router-1", "prefill-0", "decode-0", "decode-0.1",
        "gcs", "raylet", "agent", "runtime env agent",
    }  # fmt: skip
    for row in rows:
        assert DOORS[row["kind"]].asks in row["asks"].split(OR), row
    check(rows, incarnations_of(guarded))
    assert guarded.command("doctor", "--ports").stdout.count("Ray's token") > len(OF_A_NODE)


@pytest.mark.whole
def test_what_asks_nothing_is_said_to_ask_nothing(open_to_all: Serve) -> None:
    rows = ports_of(open_to_all)
    kinds = {row["kind"] for row in rows}
    whole = {"gcs", "dashboard", "client server"}
    assert kinds == (OURS | OF_MOONCAKE | OF_A_NODE | whole) - {"beside"}, (
        "which a router alone has not"
    )
    assert {row["asks"] for row in rows if row["kind"] not in OF_MOONCAKE} == {"nothing"}
    assert {row["asks"] for row in rows if row["kind"] in OF_MOONCAKE} == {Asks.SECRET}
    check(rows, incarnations_of(open_to_all))
