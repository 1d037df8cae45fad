"""Software written for OpenAI, of several versions, against a real cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY, Serve

OPENAI2 = REPOSITORY / ".tools" / "openai2" / "bin" / "python"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(tmp_path_factory.mktemp("clients"), port=8200)
    arguments = ("--decode", "2", "--set", "disaggregation.mode=always")
    yield serve.start(*arguments).wait_ready()
    serve.end()


def test_openai_2_litellm_and_langchain(cluster: Serve) -> None:
    if not OPENAI2.exists():
        pytest.skip(f"no {OPENAI2}; see tests/clients/requirements.txt")
    script = Path("tests") / "clients" / "openai2.py"
    done = subprocess.run(
        [str(OPENAI2), str(script), cluster.url],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait_idle()
