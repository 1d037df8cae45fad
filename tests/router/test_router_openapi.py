"""/openapi.json, /docs and /: they say what is served, and need no other server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.http.table import ROUTES, Guard, guard_of
from tests.fault.router_doubles import Serve, Served


@pytest.fixture(scope="module")
def document(served: Served) -> dict[str, Any]:
    return httpx.get(f"{served.url}/openapi.json").json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def parsed(media: str, example: Any) -> list[Any]:
    """The JSON values of an example."""
    if media != "text/event-stream":
        return [example]
    events = [line[6:] for line in example.split("\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_every_operation_has_bodies_with_examples_that_fit(document: dict[str, Any]) -> None:
    seen = set()
    for path, method, operation in operations(document):
        seen.add((method, path))
        bodies = [*operation["responses"].values()]
        assert method == "post" or "requestBody" not in operation
        bodies += [operation["requestBody"]] if "requestBody" in operation else []
        for body in bodies:
            for media, content in body["content"].items():
                whole = {"components": document["components"], **content["schema"]}
                for value in parsed(media, content["example"]):
                    jsonschema.Draft202012Validator(whole).validate(value)
    assert {("post", "/v1/chat/completions"), ("get", "/v1/models")} <= seen


def test_keys_are_in_the_document_where_they_are_needed(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key")
    _, url, _ = serve(api_key_file=str(keys))
    document = httpx.get(f"{url}/openapi.json").json()
    for path, method, operation in operations(document):
        status = httpx.request(method, f"{url}{path}").status_code
        assert ("security" in operation) == (status == 401)
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.parametrize(
    ("path", "guard"),
    [("/", Guard.OPEN), ("/nothing", Guard.OPEN), ("/docs/static/a.css", Guard.OPEN),
     ("/v1/nothing", Guard.KEYED), ("/v1/models/a/b", Guard.KEYED), ("/metrics/x", Guard.OPERATOR),
     ("/dashboard/static/a.css", Guard.OPERATOR), ("/dashboard/responses/a", Guard.ROUTER),
     ("/admin/nothing", Guard.ADMIN)],
)  # fmt: skip
def test_what_lies_below_a_path_has_its_guard(path: str, guard: Guard) -> None:
    assert guard_of(path) is guard
    assert all(guard_of(route.path) is route.guard for route in ROUTES if "{" not in route.path)


def test_the_root_says_what_this_is(url: str) -> None:
    found = httpx.get(url).json()
    assert (found["name"], found["model"]) == ("kvlane", "small")
    page = httpx.get(url, headers={"accept": "text/html,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "Authorization" not in page.text, "no key is needed"
    links = re.findall(r'href="([^"]+)"', page.text)
    assert "docs" in links
    for path in (*links, found["docs"], found["openapi.json"], found["v1/models"]):
        assert httpx.get(f"{url}/{path.lstrip('/')}").status_code == 200
