"""Short forms of tests.fault.fuzz_http, of its attacks, and of tests.fault.fuzz_wire."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.shared import BRIEF, Clusters
from tests.fault import fuzz_http, fuzz_wire, http_attacks, stored_attacks
from tests.fault.crowd_attacks import CROWDS
from tests.support import pairwise
from tests.support.disturbed import watching
from tests.support.fuzzing import kept

SECONDS = 60.0 if pairwise.whole else 10.0
SIZES = http_attacks.Sizes() if pairwise.whole else http_attacks.BRIEF
UNDISTURBED_S = 1.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It stays where a test fails."""
    return tmp_path_factory.getbasetemp()


def judge(of: str, seed: int, breaches: list[str], sent: object, place: Path) -> None:
    if breaches:
        print(kept(of, seed, breaches, sent, place))
    assert not breaches, "\n".join(breaches)


def test_wrong_requests_harm_nobody(clusters: Clusters, place: Path) -> None:
    num = 0 if pairwise.whole else 250
    with watching(clusters.lend(*BRIEF), UNDISTURBED_S) as watched:
        fuzzing = fuzz_http.fuzz(watched, seconds=SECONDS, num=num, seed=12)
        answers, took_s = asyncio.run(fuzzing)
        watched.noted()
        breaches = fuzz_http.breaches_of(answers) + watched.breaches()
        print("\n".join([*fuzz_http.told(answers, took_s), *watched.report()]))
    judge("http", 12, breaches, answers.shown(), place)
    assert answers.statuses["200"] > answers.num / 50
    assert answers.statuses["400"] > answers.num / 10


@pytest.mark.whole
def test_floods_of_large_things_are_told_and_harm_nobody(clusters: Clusters) -> None:
    with watching(clusters.lend(*BRIEF), UNDISTURBED_S) as watched:
        breaches: list[str] = []
        # The first crowd needs a template of its own.
        attacks = (*http_attacks.ATTACKS, *stored_attacks.ATTACKS, *CROWDS[1:])
        for made in http_attacks.attack(watched, SIZES, attacks):
            print(made)
            breaches += made.breaches
        breaches += watched.breaches()
        print("\n".join(watched.report()))
    assert not breaches, "\n".join(breaches)


def test_wrong_frames_of_strangers_and_of_members_gone_bad_harm_nobody(
    clusters: Clusters, place: Path
) -> None:
    num = 0 if pairwise.whole else 2_000
    with watching(clusters.take(*BRIEF), UNDISTURBED_S) as watched:
        ledger, took_s = fuzz_wire.fuzz(
            watched, seconds=SECONDS, num=num, seed=11, rate=0, releases=True
        )
        watched.noted()
        breaches = watched.breaches()
        print("\n".join([*fuzz_wire.told(ledger, took_s), *watched.report()]))
    judge("wire", 11, breaches, ledger.shown(), place)
    doors = set(ledger.by_door)
    assert "stranger to ports without ZMTP" in doors
    for role in ("router", "decode", "prefill"):
        for to in ("decode-0", "prefill-0"):
            assert f"{role} gone bad to {to}, a listener" in doors
    for to in ("router-0", "controller", "decode-0"):
        assert f"prefill gone bad to {to}, which has connected" in doors
