"""The only prefill worker is killed under load: nobody notices, it comes back. `--whole`: twice.

What tests/gpu/test_kills_on_cuda.py shows of GPUs and their memory, rehearsed on CPUs.
"""

from __future__ import annotations

import asyncio

from tests.e2e.harness import shared_memory
from tests.e2e.shared import Clusters
from tests.support import pairwise
from tests.support.kills import Killing, Steady, no_memory
from tests.support.patience import HANG_S

ARGUMENTS = (
    "--set", "transport.name=mooncake",
    "--set", "disaggregation.mode=always",
    "--set", "kv.num_groups=3",  # as on CUDA: KV leaves while its step computes
    "--set", "prefill.engine.prefix_cache=false",
    "--set", "decode.engine.prefix_cache=false",
)  # fmt: skip


def test_kill_the_only_prefill_worker(clusters: Clusters) -> None:
    shm_before = shared_memory()
    load = Steady(num_problems=64, max_tokens=200, num_at_once=6)
    serve = clusters.fresh(*ARGUMENTS)
    killing = Killing(serve, load, "mooncake/tcp", no_memory, timeout_s=HANG_S)
    num = 2 if pairwise.whole else 1
    assert len(asyncio.run(killing.repeat(num))) == num
    load.check()
    serve.wait_idle()
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert shared_memory() == shm_before
    assert serve.leftovers() == []
