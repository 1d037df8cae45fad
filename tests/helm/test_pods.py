"""The pods' own commands, run as they are rendered. Four Ray nodes: with --whole only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.charts import REPOSITORY, rendered
from tests.support.namespaces import ENTER


@pytest.mark.whole
def test_the_pods_of_the_chart_start_serve_and_end() -> None:
    rendered("default")  # skips without Helm
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root, unshare and iproute2 for namespaces")
    if subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not make namespaces")
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("the pods have a /tmp of their own, so Python must not lie there")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helm.pods"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill on prefill-0, KV pulled, decode on decode-0" in done.stdout
