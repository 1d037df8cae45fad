"""What the laws of drafters and the mutants that break them share."""

from __future__ import annotations

import pytest

from tests.support.drafter_cases import Known


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Answers without a drafter, and a directory for drafters."""
    return Known.made(tmp_path_factory.mktemp("drafters"))
