"""Software written for OpenAI, of several versions, against a real cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.__main__ import OFFLINE
from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.shared import USUAL, Clusters
from tests.support.pairwise import in_whole
from tests.support.patience import HANG_S

CLIENTS = Path("tests") / "clients"  # its README has the versions, `install` installs them
TOOLS = REPOSITORY / ".tools"  # openai-agents needs another openai than the others do
VENVS = {"agents": TOOLS / "agents"}


@pytest.fixture
def cluster(clusters: Clusters) -> Serve:
    return clusters.lend(*USUAL)


def run(cluster: Serve, *command: str) -> None:
    """Let a client check the cluster, which has to be idle then."""
    done = subprocess.run(
        [*command, cluster.url], cwd=REPOSITORY / CLIENTS, env={**os.environ, **OFFLINE},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    cluster.wait_idle()


def test_openai_of_this_environment(cluster: Serve) -> None:
    run(cluster, sys.executable, "openai_checks.py")


@pytest.mark.parametrize(
    "library",
    [
        "anthropic",
        *in_whole(("openai",), ("langchain_openai",), ("llama_index",), ("instructor",)),
        *in_whole(("pydantic_ai",), ("dspy",), ("agents",), ("litellm",)),
    ],
)
def test_library(cluster: Serve, library: str) -> None:
    venv = VENVS.get(library, TOOLS / "clients")
    if not list(venv.glob(f"lib/python*/site-packages/{library}")):
        pytest.skip(f"no {library}; see tests/clients/README.md")
    run(cluster, str(venv / "bin" / "python"), f"{library}_checks.py")


@pytest.mark.whole
def test_openai_of_javascript(cluster: Serve) -> None:
    if not (REPOSITORY / CLIENTS / "js" / "node_modules").exists() or not shutil.which("node"):
        pytest.skip("no openai of JavaScript; see tests/clients/README.md")
    run(cluster, "node", "js/openai_checks.mjs")
