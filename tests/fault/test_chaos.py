"""A short form of tests.fault.chaos: workers and the controller are killed and stopped."""

import asyncio

from tests.e2e.harness import shared_memory
from tests.e2e.shared import USUAL, Clusters
from tests.fault.chaos.__main__ import parse, soak
from tests.support import pairwise

MINUTES = "3" if pairwise.whole else "0.28"


def test_no_request_is_lost_and_no_text_is_wrong(clusters: Clusters) -> None:
    serve = clusters.take(*USUAL)
    options = parse([
        "--out", "nowhere", "--minutes", MINUTES, "--every", "4", "--rate", "5", "--num", "1",
        "--seed", "3", "--roles", "controller,decode,prefill", "--keys", "0.5",
    ])  # fmt: skip
    figures = asyncio.run(soak(options, serve.url, serve.root))
    assert (figures["failed"], figures["wrong"], figures["left"]) == ([], [], {})
    assert figures["num_faults"] >= 3, "one of each role"
    assert "controller" in figures["faults_by_kind"]
    assert figures["counters"]["kvlane_retries_total"] > 0
    serve.wait_idle()
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert shared_memory() == clusters.shm_before
