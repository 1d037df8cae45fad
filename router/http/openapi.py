"""The document at /openapi.json: what is served, with the schemas that bodies are checked against.

Routes read their bodies themselves, so FastAPI knows nothing of them. This table does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.http.auth import GUARDED
from router.openai.reply import ChatChoice, ChunkChoice, Completion, TextChoice
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokens import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/{model}"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
Example = Any


class ChatCompletion(Completion[ChatChoice]):
    """A whole answer."""


class ChatCompletionChunk(Completion[ChunkChoice]):
    """One event of a stream; the event after the last one is `[DONE]`."""


class TextCompletion(Completion[TextChoice]):
    """A whole answer, or one event of a stream; the event after the last one is `[DONE]`."""


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    simulated_accept_len: float = 0.0  # above 0, answers are junk: acceptance is simulated


class ModelList(BaseModel):
    """All models: one."""

    object: str
    data: list[Model]


class TokenizeReply(BaseModel):
    """Token ids, and the text of each if it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    """A text."""

    prompt: str


class Status(BaseModel):
    """The answer to a probe."""

    status: str
    reason: str = ""
    workers: dict[str, str] = {}


class ErrorObject(BaseModel):
    """Why a request failed; `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(BaseModel):
    """The body of every response whose status is 400 or more."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path; POST if it has a body."""

    path: str
    summary: str
    replies: Sequence[tuple[str, type[BaseModel] | None, Example]]  # media type, schema, example
    body: type[BaseModel] | None = None
    example: Example = None


USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
}
ERROR = {
    "message": "temperature: Input should be greater than or equal to 0",
    "type": "invalid_request_error",
    "param": "temperature",
    "code": "invalid_value",
}
CARD = {
    "id": "tiny",
    "object": "model",
    "created": 1700000000,
    "owned_by": "kvlane",
    "max_model_len": 4096,
}


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    head = {"id": "cmpl-5e0c", "object": kind, "created": 1700000000, "model": "tiny"}
    return head | {"choices": [{"index": 0, "logprobs": None, **choice}]}


def _events(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


CHAT = _answer(
    "chat.completion",
    message={"role": "assistant", "content": "Hello!", "refusal": None},
    finish_reason="stop",
) | {"usage": USAGE}
CHUNK = "chat.completion.chunk"
CHAT_STREAM = _events(
    _answer(CHUNK, delta={"role": "assistant", "content": ""}, finish_reason=None),
    _answer(CHUNK, delta={"content": "Hello!"}, finish_reason="stop"),
)
CONTINUED = _answer("text_completion", text=" there was", finish_reason="length")
OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "Answer a chat",
        ((JSON, ChatCompletion, CHAT), (EVENTS, ChatCompletionChunk, CHAT_STREAM)),
        ChatBody,
        {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
    ),
    Operation(
        "/v1/completions",
        "Continue a text",
        (
            (JSON, TextCompletion, CONTINUED | {"usage": USAGE}),
            (EVENTS, TextCompletion, _events(CONTINUED)),
        ),
        CompletionBody,
        {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        "/tokenize",
        "The tokens of a text or of a chat",
        (
            (
                JSON,
                TokenizeReply,
                {"count": 2, "max_model_len": 4096, "tokens": [5, 9], "token_strs": None},
            ),
        ),
        TokenizeBody,
        {"model": "tiny", "prompt": "Hello"},
    ),
    Operation(
        "/detokenize",
        "The text of tokens",
        ((JSON, DetokenizeReply, {"prompt": "Hello"}),),
        DetokenizeBody,
        {"model": "tiny", "tokens": [5, 9]},
    ),
    Operation(
        "/v1/models",
        "All models: one",
        ((JSON, ModelList, {"object": "list", "data": [CARD]}),),
    ),
    Operation("/v1/models/{name}", "The model of this name", ((JSON, Model, CARD),)),
    Operation("/health", "Whether a decode worker answers", ((JSON, Status, {"status": "ok"}),)),
    Operation(
        "/live",
        "That this router's loop turns, and which workers make progress",
        ((JSON, Status, {"status": "live", "workers": {"decode-0": "live"}}),),
    ),
    Operation(
        "/ready", "Whether requests can be served now", ((JSON, Status, {"status": "ready"}),)
    ),
    Operation("/metrics", "The routers' metrics, for Prometheus", ((TEXT, None, "# HELP …"),)),
    Operation(
        "/metrics/targets",
        "Where every member serves its metrics, for Prometheus' HTTP service discovery",
        ((JSON, None, [{"targets": ["127.0.0.1:9100"], "labels": {"worker": "decode-0"}}]),),
    ),
    Operation(
        "/dashboard/data",
        "Workers, load, throughput and latencies of the last minutes, and who was replaced",
        ((JSON, None, {"model": "tiny", "workers": [], "routers": [], "changes": []}),),
    ),
    Operation(
        "/config",
        "The resolved configuration and the members of the cluster",
        ((JSON, None, {"config": {}, "members": [], "version": "0.1.0", "notes": []}),),
    ),
)


def document(version: str, model: str, *, keys: bool) -> dict[str, Any]:
    """The document.

    Args:
        version: of kvlane.
        model: the served name.
        keys: whether some paths need a key.
    """
    named: set[type[BaseModel]] = {ErrorReply}
    for each in OPERATIONS:
        named |= {schema for _, schema, _ in each.replies if schema}
        named |= {each.body} if each.body else set()
    # In the mode of what comes in: a reply leaves out the fields that were not set.
    pairs = [(schema, "validation") for schema in sorted(named, key=lambda each: each.__name__)]
    _, schemas = models_json_schema(pairs, ref_template=REF)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        operation = _operation(each, model)
        if keys and each.path.startswith(GUARDED):
            operation["security"] = [{"key": []}]
        paths[each.path] = {"post" if each.body else "get": operation}
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvlane", "version": version, "description": "OpenAI's API."},
        "paths": paths,
        "components": components,
    }


def _operation(each: Operation, model: str) -> dict[str, Any]:
    content = {media: _content(schema, example, model) for media, schema, example in each.replies}
    failed = {JSON: _content(ErrorReply, {"error": ERROR}, model)}
    found: dict[str, Any] = {
        "summary": each.summary,
        "operationId": each.path.strip("/").replace("/", "_").replace("{name}", "name"),
        "responses": {
            "200": {"description": "Served", "content": content},
            "4XX": {"description": "The request is wrong, or comes too early", "content": failed},
            "5XX": {"description": "It could not be served", "content": failed},
        },
    }
    if each.path in ("/health", "/ready"):
        found["responses"]["503"] = {
            "description": "Not now; `reason` says why",
            "content": content,
        }
    if each.body is not None:
        body = {JSON: _content(each.body, each.example, model)}
        found["requestBody"] = {"required": True, "content": body}
    if "{name}" in each.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name | {"example": model}]
    return found


def _content(schema: type[BaseModel] | None, example: Example, model: str) -> dict[str, Any]:
    """A body's schema, and an example that names the served model."""
    if isinstance(example, dict) and "model" in example:
        example = {**cast("dict[str, Any]", example), "model": model}
    reference = {} if schema is None else {"$ref": REF.format(model=schema.__name__)}
    return {"schema": reference, "example": example}
