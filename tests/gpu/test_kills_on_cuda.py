"""kill -9 of the prefill worker on GPUs, five times under load: its memory and the service return.

The bundled model in float32; the pools are as large as their share of the GPU, so a successor has
no room if anything still holds its predecessor's. Every prompt is computed by the prefill worker
while there is one. Run with -s to see how long each recovery took.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Serve, processes
from tests.gpu.test_cluster_on_cuda import COMMON, READY_TIMEOUT_S, ROADS, SHARED
from tests.support.kills import SLACK_MIB, SURVIVOR, Killing, Steady, memory_used
from tests.support.reference import reference_texts

NUM_KILLS = 5
NUM_PROBLEMS = 32
MAX_TOKENS = 100
NUM_AT_ONCE = 16
RECOVERY_TIMEOUT_S = 200.0
UNCACHED = (
    "--set", "prefill.engine.prefix_cache=false",
    "--set", "decode.engine.prefix_cache=false",
)  # fmt: skip


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    cluster = Serve(tmp_path, port=8730)
    yield cluster
    cluster.end()


def check(serve: Serve, kind: str, *arguments: str) -> None:
    reference_texts(NUM_PROBLEMS, MAX_TOKENS)
    unused = memory_used()
    serve.start(*COMMON, *UNCACHED, "--set", f"transport.kind={kind}", *arguments)
    serve.wait_ready(READY_TIMEOUT_S)
    load = Steady(NUM_PROBLEMS, MAX_TOKENS, NUM_AT_ONCE)
    killing = Killing(serve, load, ROADS[kind], memory_used, RECOVERY_TIMEOUT_S)
    asyncio.run(killing.repeat(NUM_KILLS))
    load.check()
    rows = serve.wait_idle()
    assert rows[SURVIVOR]["restarts"] == 0
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert not {row["pid"] for row in rows.values()} & set(processes())
    assert serve.leftovers() == []
    assert all(now <= then + SLACK_MIB for now, then in zip(memory_used(), unused, strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["nvlink", "tcp"])
@pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=pytest.mark.gpu(2 * tp, alone=True)) for tp in (1, 2)]
)
def test_kills_with_a_gpu_for_each_rank(kind: str, tp: int, serve: Serve) -> None:
    check(serve, kind, "--set", f"prefill.tp={tp}", "--set", f"decode.tp={tp}")


@pytest.mark.gpu(1, alone=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["nvlink", "tcp"])
def test_kills_on_one_gpu(kind: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of `serve`, however many there are
    check(serve, kind, *SHARED)
