"""Workers of several ranks on the CPU: the texts of one rank, any rank's death, nothing left."""

import asyncio
import os
import re
import signal
import uuid
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import KNOWN
from tests.e2e.harness import Serve, processes, shared_memory
from tests.e2e.shared import Clusters
from tests.support import pairwise
from tests.support.asking import Outcome, ask_all
from tests.support.collector import Collector, collecting
from tests.support.patience import HANG_S
from tests.support.prompts import problem_ids
from tests.support.reference import reference_texts
from tests.support.scrape import scrape
from tests.support.trace_laws import check_request

NUM_ASKED = 8 if pairwise.whole else 4  # greedy and seeded ones by turns
COMPUTED = "kvlane_prompt_tokens_computed_total"
PARENT = "b7ad6b7169203331"  # the client's span


def pids_of(serve: Serve) -> dict[str, list[int]]:
    """Of all ranks of each worker and router, the leader's first."""
    return {name: row["pids"] for name, row in serve.status().items()}


async def answers(serve: Serve, victim: int = 0) -> list[Outcome]:
    """All at once. `victim`: a process that is killed once the first token is there."""
    questions = [problem.question for problem in held_out_problems(NUM_ASKED)]
    outcomes = [Outcome() for _ in questions]
    asking = asyncio.create_task(
        ask_all(serve.url, questions, max_tokens=KNOWN[1], timeout_s=HANG_S, outcomes=outcomes)
    )
    if victim:
        while not any(each.num_chunks for each in outcomes) and not asking.done():
            await asyncio.wait((asking,), timeout=0.01)
        os.kill(victim, signal.SIGKILL)
    return await asking


def check_answers(serve: Serve, victim: int = 0, *, may_be_cut: bool = False) -> None:
    """Texts of one rank, greedy and seeded; those of a decode worker that dies may be cut off."""
    outcomes = asyncio.run(answers(serve, victim))
    expected = reference_texts(*KNOWN)[:NUM_ASKED]
    for each, (text, reason) in zip(outcomes, expected, strict=True):
        if may_be_cut and each.error == "worker_lost":
            assert text.startswith(each.text)
        else:
            assert (each.error, each.text, each.finish_reason) == (None, text, reason), serve.output


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def check_trace(serve: Serve, collector: Collector) -> None:
    """One tree without gaps, though each process has its own clock and tells its own spans."""
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    body = {"prompt": problem_ids(1)[0], "max_tokens": 12}
    url = f"{serve.url}/v1/completions"
    httpx.post(url, json=body, headers=headers, timeout=HANG_S).raise_for_status()
    wanted = {"POST /v1/completions", "respond", "prefill", "prefill_chunk", "pull", "decode"}
    spans = collector.wait(trace_id, lambda told: wanted <= {span.name for span in told})
    check_request(spans, PARENT)
    assert {span.instance for span in spans} == {"router-0", "prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("prefill", "decode", "victim", "rank"),
    [
        (1, 2, "decode-0", 1),
        *pairwise.in_whole((2, 2, "decode-0", 0), (2, 1, "prefill-0", 1)),
        *pairwise.in_whole((1, 4, "decode-0", 3), (4, 2, "prefill-0", 2)),
    ],
)
def test_ranks_answer_as_one_and_the_death_of_any_replaces_them_all(
    clusters: Clusters, collector: Collector, prefill: int, decode: int, victim: str, rank: int
) -> None:
    ranks = {"prefill-0": prefill, "decode-0": decode, "router-0": 1}
    serve = clusters.fresh(
        "--set", f"prefill.tp={prefill}",
        "--set", f"decode.tp={decode}",
        "--set", "disaggregation.mode=always",
        "--set", f"tracing.endpoint={collector.url}",
        "--set", "tracing.sample_ratio=0",
    )  # fmt: skip
    first = pids_of(serve)
    assert {name: len(pids) for name, pids in first.items()} == ranks
    check_answers(serve)
    computed = scrape(serve.url)
    assert computed[COMPUTED, "prefill", ""] > 0
    assert computed[COMPUTED, "decode", ""] == 0
    for role, tp in (("prefill", prefill), ("decode", decode)):
        assert computed["kvlane_ranks", role, ""] == tp
        assert (computed["kvlane_all_reduce_bytes_count", role, ""] > 0) is (tp > 1)

    check_trace(serve, collector)
    check_answers(serve, first[victim][rank], may_be_cut=victim == "decode-0")
    row = serve.wait_status(victim, restarts=1, state="ready")
    role = victim.partition("-")[0]
    page = httpx.get(f"{serve.url}/metrics").text
    deaths = re.findall(r'kvlane_worker_deaths_total{.*worker_role="(\w+)"} (\d)', page)
    assert dict(deaths)[role] == "1"
    assert not set(first[victim]) & set(processes()), "ranks of the dead incarnation"
    second = pids_of(serve)
    assert row["pids"] == second[victim]
    assert {name: len(pids) for name, pids in second.items()} == ranks
    assert {name for name in ranks if second[name] != first[name]} == {victim}
    check_answers(serve)

    serve.wait_idle()
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert not {pid for pids in second.values() for pid in pids} & set(processes())
    assert shared_memory() == clusters.shm_before
