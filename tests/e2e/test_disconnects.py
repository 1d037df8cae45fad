"""Clients that hang up in every phase of a request; others beside them get their right texts.

At random moments: tests/fault/test_chaos.py. And the log of such a cluster, by a request's id.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import KNOWN
from tests.e2e.harness import Serve
from tests.e2e.raw import Connection
from tests.e2e.shared import Clusters
from tests.fault.router_doubles import metric, wait_until
from tests.support.asking import ask_all
from tests.support.pairwise import in_whole
from tests.support.patience import HANG_S
from tests.support.reference import reference_texts
from tests.support.scrape import scrape

NUM_WITNESSES = 6
NUM_ROWS = 12
NUM_LONG = 1600  # tokens of a long prompt: a hundred steps of prefill
VOCAB_SIZE = 1024
ARGUMENTS = (
    "--prefill", "1", "--decode", "1",
    "--set", "disaggregation.mode=always",
    "--set", f"decode.engine.max_num_reqs={NUM_ROWS}",
    "--set", "decode.engine.max_waiting=0",
    "--set", "prefill.engine.max_prefill_tokens=16",
    # These for lines of the log.
    "--set", "cluster.log_level=DEBUG",
    "--log-format", "json",
)  # fmt: skip
# (n, stream): every kind of request that is left.
KINDS = ((1, True), (1, False), (4, True), (4, False))
NUM_CHOICES = sum(n for n, _ in KINDS)


@pytest.fixture
def cluster(clusters: Clusters) -> Serve:
    reference_texts(*KNOWN)
    return clusters.lend(*ARGUMENTS)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return rng.choices(range(16, VOCAB_SIZE), k=num_tokens)


@dataclass(slots=True)
class Leavers:
    """Clients that read little and hang up."""

    serve: Serve
    connections: list[Connection] = field(default_factory=list[Connection])

    async def begin(self, ids: list[int], n: int, stream: bool, num: int) -> Connection:
        """A request for `n` answers of exactly `num` tokens; nothing of the answer is read."""
        connection = Connection(self.serve.port)
        self.connections.append(connection)
        body = {"prompt": ids, "n": n, "stream": stream, "max_tokens": num, "ignore_eos": True}
        await connection.send_json("/v1/completions", body)
        return connection

    def close(self) -> None:
        """All hang up, every other one with a reset."""
        for i, connection in enumerate(self.connections):
            connection.drop(reset=i % 2 == 0)


async def until(
    serve: Serve, is_so: Callable[[Any], bool], read: Callable[[str], Any] = scrape
) -> Any:
    """What is read, by default the workers' metrics, as soon as something is true of it."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await asyncio.to_thread(read, serve.url)
            if is_so(found):
                return found
            await asyncio.sleep(0.02)


async def until_waiting(serve: Serve, num: int) -> None:
    await until(serve, lambda waiting: waiting == num, partial(metric, name="requests_waiting{"))


@asynccontextmanager
async def witnesses(serve: Serve) -> AsyncIterator[None]:
    """Problems asked before the body, and what became of them after it."""
    questions = [problem.question for problem in held_out_problems(NUM_WITNESSES)]
    asked = asyncio.create_task(ask_all(serve.url, questions, max_tokens=KNOWN[1]))
    try:
        yield
        outcomes = await asked
    finally:
        asked.cancel()
    assert [outcome.error for outcome in outcomes] == [None] * NUM_WITNESSES
    texts = [(outcome.text, outcome.finish_reason) for outcome in outcomes]
    assert texts == list(reference_texts(*KNOWN)[:NUM_WITNESSES])


async def while_it_waits_for_a_worker(serve: Serve) -> None:
    rng = random.Random(1)
    with closing(Leavers(serve)) as holders, closing(Leavers(serve)) as waiting:
        for _ in range(NUM_ROWS // 4):
            holder = await holders.begin(prompt(rng, 8), 4, True, 1500)
            assert await holder.head() == 200
        for n, stream in KINDS:
            await waiting.begin(prompt(rng, 8), n, stream, 8)
        await until_waiting(serve, NUM_CHOICES)
        async with witnesses(serve):
            await until_waiting(serve, NUM_CHOICES + NUM_WITNESSES)
            waiting.close()
            await until_waiting(serve, NUM_WITNESSES)
            for holder in holders.connections:
                assert (await holder.piece()).startswith(b"data: {")
            holders.close()


async def while_its_prompt_is_prefilled(serve: Serve) -> None:
    computed = "kvlane_prompt_tokens_computed_total", "prefill", ""
    leases = "kvlane_leases", "prefill", ""
    rng = random.Random(2)
    start = scrape(serve.url)[computed]
    with closing(Leavers(serve)) as left:
        for n, stream in KINDS:
            await left.begin(prompt(rng, NUM_LONG), n, stream, 8)
        await until(serve, lambda now: now[leases] == len(KINDS) and now[computed] > start)
        async with witnesses(serve):
            left.close()
            cut = await until(serve, lambda now: now[leases] <= NUM_WITNESSES)
    num_computed = cut[computed] - start
    assert num_computed < len(KINDS) * NUM_LONG, "the prompts were done before they were left"


async def while_tokens_are_drawn(serve: Serve) -> None:
    drawn = "kvlane_generation_tokens_total", "decode", ""
    rng = random.Random(3)
    start = scrape(serve.url)[drawn]
    with closing(Leavers(serve)) as left:
        for n, stream in KINDS:
            connection = await left.begin(prompt(rng, 20), n, stream, 1500)
            if stream:
                assert await connection.head() == 200
                for _ in range(5):
                    assert (await connection.piece()).startswith(b"data: {")
        now = await until(serve, lambda now: now[drawn] > start + 20 * NUM_CHOICES)
        async with witnesses(serve):
            await until(serve, lambda later: later[drawn] > now[drawn])
            left.close()


MOMENTS = (while_it_waits_for_a_worker, while_tokens_are_drawn)


@pytest.mark.parametrize("leave", [*MOMENTS, *in_whole((while_its_prompt_is_prefilled,))])
def test_clients_hang_up(cluster: Serve, leave: Callable[[Serve], Awaitable[None]]) -> None:
    """Everything is at rest then, in the same processes."""
    before = cluster.wait_idle()
    try:
        asyncio.run(asyncio.wait_for(leave(cluster), HANG_S))
    except TimeoutError as error:
        raise AssertionError(f"hangs: {cluster.status()}") from error
    after = cluster.wait_idle()
    assert [row["pid"] for row in after.values()] == [row["pid"] for row in before.values()]
    assert "Traceback" not in cluster.output


def test_one_id_names_a_request_in_the_lines_of_every_process(cluster: Serve) -> None:
    body = {"model": "tiny", "prompt": "one id " * 30, "max_tokens": 4}
    headers = {"X-Request-Id": "one-id-for-all"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
    assert answer.headers["x-request-id"] == "one-id-for-all"
    wanted = {"kvlane.access", "kvlane.router", "kvlane.decode", "kvlane.outbound"}

    def said() -> list[dict[str, str]]:
        whole = cluster.output.split("\n")[:-1]
        lines = (json.loads(line) for line in whole if line[0] != "[")  # as Ray's C++ begins
        ids = ("req_id", "xfer_id")
        return [e for e in lines if any(e.get(i, "").startswith("one-id-for-all") for i in ids)]

    wait_until(lambda: {line["logger"] for line in said()} == wanted)
    assert {line["process"] for line in said()} == {"router-0", "prefill-0", "decode-0"}
    assert {line["level"] for line in said()} == {"DEBUG"}
    cluster.wait_idle()
