"""A short form of tests.fault.fuzz_wire: wrong frames at every socket harm nobody."""

import pytest

from tests.e2e.shared import BRIEF, Clusters
from tests.fault.fuzz_wire import fuzz, kept, told
from tests.support import pairwise
from tests.support.disturbed import Watched

SECONDS, NUM = (60.0, 0) if pairwise.whole else (10.0, 2_000)
UNDISTURBED_S = 1.0


def test_wrong_frames_of_strangers_and_of_members_gone_bad_harm_nobody(
    clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> None:
    serve = clusters.take(*BRIEF)
    watched = Watched(serve)
    try:
        watched.begin(UNDISTURBED_S)
        ledger, took_s = fuzz(watched, seconds=SECONDS, num=NUM, seed=11, rate=0, releases=True)
        watched.noted()
        breaches = watched.breaches()
        print("\n".join([*told(ledger, took_s), *watched.report()]))
    finally:
        watched.close()
    if breaches:
        print(kept(ledger, 11, breaches, tmp_path_factory.getbasetemp()))
    assert not breaches, "\n".join(breaches)
    doors = set(ledger.by_door)
    assert "stranger to ports without ZMTP" in doors
    for role in ("router", "decode", "prefill"):
        for to in ("decode-0", "prefill-0"):
            assert f"{role} gone bad to {to}, a listener" in doors
    for to in ("router-0", "controller", "decode-0"):
        assert f"prefill gone bad to {to}, which has connected" in doors
