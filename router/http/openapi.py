"""The document at /openapi.json: what is served, with the schemas that bodies are checked against.

Routes read their bodies themselves, and answers are msgspec's, so FastAPI knows of neither. The
table of routes does; pydantic describes what comes in, msgspec what goes out.
"""

import re
from collections.abc import Container
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.errors import ANTHROPIC
from router.http.table import JSON, OPERATIONS, REF, Content, Guard, Route
from router.openai.reply import ErrorReply, MessageErrorReply

OPENED = "Where there are API keys: takes one that says admin=yes, or any if none says so."
ORDERED = "Takes an API key that says admin=yes. Where there are no keys nobody gives orders: 403."
ERROR = {
    "message": "temperature: Input should be greater than or equal to 0",
    "type": "invalid_request_error", "param": "temperature", "code": "invalid_value",
}  # fmt: skip
MAY_SAY_503 = ("status.health", "status.ready")  # endpoints whose `reason` says why


def document(version: str, model: str, shut: Container[Guard]) -> dict[str, Any]:
    """The document of a server of `model`. shut: the guards that ask for a key."""
    is_guarded = Guard.KEYED in shut
    components: dict[str, Any] = {"schemas": _schemas()}
    if is_guarded:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for route in OPERATIONS:
        shown = _operation(route, model)
        if route.guard in shut:
            shown["security"] = [{"key": []}]
        paths.setdefault(route.shown_path, {})[route.methods[0].lower()] = shown
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvlane",
            "version": version,
            "description": "OpenAI's API, and Anthropic's."
            + " Paths with a lock need an API key: Authorize." * is_guarded,
        },
        "tags": [{"name": group} for group in dict.fromkeys(route.group for route in OPERATIONS)],
        "paths": paths,
        "components": components,
    }


def _schemas() -> dict[str, Any]:
    bodies = {route.body.schema for route in OPERATIONS if route.body is not None}
    replies = {reply.schema for route in OPERATIONS for reply in route.replies}
    ours = {schema for schema in bodies | replies if schema and issubclass(schema, Struct)}
    _, theirs = models_json_schema(
        [(body, "validation") for body in bodies if body and issubclass(body, BaseModel)],
        ref_template=REF + "{model}",
    )
    _, more = msgspec.json.schema_components(
        sorted(ours | {ErrorReply, MessageErrorReply}, key=lambda schema: schema.__name__),
        ref_template=REF + "{name}",
    )
    return theirs["$defs"] | more


def _operation(route: Route, model: str) -> dict[str, Any]:
    path, content = route.shown_path, dict[str, Any]()
    for reply in route.replies:
        content |= reply.shown(model)
    failed = Content(JSON, ErrorReply, {"error": ERROR}).shown(model)
    if path.startswith(ANTHROPIC):
        named = {"type": ERROR["type"], "message": ERROR["message"]}
        failed = Content(JSON, MessageErrorReply, {"type": "error", "error": named}).shown(model)
    method = [name.lower() for name in route.methods if name == "DELETE"]  # of a path with two
    responses = {
        "200": {"description": "Served", "content": content},
        "4XX": {"description": "The request is wrong, or comes too early", "content": failed},
        "5XX": {"description": "It could not be served", "content": failed},
    }
    if route.endpoint in MAY_SAY_503:
        responses["503"] = {"description": "Not now; `reason` says why", "content": content}
    shown: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.group],
        "operationId": "_".join([*method, re.sub(r"[{}]", "", path.strip("/").replace("/", "_"))]),
        "responses": responses,
    }
    if route.guard in (Guard.ADMIN, Guard.OPERATOR):
        shown["description"] = ORDERED if route.guard is Guard.ADMIN else OPENED
    if route.body is not None:
        shown["requestBody"] = {"required": True, "content": route.body.shown(model)}
    if names := re.findall(r"{(\w+)}", path):
        text = {"in": "path", "required": True, "schema": {"type": "string"}, "example": model}
        shown["parameters"] = [{"name": name, **text} for name in names]
    return shown
