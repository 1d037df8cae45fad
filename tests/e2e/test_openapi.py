"""OpenAI's document and our own against a real cluster, by schemathesis: no finding."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.shared import BRIEF, Clusters
from tests.support import pairwise
from tests.support.patience import HANG_S
from tests.support.routers import by_router

DOCUMENT = REPOSITORY.parent / "shared" / "data" / "openai-openapi-subset.json"
NUM_EXAMPLES = "100" if pairwise.whole else "5"  # of an operation
SCHEMATHESIS = importlib.util.find_spec("schemathesis") is not None
CHECKS = (
    "not_a_server_error,response_schema_conformance,"
    "content_type_conformance,status_code_conformance"
)
# The document names 200 and 429 only; these are what OpenAI answers to a mistake.
MISTAKES = {
    "400": "the request is wrong",
    "401": "no such key",
    "404": "no such model or completion",
    "422": "cannot be processed",
}


def adapted(document: dict) -> dict:
    """The document with our model's name, so that requests are served, and codes of mistakes."""
    for schema in document["components"]["schemas"].values():
        for part in (schema, *schema.get("allOf", ())):
            if "model" in part.get("properties", {}):
                part["properties"]["model"] = {"type": "string", "enum": ["tiny"]}
    for path in document["paths"].values():
        for method, operation in path.items():
            if method in ("get", "post", "delete"):
                for code, text in MISTAKES.items():
                    operation["responses"].setdefault(code, {"description": text})
    return document


def examine(serve: Serve, document: dict, url: str, directory: Path) -> None:
    before = num_served(serve)
    schema = directory / "openapi.json"
    schema.write_text(json.dumps(document))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run", str(schema),
            "--url", url, "-n", NUM_EXAMPLES, "--phases", "examples,fuzzing",
            "--checks", CHECKS, "--seed", "1", "--request-timeout", "60",
        ],
        cwd=directory, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    serve.wait_idle()
    assert num_served(serve) - before >= 1, "schemathesis has seen mistakes only"


def num_served(serve: Serve) -> float:
    ends = (by_router(serve.url, "requests_total", outcome=each) for each in ("stop", "length"))
    return sum(sum(each.values()) for each in ends)


def test_schemathesis_finds_nothing(clusters: Clusters, tmp_path: Path) -> None:
    if not DOCUMENT.exists() or not SCHEMATHESIS:
        assert os.environ.get("CI") != "true" or DOCUMENT.parent.parent.exists() is False
        pytest.skip(f"needs {DOCUMENT} and schemathesis")
    serve = clusters.lend(*BRIEF)
    examine(serve, adapted(json.loads(DOCUMENT.read_text())), f"{serve.url}/v1", tmp_path)


@pytest.mark.skipif(not SCHEMATHESIS, reason="needs schemathesis")
def test_our_own_document_is_true(clusters: Clusters, tmp_path: Path) -> None:
    serve = clusters.lend(*BRIEF)
    examine(serve, httpx.get(f"{serve.url}/openapi.json").json(), serve.url, tmp_path)
