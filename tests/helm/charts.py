"""Renders the chart with real Helm binaries, and keeps its golden files.

tests/helm/install                # .tools/helm: Helm 3, Helm 4, kubernetes-validate
python -m tests.helm.charts       # write golden/ anew, after a change that is meant
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.patience import HANG_S

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
CHART = REPOSITORY / "helm" / "kvlane"
TOOLS = REPOSITORY / ".tools" / "helm"
VALUES = sorted((HERE / "values").glob("*.yaml"))
GOLDEN = ("default", "gpu-rdma", "kuberay")
RELEASE, NAMESPACE = "demo", "llm"
TOKEN = re.compile(r"(auth_token: )[A-Za-z0-9+/]{64}={0,2}$", re.MULTILINE)  # drawn anew each time

Document = dict[str, Any]


def skip_without_tools() -> None:
    """Skips the test where tests/helm/install has not run."""
    if not (TOOLS / "helm4").exists():
        pytest.skip("no Helm in .tools/helm; run tests/helm/install")


def helm(major: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the two Helms; needs no cluster."""
    skip_without_tools()
    return subprocess.run(
        [str(TOOLS / f"helm{major}"), *arguments],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def template(major: int, values: Path | None, *options: str) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart."""
    given = ("--values", str(values)) if values else ()
    return helm(major, "template", RELEASE, str(CHART), "-n", NAMESPACE, *given, *options)


@cache
def rendered(name: str, major: int = 4) -> str:
    """What the values file of this name renders, with a token that is always the same."""
    done = template(major, HERE / "values" / f"{name}.yaml")
    assert done.returncode == 0, f"{name}, Helm {major}: {done.stderr}"
    return TOKEN.sub(r"\1ZHJhd24gYW5ldyBlYWNoIHRpbWU=", done.stdout)


def documents(name: str) -> list[Document]:
    """The objects of a values file, to be changed as one likes."""
    return deepcopy(_documents(name))


@cache
def _documents(name: str) -> list[Document]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all(rendered(name), Loader=loader) if each]


def refused(values: str, *, major: int = 4) -> str:
    """The error for values that must not render."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        done = template(major, Path(file.name))
    assert done.returncode != 0, f"rendered: {values}"
    return done.stderr


if __name__ == "__main__":
    for each in GOLDEN:
        path = HERE / "golden" / f"{each}.yaml"
        path.write_text(rendered(each))
        print(path)
