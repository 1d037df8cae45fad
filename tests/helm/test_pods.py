"""The pods' own commands, run as they are rendered: downloads against a hub of our own, and all.

The latter needs three or four Ray nodes: with --whole only.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import Config
from tests.helm.charts import REPOSITORY, Render, parsed, rendered, template
from tests.support.hub import Repo, running
from tests.support.namespaces import ENTER
from tests.support.patience import HANG_S

TINY = Config().model.directory
NAME = "some-org/Tiny-0.1B"


def test_workers_fetch_all_and_serve_what_it_tokenizes_with(tmp_path: Path) -> None:
    with running(some_org__Tiny_0_1B=Repo(TINY, token="hf_secret")) as hub:
        hub.repos = {NAME: next(iter(hub.repos.values()))}
        asked = f"{{name: {NAME}, endpoint: '{hub.url}', tokenSecret: {{name: hub}}}}"
        done = template(values=f"model: {{source: hf, hf: {asked}}}")
        assert done.returncode == 0, done.stderr
        pods = Render(parsed(done.stdout)).components()
        names = {}
        for component in ("decode", "serve"):
            (container,) = pods[component]["initContainers"]
            given = {each["name"]: each.get("value", "hf_secret") for each in container["env"]}
            models = tmp_path / component
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(
                [*container["command"], container["args"][0].replace("/models/", f"{models}/")],
                env=given | {"PATH": path, "HOME": str(tmp_path / f"{component}-home")},
                capture_output=True, timeout=HANG_S, check=True,
            )  # fmt: skip
            files = (models / NAME).iterdir()
            names[component] = {file.name for file in files if file.is_file()}
    assert names["decode"] - names["serve"] == {"model.safetensors"}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names["serve"]


@pytest.mark.whole
@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((), id="role"),
        # Both workers in a pod: nothing else would find the other's memory.
        pytest.param(("workers.layout=node", "config.transport.name=shm"), id="node"),
    ],
)
def test_the_pods_of_the_chart_start_serve_and_end(sets: tuple[str, ...]) -> None:
    rendered("default")  # skips without Helm
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root, unshare and iproute2 for namespaces")
    if subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not make namespaces")
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("the pods have a /tmp of their own, so Python must not lie there")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helm.pods", *(f"--set={each}" for each in sets)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill on prefill-0, KV pulled, decode on decode-0" in done.stdout
