"""The largest steps, which size a GPU's pool, run every tail; here on the CPU, by the same code."""

from __future__ import annotations

import pytest

from tests.support.engines import worker_config
from worker.start.build import build_engine
from worker.start.load import run_largest_steps


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_largest_steps_touch_nothing_but_the_sink(role: str) -> None:
    config = worker_config(
        role, {"engine": {"device": "cpu", "num_pages": 20, "max_num_reqs": 5, "threads": 1}}
    )
    engine = build_engine(config, name=f"{role}-0", host="127.0.0.1")
    runner = engine.runner
    run_largest_steps(engine.config, engine.layout, runner.loaded.model)
    runner.graphs.run_largest_steps()
    assert not runner.loaded.state.active.any()
    assert not runner.loaded.state.ints.seq_len.any()
    for layer in range(engine.spec.num_layers):
        for cache in engine.pool.layer(layer):
            assert not cache[1:].any()
    engine.close()
