"""What every routing policy must keep, run for every row of the table."""

from collections import Counter

import pytest

from router.dispatch.members import Known, Members
from router.dispatch.policy import MAX_CANDIDATES, POLICIES, Policy, policy
from worker.api import Member, Role, WorkerStats
from worker.errors import UserError


def known(name: str, role: Role, *, layout: str = "h", transport: str = "shm") -> Known:
    member = Member(name, role, "1", "tcp://x:1", layout_hash=layout, transport=transport)
    return Known(member, WorkerStats(max_num_reqs=8, num_free_pages=9), live=True)


@pytest.fixture(params=sorted(POLICIES))
def chosen(request: pytest.FixtureRequest) -> Policy:
    return policy(request.param)


def test_choice_is_one_of_those_given(chosen: Policy) -> None:
    decode = [known(f"d{i}", "decode") for i in range(3)]
    prefill = [known(f"p{i}", "prefill") for i in range(5)]
    for _ in range(20):
        choice = chosen.choose((1, 2), decode, prefill)
        assert choice.decode in {k.peer for k in decode}
        peers = [candidate.peer for candidate in choice.candidates]
        assert len(set(peers)) == len(peers) == MAX_CANDIDATES
        assert set(peers) <= {k.peer for k in prefill}


def test_prefill_workers_that_cannot_serve_the_decode_worker_are_never_candidates(chosen) -> None:
    prefill = [
        known("other-layout", "prefill", layout="x"),
        known("other-transport", "prefill", transport="mooncake/tcp"),
        known("good", "prefill"),
    ]
    choice = chosen.choose((1, 2), [known("d", "decode")], prefill)
    assert [candidate.peer for candidate in choice.candidates] == ["good/1"]


def test_no_prefill_worker_is_no_candidate(chosen: Policy) -> None:
    assert chosen.choose((1, 2), [known("d", "decode")], []).candidates == ()


def test_equal_workers_get_equal_shares(chosen: Policy) -> None:
    members = Members()
    names = [f"d{i}" for i in range(4)]
    members.update([known(name, "decode").member for name in names])
    for name in names:
        members.pong(f"{name}/1", WorkerStats(max_num_reqs=8, num_free_pages=9))
    shares: Counter[str] = Counter()
    for _ in range(40):
        peer = chosen.choose((1, 2), members.open_decode(0.0), []).decode
        members.sent(peer, None, 40, 0.0)
        shares[peer] += 1
    assert set(shares.values()) == {10}


def test_candidate_says_what_is_known_of_it(chosen: Policy) -> None:
    prefill = known("p", "prefill")
    prefill.stats = WorkerStats(num_waiting=2, num_queued_tokens=100, prefill_s_per_token=0.002)
    prefill.proposed = [40]
    for size, before in ((200, 140), (40, 120), (20, 40)):  # longer ones are computed later
        prompt = range(1000 * size, 1001 * size)  # of which nothing is there
        (candidate,) = chosen.choose(prompt, [known("d", "decode")], [prefill]).candidates
        assert (candidate.num_queued_tokens, candidate.prefill_s_per_token) == (before, 0.002)


def test_a_short_prompt_goes_where_fewer_are_computed_before_it() -> None:
    """And not where fewer tokens wait, if those are of prompts as short as it is."""
    for name in ("least_loaded", "prefix_aware"):
        long, short = known("long", "prefill"), known("short", "prefill")
        long.stats = WorkerStats(num_waiting=1, num_queued_tokens=32_000)
        short.stats = WorkerStats(num_waiting=4, num_queued_tokens=2_000)
        for size, first in ((500, "long/1"), (8_000, "short/1")):
            route = policy(name).choose(range(size), [known("d", "decode")], [short, long])
            assert route.candidates[0].peer == first, (name, size)


def test_unknown_policy_lists_the_choices() -> None:
    with pytest.raises(UserError, match="least_loaded, prefix_aware, round_robin"):
        policy("best")


def test_least_loaded_takes_the_smallest_share_and_the_shortest_wait() -> None:
    chosen = policy("least_loaded")
    small, large = known("small", "decode"), known("large", "decode")
    small.stats = WorkerStats(num_running=4, max_num_reqs=8)
    large.stats = WorkerStats(num_running=6, max_num_reqs=64)
    slow, fast = known("slow", "prefill"), known("fast", "prefill")
    slow.stats = WorkerStats(num_waiting=1, num_queued_tokens=100, prefill_s_per_token=0.01)
    fast.stats = WorkerStats(num_waiting=1, num_queued_tokens=500, prefill_s_per_token=0.001)
    choice = chosen.choose(range(900), [small, large], [slow, fast])
    assert choice.decode == "large/1"
    assert [candidate.peer for candidate in choice.candidates] == ["fast/1", "slow/1"]


def test_prefix_aware_follows_the_prompt_until_its_worker_is_too_busy() -> None:
    chosen, decode = policy("prefix_aware"), [known(f"d{i}", "decode") for i in range(3)]
    system, other = tuple(range(512)), tuple(range(1000, 1512))
    home = chosen.choose((*system, 1), decode, []).decode
    assert chosen.choose((*system, *range(40)), decode, []).decode == home
    (hot,) = [each for each in decode if each.peer == home]
    hot.stats = WorkerStats(num_running=3, max_num_reqs=8)
    assert chosen.choose((*system, 5), decode, []).decode == home, "most of it is there"
    assert chosen.choose(other, decode, []).decode != home, "nothing of it is"
    hot.stats = WorkerStats(num_running=8, max_num_reqs=8)
    away = chosen.choose((*system, 6), decode, []).decode
    assert away != home, "it would wait for a row"
    assert chosen.choose((*system, 7), decode, []).decode == away, "now it is there, too"


def test_prefix_aware_spreads_conversations_and_their_turns_go_where_they_are() -> None:
    chosen, decode = policy("prefix_aware"), [known(f"d{i}", "decode") for i in range(3)]

    def at(number: int, num_own: int) -> str:
        tokens = (*range(512), *range(1000 * number, 1000 * number + num_own))
        return chosen.choose(tokens, decode, []).decode

    homes = [at(i, 64) for i in range(1, 10)]
    assert homes[0] == homes[1], "that others have it in common is not known before"
    assert [homes.count(each.peer) for each in decode] == [3, 3, 3]
    assert [at(i, 128) for i in range(1, 10)] == homes


def test_prefix_aware_copies_no_long_document_for_the_next_question() -> None:
    chosen, decode = policy("prefix_aware"), [known(f"d{i}", "decode") for i in range(8)]
    document = tuple(range(30_000))
    at = {chosen.choose((*document, *([i] * 64)), decode, []).decode for i in range(10)}
    assert len(at) == 1, "until its worker is busy"


def test_prefix_aware_believes_what_workers_report() -> None:
    chosen, decode = policy("prefix_aware"), [known(f"d{i}", "decode") for i in range(2)]
    system = tuple(range(512))
    home = chosen.choose(system, decode, []).decode
    (hot,) = [each for each in decode if each.peer == home]
    hot.stats = WorkerStats(num_running=3, max_num_reqs=8)
    for _ in range(20):
        route = chosen.choose(system, [hot], [])
        assert route.num_expected > 0
        chosen.found(route, 0)  # it has evicted it, again and again
    assert chosen.choose(system, decode, []).decode != home


@pytest.mark.parametrize("own", ["", "a"])
def test_prefix_aware_expects_nothing_of_another_salt(own: str) -> None:
    chosen, system = policy("prefix_aware"), tuple(range(512))
    decode, prefill = [known("d", "decode")], [known("p", "prefill")]
    assert chosen.choose(system, decode, prefill, own).num_expected == 0
    for other in ("", "a", "b"):
        expected = chosen.choose(system, decode, prefill, other).num_expected
        assert expected == (512 if other == own else 0)


def test_prefix_aware_asks_the_prefill_worker_that_has_the_prompt() -> None:
    chosen, decode = policy("prefix_aware"), [known("d", "decode")]
    prefill = [known(f"p{i}", "prefill") for i in range(3)]
    system = tuple(range(512))
    first = chosen.choose(system, decode, prefill).candidates[0]
    for _ in range(10):
        again = chosen.choose((*system, 1), decode, prefill).candidates
        had = [candidate.num_cached_tokens for candidate in again]
        assert (again[0].peer, had) == (first.peer, [512, 0, 0])


def test_prefix_aware_unlearns_what_a_prefill_worker_was_not_asked_for() -> None:
    chosen, decode, prefill = (
        policy("prefix_aware"), [known("d", "decode")], [known("p", "prefill")],
    )  # fmt: skip
    system = tuple(range(512))

    def had(prompt: tuple[int, ...], num_cached: int, by: str) -> int:
        route = chosen.choose(prompt, decode, prefill)
        chosen.found(route, num_cached, by)
        return route.candidates[0].num_cached_tokens

    assert had(system, 0, "d/1") == 0, "computed by the decode worker"
    assert had(system, 0, "p/1") == 0
    assert had((*system, *range(900, 964)), 512, "d/1") == 512
    assert had((*system, *range(900, 964)), 512, "p/1") == 512, "not what was added"
    assert had((*system, *range(900, 964)), 576, "p/1") == 576
    assert had(system, 0, "p/1") == 512
    assert had(system, 0, "p/1") < 512, "it has evicted it"
