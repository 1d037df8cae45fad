"""The monitor against doubles: no Ray, no sockets, real asyncio."""

import asyncio
import time

import pytest

from cluster.control.replicas import NUM_CHANGES, Changes, Replica, State, backoff_s
from cluster.control.tasks import in_time
from cluster.sites.process import Record
from tests.support.asynchronous import asynchronous
from tests.support.monitored import Monitored, controller
from worker.api import Lost
from worker.errors import PeerLost, UserError, WorldError


@asynchronous
async def test_a_death_is_told_before_the_kill_and_the_kill_is_before_the_successor() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    await asyncio.sleep(0.02)
    cluster.log.clear()
    first = cluster.last("decode-0")
    first.die()
    await cluster.until(lambda: len(cluster.links.peers) == 2 and len(cluster.log) >= 5)
    assert cluster.log[:3] == ["tell decode-1 decode-1", "kill decode-0", "create decode-0"]
    assert cluster.last("decode-0").incarnation != first.incarnation
    rows = {row.name: row.restarts for row in await cluster.monitor.status()}
    assert rows == {"decode-0": 1, "decode-1": 0}


@asynchronous
async def test_who_died_why_and_what_replaced_it_is_told() -> None:
    cluster = await Monitored.started("decode-0", "router-0")
    router = cluster.last("router-0")
    cluster.last("decode-0").die()
    await cluster.until(lambda: len(router.changes) == 4)
    ready, lost, again = [change for change in router.changes if change[0] == "decode-0"]
    assert lost == ("decode-0", "lost", "its process died")
    assert ready == again == ("decode-0", "ready", "after 0.0 s (here)")
    cluster.site.start_error = UserError("no such model")
    cluster.last("decode-0").die()
    await cluster.until(lambda: ("decode-0", "lost", "no such model") in router.changes)
    await cluster.monitor.drain(["decode-0"], None)
    stopping = ("decode-0", "drained", "it was not ready")
    await cluster.until(lambda: router.changes[-1] == stopping)


@asynchronous
async def test_routers_and_status_tell_how_far_a_start_is(monkeypatch) -> None:
    monkeypatch.setattr("cluster.control.herald.PROGRESS_S", 0.0)
    cluster = await Monitored.started("decode-0", "decode-1", "router-0")
    cluster.site.loaded = asyncio.Event()
    cluster.last("decode-0").die()
    told = ["decode-0 loading 50% after 0 s"]
    await cluster.until(lambda: cluster.last("router-0").starting == told)
    assert not cluster.last("decode-1").starting, "only routers ask"
    rows = {row.name: row.progress for row in await cluster.monitor.status()}
    assert rows == {"decode-0": "loading 50% after 0 s", "decode-1": "", "router-0": ""}
    cluster.site.loaded.set()
    await cluster.until(lambda: not cluster.last("router-0").starting)


def test_no_more_changes_are_kept_than_are_shown() -> None:
    changes = Changes()
    for i in range(3 * NUM_CHANGES):
        changes.add(Replica(f"decode-{i}", "decode"), "lost", "why")
    kept = changes.listed()
    assert [kept[0].name, kept[-1].name, len(kept)] == ["decode-200", "decode-299", NUM_CHANGES]
    assert kept[0].ago_s >= kept[-1].ago_s >= 0


@asynchronous
async def test_a_silent_process_is_treated_as_dead() -> None:
    cluster = await Monitored.started("decode-0")
    peer = next(iter(cluster.links.peers))
    for lost in ("decode-0/of-another-time", peer, peer):
        cluster.monitor.lost(lost, Lost("silent", is_silent=True))
    await cluster.until(lambda: len(cluster.site.made["decode-0"]) == 2)
    assert "kill decode-0" in cluster.log
    texts = [event.text for event in cluster.monitor.events]
    assert "it does not answer (silent); again in 0.01 s" in texts


@asynchronous
async def test_who_has_closed_the_link_lives_and_is_pinged_anew(monkeypatch) -> None:
    """So it is when the controller itself was stopped, and all have given it up."""
    monkeypatch.setattr("cluster.control.keeper.RELINK_S", 0.01)
    cluster = await Monitored.started("decode-0", "decode-1")
    peers = set(cluster.links.peers)
    cluster.log.clear()
    for peer in peers:
        cluster.links.disconnect(peer)
        cluster.monitor.lost(peer, Lost("it has closed the link"))
    await cluster.until(lambda: cluster.links.peers == peers)
    assert cluster.log == []
    assert {row.restarts for row in await cluster.monitor.status()} == {0}


@asynchronous
async def test_a_router_that_reports_nothing_is_treated_as_dead(monkeypatch) -> None:
    """It answers no pings; and a stopped one never dies by itself."""
    monkeypatch.setattr("cluster.control.keeper.SILENT_S", 0.05)
    monkeypatch.setattr("cluster.control.keeper.ASK_S", 0.01)
    cluster = await Monitored.started("router-0", "router-1", http=True)
    cluster.last("router-0").frozen = True
    await cluster.until(lambda: len(cluster.site.made["router-0"]) == 2)
    assert "kill router-0" in cluster.log
    assert any("did not report" in event.text for event in cluster.monitor.events)
    await asyncio.sleep(0.2)
    made = {name: len(processes) for name, processes in cluster.site.made.items()}
    assert made == {"router-0": 2, "router-1": 1}, "the next one reports"
    await cluster.monitor.stop(0.0)


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(UserError("bad"), UserError, 1), (PeerLost("x"), WorldError, 3)],
)
@asynchronous
async def test_a_start_that_fails_is_given_up(error: Exception, kind: type, attempts: int) -> None:
    cluster = Monitored("decode-0")
    cluster.site.start_error = error
    with pytest.raises(kind, match="decode-0: "):
        await cluster.monitor.start()
    assert len(cluster.site.made["decode-0"]) == attempts
    await cluster.monitor.stop(0.0)
    assert cluster.log[-1] == "release decode-0"
    assert cluster.log.count("kill decode-0") == attempts


@asynchronous
async def test_a_drained_name_finishes_first_and_is_not_filled_again() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    process, stays = cluster.last("decode-0"), cluster.last("decode-1")
    process.idle = False
    draining = asyncio.create_task(cluster.monitor.drain(["decode-0"], None))
    await cluster.until(lambda: "drain decode-0" in cluster.log)
    assert cluster.monitor.replicas()[0].state is State.DRAINING
    change = ("decode-0", "draining", "")
    await cluster.until(lambda: stays.changes[-1] == change)
    assert "stop decode-0" not in cluster.log
    process.idle = True
    assert await draining
    assert [replica.name for replica in cluster.monitor.replicas()] == ["decode-1"]
    assert stays.changes[-2:] == [change, ("decode-0", "drained", "")]
    assert cluster.log[-1] == "release decode-0"
    with pytest.raises(UserError, match="no worker or router is called decode-0"):
        await cluster.monitor.drain(["decode-0"], None)


@asynchronous
async def test_stop_ends_routers_first_and_what_does_not_listen_is_killed() -> None:
    cluster = await Monitored.started("decode-0", "router-0")
    cluster.last("decode-0").deaf = True
    cluster.last("router-0").idle = False
    assert not await cluster.monitor.stop(0.05)
    log = cluster.log
    assert log.index("release router-0") < log.index("drain decode-0")
    assert log.index("stop decode-0") < log.index("kill decode-0")
    assert cluster.monitor.replicas() == []


@asynchronous
async def test_a_drained_process_is_told_whether_others_stay_at_its_address() -> None:
    names = "decode-0", "decode-1", "router-0", "router-1", "router-2"
    cluster = await Monitored.started(*names)
    for name in ("router-1", "decode-1"):
        await cluster.monitor.drain([name], None)
    await cluster.monitor.stop(None)
    assert [line for line in cluster.log if line.startswith("drain")] == [
        "drain router-1 others", "drain decode-1",
        "drain router-0", "drain router-2", "drain decode-0",
    ]  # fmt: skip


def test_back_off_doubles_up_to_its_limit() -> None:
    assert [backoff_s(n, 0.5, 3.0) for n in (1, 2, 3, 4, 999)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@asynchronous
async def test_the_next_monitor_starts_nobody_twice_and_tells_all_of_all_at_once() -> None:
    names = ["decode-0", "decode-1", "router-0"]
    cluster = await Monitored.started(*names)
    first = cluster.last("decode-1")
    assert first.controller == controller(1)
    cluster.succeeded()
    await cluster.until(lambda: len(cluster.log) == 3)
    assert first.controller == controller(2), "it answers the pings of the next one"
    assert cluster.log == [f"tell {name} {' '.join(names)}" for name in names]
    assert {change[0] for change in first.changes} == set()
    assert len(cluster.links.peers) == 3
    assert [replica.state for replica in cluster.monitor.replicas()] == [State.READY] * 3
    first.die()  # it is kept running as before
    await cluster.until(lambda: cluster.last("decode-1") is not first)
    await cluster.until(lambda: cluster.last("decode-0").members == names)
    rows = {row.name: row.restarts for row in await cluster.monitor.status()}
    assert rows == {"decode-0": 0, "decode-1": 1, "router-0": 0}


@asynchronous
async def test_the_next_monitor_replaces_who_has_died_and_waits_for_who_is_starting() -> None:
    cluster = await Monitored.started("decode-0", "decode-1", "decode-2")
    cluster.site.loaded = asyncio.Event()
    cluster.last("decode-1").die()
    await cluster.until(lambda: len(cluster.site.made["decode-1"]) == 2)
    cluster.succeeded()
    cluster.last("decode-0").die()
    await cluster.until(lambda: "create decode-0" in cluster.log)
    cluster.site.loaded.set()
    await cluster.until(lambda: len(cluster.links.peers) == 3)
    assert not {"create decode-1", "create decode-2"} & set(cluster.log)
    rows = {row.name: row.restarts for row in await cluster.monitor.status()}
    assert rows == {"decode-0": 1, "decode-1": 1, "decode-2": 0}


@asynchronous
async def test_the_next_monitor_knows_who_is_leaving() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    process = cluster.last("decode-0")
    process.idle = False
    draining = asyncio.create_task(cluster.monitor.drain(["decode-0"], 5.0))
    await cluster.until(lambda: "drain decode-0" in cluster.log)
    draining.cancel()
    cluster.succeeded()
    leaving = [replica for replica in cluster.monitor.replicas() if replica.leaving]
    assert [(replica.name, replica.drain_timeout_s) for replica in leaving] == [("decode-0", 5.0)]
    process.idle = True
    assert await cluster.monitor.drain(["decode-0"], 5.0)
    assert cluster.log[-1] == "release decode-0"
    assert "create decode-0" not in cluster.log
    assert list(cluster.site.records) == ["decode-1"]


@asynchronous
async def test_who_was_stopped_itself_does_not_judge_by_the_time_in_between() -> None:
    answer = asyncio.get_running_loop().create_future()
    asked = asyncio.create_task(in_time(answer, 0.5, "report"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(1.05, answer.set_result, "alive")
    time.sleep(1.0)  # noqa: ASYNC251 - no time of the event loop
    assert await asked == "alive"
    with pytest.raises(WorldError, match=r"did not report within 0\.05 s"):
        await in_time(asyncio.Event().wait(), 0.05, "report")


@asynchronous
async def test_a_renewed_name_finishes_first_and_keeps_its_place() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    first = cluster.last("decode-0")
    first.idle = False
    renewing = asyncio.create_task(cluster.monitor.renew("decode-0", None))
    await cluster.until(lambda: "drain decode-0" in cluster.log)
    assert cluster.site.records["decode-0"].renewing
    first.idle = True
    await renewing
    assert cluster.last("decode-0").incarnation != first.incarnation
    steps = [line for line in cluster.log if line.split()[0] in ("drain", "stop", "kill", "create")]
    assert steps[-4:] == ["drain decode-0", "stop decode-0", "kill decode-0", "create decode-0"]
    rows = {row.name: (row.state, row.restarts) for row in await cluster.monitor.status()}
    assert rows == {"decode-0": (State.READY, 0), "decode-1": (State.READY, 0)}
    assert not cluster.site.records["decode-0"].renewing
    stays = cluster.last("decode-1")
    await cluster.until(lambda: stays.changes[-1][1] == "ready")
    assert [change[1] for change in stays.changes[-3:]] == ["draining", "restarting", "ready"]


@asynchronous
async def test_a_renewal_hands_over_in_time_and_kills_who_does_not_stop() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    first = cluster.last("decode-0")
    first.idle, first.deaf = False, True
    await cluster.monitor.renew("decode-0", 0.05)
    assert cluster.last("decode-0") is not first
    assert cluster.log.index("stop decode-0") < cluster.log.index("kill decode-0")


@asynchronous
async def test_a_renewal_says_why_the_next_process_fails_which_is_tried_again() -> None:
    cluster = await Monitored.started("decode-0", "decode-1")
    cluster.site.start_error = UserError("no such model")
    with pytest.raises(UserError, match="decode-0: no such model"):
        await cluster.monitor.renew("decode-0", None)
    with pytest.raises(UserError, match="decode-0: no such model"):
        await cluster.monitor.renew("decode-0", None, "prefill")
    assert cluster.monitor.replica("decode-0").role == "decode"
    cluster.site.start_error = None
    await cluster.until(lambda: len(cluster.links.peers) == 2)
    await cluster.monitor.renew("decode-0", None, "prefill")
    assert cluster.site.records["decode-0"].role == "prefill"
    with pytest.raises(UserError, match="no worker or router is called decode-7"):
        await cluster.monitor.renew("decode-7", None)


@asynchronous
async def test_further_names_are_expected_at_once_and_ready_in_the_end() -> None:
    cluster = await Monitored.started("router-0")
    router = cluster.last("router-0")
    await cluster.until(lambda: router.roles == ["router"])
    cluster.site.loaded = asyncio.Event()
    adding = asyncio.create_task(cluster.monitor.add([Record("decode-0", "decode")]))
    await cluster.until(lambda: router.roles == ["decode", "router"])
    cluster.site.loaded.set()
    await adding
    assert [row.state for row in await cluster.monitor.status()] == [State.READY] * 2
    draining = asyncio.create_task(cluster.monitor.drain(["decode-0"], None))
    await cluster.until(lambda: router.roles == ["router"])
    await draining
    assert [change[1:] for change in router.changes if change[0] == "decode-0"] == [
        ("ready", "after 0.0 s (here)"), ("draining", ""), ("drained", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(UserError("bad"), UserError, 1), (PeerLost("x"), WorldError, 3)],
)
@asynchronous
async def test_names_that_cannot_start_do_not_stay(error, kind, attempts) -> None:
    cluster = await Monitored.started("decode-0")
    cluster.site.start_error = error
    further = [Record(f"decode-{i}", "decode") for i in (1, 2)]
    with pytest.raises(kind, match=r"decode-\d: "):
        await cluster.monitor.add(further)
    assert max(len(cluster.site.made[record.name]) for record in further) >= attempts
    assert [replica.name for replica in cluster.monitor.replicas()] == ["decode-0"]
    assert {"release decode-1", "release decode-2"} <= set(cluster.log)


async def of_one_rank() -> Monitored:
    cluster = await Monitored.started("decode-0", "decode-1")
    cluster.last("decode-0").pids = (1,)
    await asyncio.sleep(0.02)
    cluster.log.clear()
    return cluster


def acts(cluster: Monitored) -> list[str]:
    return [line for line in cluster.log if not line.startswith("tell")]


@asynchronous
async def test_a_worker_turns_in_its_process_as_a_new_incarnation() -> None:
    cluster = await of_one_rank()
    process, stays = cluster.last("decode-0"), cluster.last("decode-1")
    for role in ("prefill", "decode"):
        cluster.log.clear()
        before = process.incarnation
        await cluster.monitor.renew("decode-0", None, role)
        assert acts(cluster) == ["drain decode-0", "retire decode-0", "turn decode-0"]
        peers = {f"{each.name}/{each.incarnation}" for each in (process, stays)}
        assert cluster.links.peers == peers
        assert process.incarnation != before
        replica, record = cluster.monitor.replica("decode-0"), cluster.site.records["decode-0"]
        assert replica.member is not None
        assert replica.member.role == replica.role == record.role == role
        assert replica.incarnation == record.incarnation == process.incarnation
        assert (replica.state, replica.restarts, replica.turning) == (State.READY, 0, False)
        assert not record.renewing
        await cluster.until(lambda: len(stays.members) == 2 and stays.changes[-1][1] == "ready")
        assert [change[1] for change in stays.changes[-3:]] == ["draining", "turning", "ready"]
    process.die()  # it is kept running as before
    await cluster.until(lambda: cluster.last("decode-0") is not process)


@asynchronous
async def test_what_cannot_turn_in_its_process_gets_a_new_one_in_the_other_role() -> None:
    cluster = await of_one_rank()
    first = cluster.last("decode-0")
    turn = cluster.site.turn

    async def refuse(name: str, incarnation: str) -> None:
        await turn(name, incarnation)
        first.start_error = UserError("engine.num_pages: not what it has loaded")

    cluster.site.turn = refuse
    await cluster.monitor.renew("decode-0", None, "prefill")
    steps = ["drain", "retire", "turn", "kill", "create"]
    assert acts(cluster) == [f"{step} decode-0" for step in steps]
    replica = cluster.monitor.replica("decode-0")
    assert (replica.role, replica.restarts, replica.state) == ("prefill", 0, State.READY)
    assert cluster.last("decode-0").incarnation != first.incarnation


@pytest.mark.parametrize("is_dead", [True, False])
@asynchronous
async def test_who_dies_or_hangs_as_it_retires_gets_a_new_process(is_dead: bool) -> None:
    cluster = await of_one_rank()
    first = cluster.last("decode-0")
    first.deaf = True
    turning = asyncio.create_task(cluster.monitor.renew("decode-0", None, "prefill"))
    await cluster.until(lambda: "retire decode-0" in cluster.log)
    if is_dead:
        first.die()
    await turning
    assert acts(cluster)[-3:] == ["retire decode-0", "kill decode-0", "create decode-0"]
    assert cluster.monitor.replica("decode-0").role == "prefill"


@pytest.mark.parametrize("at", ["drain", "retire", "turn"])
@asynchronous
async def test_the_next_monitor_finds_a_turn_in_any_state(at: str) -> None:
    """Where the process has its new role, it goes on; else the name gets a new one. Where it drains
    still, its role is the old one, and the turn a renewal."""
    cluster = await of_one_rank()
    first = cluster.last("decode-0")
    first.idle, first.loaded = at != "drain", asyncio.Event()
    first.deaf = at == "retire"
    turning = asyncio.create_task(cluster.monitor.renew("decode-0", None, "prefill"))
    await cluster.until(lambda: f"{at} decode-0" in cluster.log)
    turning.cancel()
    first.over.set() if at == "retire" else None
    cluster.succeeded()
    first.idle = True
    first.loaded.set()
    replica = cluster.monitor.replica("decode-0")
    if replica.renewing and replica.reachable is not None:  # as the controller does
        await cluster.monitor.renew("decode-0", None)
    await cluster.until(lambda: replica.state is State.READY and len(cluster.links.peers) == 2)
    assert replica.role == cluster.site.records["decode-0"].role
    assert replica.role == ("decode" if at == "drain" else "prefill")
    assert (cluster.last("decode-0") is first) is (at == "turn")
    assert replica.member is not None
    assert replica.member.incarnation == replica.incarnation == cluster.last("decode-0").incarnation
