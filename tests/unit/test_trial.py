"""The trial that sizes a GPU's pool runs every tail; here on the CPU, by the same code."""

from __future__ import annotations

import pytest

from tests.support.engines import worker_config
from worker.engine.engine import build_engine, capabilities
from worker.engine.load import try_largest_steps


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_trial_touches_nothing_but_the_sink(role: str) -> None:
    config = worker_config(
        role, {"engine": {"device": "cpu", "num_pages": 20, "max_num_reqs": 5, "threads": 1}}
    )
    engine = build_engine(config, name=f"{role}-0", host="127.0.0.1")
    runner, wanted = engine.runner, capabilities(engine.config)
    try_largest_steps(engine.config, engine.spec, engine.layout, wanted, runner.loaded.model)
    runner.graphs.trial()
    assert not runner.loaded.state.active.any()
    assert not runner.loaded.state.ints.seq_len.any()
    for layer in range(engine.spec.num_layers):
        for cache in engine.pool.layer(layer):
            assert not cache[1:].any()
    engine.close()
