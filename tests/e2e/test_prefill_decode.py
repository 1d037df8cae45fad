"""Texts as of one process, prompts computed elsewhere; and every path of KV, by the doctor."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.check import KNOWN, check_cluster
from tests.e2e.harness import Serve
from tests.e2e.shared import USUAL, Clusters

PAIRS = {f"prefill-{i} -> decode-{j}" for i in range(2) for j in range(2)}


def test_concurrent_problems_equal_one_process(clusters: Clusters) -> None:
    serve = clusters.lend(*USUAL)
    check_cluster(serve.url, KNOWN[0], KNOWN)
    rows = serve.wait_idle()
    assert {name for name, row in rows.items() if row["counters"]} >= {"prefill-1", "decode-1"}


def findings(serve: Serve, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = serve.command("doctor", "--running", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.whole  # parts of it: tests/unit/test_doctor_findings.py
def test_every_path_is_measured_and_one_that_is_not_as_asked_is_a_failure(
    clusters: Clusters,
) -> None:
    serve = clusters.lend(*USUAL)
    code, found = findings(serve)
    assert code == 0, found
    assert {each["level"] for each in found} <= {"ok", "warning"}
    paths = {each["where"]: each for each in found if each["subject"] == "path"}
    assert set(paths) == PAIRS
    for each in paths.values():
        assert each["what"].startswith("mooncake/tcp, ")
        assert each["figures"]["bytes_per_s"] > 0
        assert each["figures"]["small_pull_s"] > 0
    live = httpx.get(f"{serve.url}/live").json()["workers"]
    assert set(live.values()) == {"live"}
    assert len(live) == 4

    code, found = findings(serve, "--set", "transport.kind=nvlink")
    assert code == 1
    wrong = [each for each in found if each["level"] == "failure"]
    assert {each["where"] for each in wrong} == PAIRS
    for each in wrong:
        assert each["what"].endswith("asked for is transport.kind=nvlink")
        assert each["why"]
        assert each["remedy"]
