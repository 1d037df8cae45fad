"""Mutated bodies against a real cluster, by clients of which some hang up at any moment."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import shared_memory
from tests.e2e.raw import Connection
from tests.e2e.shared import BRIEF, Clusters, identity
from tests.support.mutants import judge, mutants
from tests.support.patience import HANG_S

NUM_BODIES, NUM_WHOLE = 4_000, 20_000  # the latter with --whole
NUM_CONNECTIONS = 32
MAX_NEW_FILES = 4  # open ones, of a process; a leak would be one a request or a hang-up

Bodies = Iterator[tuple[str, bytes]]


async def ask(connection: Connection, path: str, raw: bytes, how: str, rng: random.Random) -> int:
    """One request to its end, or to where its client hangs up; the status, if it was seen."""
    if how == "half":
        await connection.send(path, raw, num_bytes=rng.randint(1, len(raw) + 80))
    else:
        await connection.send(path, raw)
    if how == "asked":
        await asyncio.sleep(rng.choice([0, 0.002, 0.01, 0.05]))
    if how in ("half", "asked"):
        connection.drop(reset=rng.random() < 0.5)
        return 0
    status = await connection.head()
    if how == "seen":
        first = await connection.piece()
        assert status < 500, first
        connection.drop(reset=rng.random() < 0.5)
    else:
        judge(status, await connection.body())
    return status


async def client(port: int, bodies: Bodies, seed: int, counts: Counter[str]) -> None:
    """Takes bodies until there are no more; one in eight is left in some way."""
    rng, connection = random.Random(seed), Connection(port)
    for path, raw in bodies:
        how = rng.choice(["half", "asked", "seen"]) if rng.random() < 1 / 8 else "whole"
        try:
            status = await asyncio.wait_for(ask(connection, path, raw, how, rng), HANG_S)
        except Exception as error:
            raise AssertionError(f"{how} {path}: {raw[:3000]!r}") from error
        counts[how] += 1
        counts[str(status)] += 1
    connection.drop()


async def clients(port: int, bodies: Bodies) -> Counter[str]:
    """All of them at once; how often each way and each status came."""
    counts: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for seed in range(NUM_CONNECTIONS):
            group.create_task(client(port, bodies, seed, counts))
    return counts


def num_files(rows: dict[str, dict]) -> dict[str, int]:
    return {name: len(list(Path(f"/proc/{row['pid']}/fd").iterdir())) for name, row in rows.items()}


@pytest.mark.timeout(400)  # of whole ones, 45 s on two cores of its own
@pytest.mark.whole  # tests.fault.test_fuzz_http sends such bodies as well
def test_mutated_bodies_make_no_5xx_and_leave_nothing(
    clusters: Clusters, pytestconfig: pytest.Config
) -> None:
    num_bodies = NUM_WHOLE if pytestconfig.option.whole else NUM_BODIES
    serve = clusters.lend(*BRIEF)
    first = mutants(200, seed=8, model="tiny")
    asyncio.run(clients(serve.port, first))  # whatever is made only once has been made
    before = serve.wait_idle()
    shm_before, files_before = shared_memory(), num_files(before)

    began = time.monotonic()
    counts = asyncio.run(clients(serve.port, mutants(num_bodies, seed=9, model="tiny")))
    took_s = time.monotonic() - began
    print(f"{num_bodies} bodies in {took_s:.1f} s: {dict(sorted(counts.items()))}")
    after = serve.wait_idle()
    assert counts["200"] > num_bodies / 8
    assert counts["400"] > num_bodies / 4
    assert min(counts["half"], counts["asked"], counts["seen"]) > num_bodies / 50
    assert identity(after) == identity(before), serve.output
    assert shared_memory() <= shm_before
    files = num_files(after)
    assert all(files[name] <= files_before[name] + MAX_NEW_FILES for name in files), files
    assert "Traceback" not in serve.output
