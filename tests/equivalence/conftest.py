"""What several files of laws share."""

from collections.abc import Iterator

import pytest

from tests.support.drafter_cases import Known
from tests.support.engines import Running, running
from tests.support.laws import sections


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Answers without a drafter, and a directory for drafters."""
    return Known.made(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def alone() -> Iterator[Running]:
    """One process, no prefill worker, no prefix cache, whole prompts."""
    with running(sections("never", prefix_cache=False), num_prefill=0) as cluster:
        yield cluster
