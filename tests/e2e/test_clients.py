"""Software written for OpenAI, of several versions, against a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load.__main__ import main as load
from benchmarks.load.result import read
from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.shared import USUAL, Clusters

OPENAI2 = REPOSITORY / ".tools" / "openai2" / "bin" / "python"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it waits for a list of prices


@pytest.fixture
def cluster(clusters: Clusters) -> Serve:
    return clusters.lend(*USUAL)


def run(cluster: Serve, python: str, script: str) -> None:
    """Let a client's own virtual environment check the cluster, which has to be idle then."""
    done = subprocess.run(
        [python, str(Path("tests") / "clients" / script), cluster.url],
        cwd=REPOSITORY, env={**os.environ, **OFFLINE}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    cluster.wait_idle()


def test_openai_of_this_environment(cluster: Serve) -> None:
    run(cluster, sys.executable, "openai_checks.py")


def test_openai_2_litellm_and_langchain(cluster: Serve) -> None:
    if not OPENAI2.exists():
        pytest.skip(f"no {OPENAI2}; see tests/clients/requirements.txt")
    run(cluster, str(OPENAI2), "openai2.py")


def test_the_load_harness_sees_every_stage(cluster: Serve, tmp_path: Path) -> None:
    path = str(tmp_path / "result.json")
    asked = ["--url", cluster.url, "--concurrency", "3", "--num", "12", "--tokenizer", "tiny"]
    assert load([*asked, "--source", "synthetic:64-128,12", "--quiet", "--json", path]) == 0
    (summary,) = read(path).summaries
    assert summary["requests"]["served"] == 12
    assert summary["tokens"]["output"] == 12 * 12
    for stage in ("prefill_s", "transfer_s", "decode_s"):
        assert summary["stages"][stage]["p50"] > 0
    assert summary["stages"]["unaccounted_s"]["min"] >= 0
    cluster.wait_idle()
