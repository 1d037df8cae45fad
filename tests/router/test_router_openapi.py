"""/openapi.json, /docs and /: they say what is served, and need no other server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.http import openapi
from router.http.table import ROUTES, Guard, guard_of
from tests.fault.router_doubles import HANG_S, TOLD_STAGES, Serve, Served, speak

SCRIPT = speak([5, 6], stages=TOLD_STAGES)


@pytest.fixture(scope="module")
def document(served: Served) -> dict[str, Any]:
    return httpx.get(f"{served.url}/openapi.json").json()


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """`value` fits a schema of the document, or of an event's data."""
    if "properties" in schema:
        schema = schema["properties"]["data"]["anyOf"][0]["contentSchema"]
    whole = {"components": document["components"], **schema}
    jsonschema.Draft202012Validator(whole).validate(value)


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
                for value in parsed(media, content["example"]):
                    check(document, content["schema"], value)
    unseen = ("/v1/embeddings", "/v1/conversations", "/v1/images", "/v1/audio", "/v1/moderations")
    hidden = ("/", "/docs", *unseen)  # what is not served, and what shows the document itself
    for route in ROUTES:
        is_inner = "static" in route.path or route.guard is Guard.ROUTER or not route.endpoint
        if not is_inner and not route.path.startswith(unseen) and route.path not in hidden:
            assert (route.methods[0].lower(), route.shown_path) in seen


def test_every_example_of_a_request_is_served_and_every_reply_fits(
    url: str, document: dict[str, Any]
) -> None:
    num_checked = 0
    for path, method, operation in operations(document):
        served = operation["responses"]["200"]["content"]
        example: Any = None
        if "requestBody" in operation:
            example = operation["requestBody"]["content"]["application/json"]["example"]
        if "parameters" in operation:
            names = {x["name"]: x["example"] for x in operation["parameters"]}
            if path.startswith("/v1/responses/"):  # of one that is there
                asked = {"input": "a", "background": True}
                names["name"] = httpx.post(f"{url}/v1/responses", json=asked).json()["id"]
            path = path.format_map(names)
        for media in served:
            asked = example | {"stream": True} if media == "text/event-stream" else example
            response = httpx.request(method, f"{url}{path}", json=asked, timeout=HANG_S)
            if path.startswith("/admin/"):  # of which the description says so
                assert response.status_code == 403
                continue
            assert response.status_code == 200, (path, response.text)
            assert response.headers["content-type"].startswith(media)
            if not media.startswith("text/") or media == "text/event-stream":
                body = response.text if media == "text/event-stream" else response.json()
                for value in parsed(media, body):
                    check(document, served[media]["schema"], value)
                    num_checked += 1
    assert num_checked > 20


def test_errors_fit(url: str, document: dict[str, Any]) -> None:
    error = httpx.post(f"{url}/v1/completions", json={"temperature": -1, "prompt": "a"}).json()
    reply = document["paths"]["/v1/completions"]["post"]["responses"]["4XX"]
    check(document, reply["content"]["application/json"]["schema"], error)
    assert reply["content"]["application/json"]["example"] == error
    with pytest.raises(jsonschema.ValidationError):
        check(document, reply["content"]["application/json"]["schema"], {"error": {}})


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


def test_a_row_with_parameters_in_its_path_documents_them(monkeypatch) -> None:
    """The next route may have other ones than `{name}`, which clients are made from."""
    row = openapi.Route("Models", Guard.KEYED, "/v1/of/{one}/{two:path}", "", summary="Two.")
    monkeypatch.setattr(openapi, "OPERATIONS", [*openapi.OPERATIONS, row])
    *_, (path, _, shown) = operations(openapi.document("0", "m", ()))
    assert (path, shown["operationId"]) == ("/v1/of/{one}/{two}", "v1_of_one_two")
    assert [(x["name"], x["in"], x["required"]) for x in shown["parameters"]] == [
        ("one", "path", True), ("two", "path", True),
    ]  # fmt: skip
