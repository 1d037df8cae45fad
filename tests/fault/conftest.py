"""Faults are injected into real clusters, inside the same namespaces as tests/e2e."""

from tests.e2e.conftest import pytest_configure

__all__ = ["pytest_configure"]
