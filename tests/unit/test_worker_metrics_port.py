"""The port of a worker's metrics: any free one, or one that the configuration names."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from worker.errors import UserError
from worker.observe.metrics import WorkerMetrics


def metrics_of(worker: str) -> WorkerMetrics:
    return WorkerMetrics(model="tiny", role="decode", worker=worker)


def test_a_port_that_is_named_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    metrics = metrics_of("decode-0")
    try:
        assert metrics.serve("127.0.0.1", port) == f"127.0.0.1:{port}"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            assert b"kvlane_requests_waiting" in response.read()
    finally:
        metrics.close()


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    first = metrics_of("decode-0")
    port = int(first.serve("127.0.0.1").rpartition(":")[2])
    try:
        with pytest.raises(UserError, match=rf"cluster\.worker_metrics_port: 127.0.0.1:{port}: "):
            metrics_of("decode-1").serve("127.0.0.1", port)
    finally:
        first.close()
