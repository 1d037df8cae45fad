"""Short forms of tests.fault.fuzz_http and of its attacks."""

import asyncio

import pytest

from tests.e2e.shared import BRIEF, Clusters
from tests.fault import http_attacks
from tests.fault.fuzz_http import breaches_of, fuzz, kept, told
from tests.support import pairwise
from tests.support.disturbed import Watched

SECONDS, NUM = (60.0, 0) if pairwise.whole else (10.0, 400)
SIZES = http_attacks.Sizes() if pairwise.whole else http_attacks.BRIEF
UNDISTURBED_S = 1.0


def test_wrong_requests_harm_nobody(
    clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> None:
    watched = Watched(clusters.lend(*BRIEF))
    try:
        watched.begin(UNDISTURBED_S)
        answers, took_s = asyncio.run(fuzz(watched, seconds=SECONDS, num=NUM, seed=12))
        watched.noted()
        breaches = breaches_of(answers) + watched.breaches()
        print("\n".join([*told(answers, took_s), *watched.report()]))
    finally:
        watched.close()
    if breaches:
        print(kept(answers, 12, breaches, tmp_path_factory.getbasetemp()))
    assert not breaches, "\n".join(breaches)
    assert answers.statuses["200"] > answers.num / 50
    assert answers.statuses["400"] > answers.num / 10


def test_floods_of_large_things_are_told_and_harm_nobody(clusters: Clusters) -> None:
    watched = Watched(clusters.lend(*BRIEF))
    try:
        watched.begin(UNDISTURBED_S)
        breaches: list[str] = []
        for made in http_attacks.attack(watched, SIZES):
            print(made)
            breaches += made.breaches
        breaches += watched.breaches()
        print("\n".join(watched.report()))
    finally:
        watched.close()
    assert not breaches, "\n".join(breaches)
