"""The init containers that fetch a model, run as they are rendered, against a hub of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from cluster.config import Config
from tests.helm.charts import CHART, helm
from tests.helm.integrity import Render
from tests.support.hub import Repo, running
from tests.support.patience import HANG_S

TINY = Config().model.directory
NAME = "some-org/Tiny-0.1B"


def test_workers_fetch_all_and_serve_what_it_tokenizes_with(tmp_path: Path) -> None:
    with running(some_org__Tiny_0_1B=Repo(TINY, token="hf_secret")) as hub:
        hub.repos = {NAME: next(iter(hub.repos.values()))}
        done = helm(
            4, "template", "demo", str(CHART), "--set", "model.source=hf", "--set",
            f"model.hf.name={NAME},model.hf.endpoint={hub.url},model.hf.tokenSecret.name=hub",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        pods = Render([each for each in yaml.safe_load_all(done.stdout) if each]).pods
        found = {}
        for component in ("decode", "serve"):
            (spec,) = (s for _, ls, s in pods if ls["app.kubernetes.io/component"] == component)
            (container,) = spec["initContainers"]
            given = {each["name"]: each.get("value", "hf_secret") for each in container["env"]}
            models = tmp_path / component
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(
                [*container["command"], container["args"][0].replace("/models/", f"{models}/")],
                env=given | {"PATH": path, "HOME": str(tmp_path / f"{component}-home")},
                capture_output=True, timeout=HANG_S, check=True,
            )  # fmt: skip
            files = (models / NAME).iterdir()
            found[component] = {each.name for each in files if each.is_file()}
    assert found["decode"] - found["serve"] == {"model.safetensors"}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= found["serve"]
