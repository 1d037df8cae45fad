"""Renders the chart with real Helm binaries.

tests/helm/install                       # .tools/helm: Helm 3, Helm 4, kubernetes-validate
python -m tests.helm.charts DIRECTORY    # all renders, to compare those of two commits
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
NAMES = [path.stem for path in sorted((HERE / "values").glob("*.yaml"))]
RELEASE, NAMESPACE = "demo", "llm"
TOKEN = re.compile(r"(auth_token: )[A-Za-z0-9+/]{64}={0,2}$", re.MULTILINE)  # drawn anew each time
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Document = dict[str, Any]
Pod = tuple[str, dict[str, str], dict[str, Any]]  # name of its owner, labels, spec


def tool(name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run what tests/helm/install has fetched, with this input; skips the test without it."""
    if not (TOOLS / "venv" / "done").exists():
        pytest.skip(f"no {name} in .tools/helm; run tests/helm/install")
    return subprocess.run(
        [str(TOOLS / name), *arguments], env={**os.environ, "GOGC": "off"},  # it ends soon
        input=text, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def template(*options: str, major: int = 4, values: str = "") -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart with these values, by Helm 3 or 4; needs no cluster."""
    words = ("template", RELEASE, str(CHART), "-n", NAMESPACE, "--values=-", *options)
    return tool(f"helm{major}", *words, text=values)


def parsed(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, Loader=Loader) if document]


@cache
def rendered(name: str, major: int = 4) -> str:
    """What the values file of this name renders, with a token that is always the same."""
    values = (HERE / "values" / f"{name}.yaml").read_text()
    done = template(major=major, values=values)
    assert done.returncode == 0, f"{name}, Helm {major}: {done.stderr}"
    return TOKEN.sub(r"\1ZHJhd24gYW5ldyBlYWNoIHRpbWU=", done.stdout)


@cache
def _documents(name: str) -> list[Document]:
    return parsed(rendered(name))


def documents(name: str) -> list[Document]:
    """The objects of a values file, to be changed as one likes."""
    return deepcopy(_documents(name))


def described() -> Iterator[str]:
    """Paths of the chart's values above which a `# --` comment stands."""
    path: list[tuple[int, str]] = []  # indent and name
    is_described = False
    for line in (CHART / "values.yaml").read_text().splitlines():
        is_described |= line.strip().startswith("# --")
        if match := re.match(r"( *)([\w.]+):", line):
            indent = len(match[1])
            path = [*(outer for outer in path if outer[0] < indent), (indent, match[2])]
            if is_described:
                yield ".".join(name for _, name in path)
            is_described = False


class Render:
    """The objects of one render, and the pods of all its workloads."""

    def __init__(self, objects: list[Document]) -> None:
        self.documents = objects
        self.pods = [pod for document in objects for pod in _pods(document)]

    def kind(self, *kinds: str) -> Iterator[Document]:
        return (document for document in self.documents if document["kind"] in kinds)

    def named(self, kind: str, name: str) -> Document | None:
        return next((d for d in self.kind(kind) if d["metadata"]["name"] == name), None)

    def components(self) -> dict[str, dict[str, Any]]:
        """Component -> spec of its pod."""
        return {labels["app.kubernetes.io/component"]: spec for _, labels, spec in self.pods}


def _pods(document: Document) -> Iterator[Pod]:
    spec, metadata = document.get("spec") or {}, document["metadata"]
    if document["kind"] == "Pod":
        yield metadata["name"], metadata["labels"], spec
    groups = [spec] if "template" in spec else []
    if document["kind"] == "RayCluster":
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]
        yield metadata["name"], pod["metadata"]["labels"], pod["spec"]


def port_names(pod: dict[str, Any]) -> dict[str, int]:
    ports = [port for container in pod["containers"] for port in container.get("ports", [])]
    return {port["name"]: port["containerPort"] for port in ports}


def title(document: Document) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def changed(objects: list[Document], which: str, old: str, new: str) -> list[Document]:
    """A render in which the object of this title says `new` for `old`."""
    texts = {title(document): yaml.safe_dump(document, width=100_000) for document in objects}
    assert old in texts[which], f"{which} does not say {old}"
    texts[which] = texts[which].replace(old, new)
    return [yaml.load(text, Loader=Loader) for text in texts.values()]


if __name__ == "__main__":
    for one in NAMES:
        Path(sys.argv[1], f"{one}.yaml").write_text(rendered(one))
