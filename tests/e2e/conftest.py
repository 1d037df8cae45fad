"""Moves pytest into a namespace before any cluster starts."""

import pytest

from tests.e2e.harness import enter_namespace


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None):  # tests/conftest.py sees to those
        enter_namespace(config)
