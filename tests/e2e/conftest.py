"""Moves pytest into a namespace before any cluster starts, and lends out clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Serve, enter_namespace


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist: its first process has entered
        enter_namespace(config)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A cluster that is not started yet; ended after the test."""
    cluster = Serve(tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One prefill, one decode, one router with the bundled model, shared by a module."""
    cluster = Serve(tmp_path_factory.mktemp("tiny"), port=8100).start().wait_ready()
    yield cluster
    cluster.end()
