"""The document at /openapi.json: what is served, with the schemas that bodies are checked against.

Routes read their bodies themselves, and answers are msgspec's, so FastAPI knows of neither. This
table does; pydantic describes what comes in, msgspec what goes out.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.adapters.messages import CountBody, MessagesBody
from router.adapters.responses import ResponseBody
from router.errors import ANTHROPIC
from router.http.access import ORDERS
from router.http.orders import DrainOrder, RoleOrder
from router.openai import reply
from router.openai.reply import Completion
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokens import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


class ChatCompletion(Completion[reply.ChatChoice], kw_only=True):
    """A whole answer."""


class ChatCompletionChunk(Completion[reply.ChunkChoice], kw_only=True):
    """One event of a stream; the event after the last one is `[DONE]`."""


class TextCompletion(Completion[reply.TextChoice], kw_only=True):
    """A whole answer, or one event of a stream; the event after the last one is `[DONE]`."""


class Status(Struct):
    """The answer to a probe."""

    status: str
    reason: str = ""
    workers: dict[str, str] = {}


class ErrorObject(Struct):
    """Why a request failed; `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    """The body of every response whose status is 400 or more."""

    error: ErrorObject


class MessageErrorObject(Struct, omit_defaults=True):
    """Why a request failed, in Anthropic's form; `details` names what its clients recover from."""

    type: str
    message: str
    details: dict[str, str] = {}


class MessageErrorReply(Struct):
    """The body of every response of `/v1/messages` whose status is 400 or more."""

    type: str
    error: MessageErrorObject


class Content(NamedTuple):
    """A body of one media type."""

    media: str
    schema: type[Struct] | type[BaseModel] | None
    example: Any

    def shown(self, model: str) -> dict[str, Any]:
        """As it stands in the document, with an example that names the served model."""
        example = self.example
        if isinstance(example, dict) and "model" in example:
            example = {**cast("dict[str, Any]", example), "model": model}
        reference = {"$ref": REF + self.schema.__name__} if self.schema else {}
        return {self.media: {"schema": reference, "example": example}}


class Operation(NamedTuple):
    """One method of a path; POST if it has a body or gives an order."""

    path: str
    summary: str
    replies: Sequence[Content]
    body: Content | None = None

    @property
    def group(self) -> str:
        """Under which of GROUPS it stands."""
        return next(group for group, paths in GROUPS.items() if self.path.startswith(paths))

    @property
    def method(self) -> str:
        """As the document writes it."""
        return "post" if self.body or self.group == "Orders" else "get"


GROUPS = {  # with what the paths of each begin with
    "Generate": ("/v1/chat", "/v1/completions", "/v1/messages", "/v1/responses"),
    "Models and tokens": ("/v1/", "/tokenize", "/detokenize"),
    "Probes": ("/health", "/ping", "/version", "/live", "/ready"),
    "Orders": (ORDERS, "/reset_prefix_cache"),
    "Operators": ("/",),
}
OPENED = "Where there are API keys: takes one that says admin=yes, or any if none says so."
ORDERED = "Takes an API key that says admin=yes. Where there are no keys nobody gives orders: 403."
USAGE = {
    "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
ERROR = {
    "message": "temperature: Input should be greater than or equal to 0",
    "type": "invalid_request_error", "param": "temperature", "code": "invalid_value",
}  # fmt: skip
CARD = {
    "id": "tiny", "object": "model", "created": 1700000000, "owned_by": "kvlane",
    "max_model_len": 4096,
}  # fmt: skip


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
TOKENS = {"count": 2, "max_model_len": 4096, "tokens": [5, 9], "token_strs": None}
MESSAGE = {
    "id": "msg_5e0c", "type": "message", "role": "assistant", "model": "tiny",
    "content": [{"type": "text", "text": "Hello!"}], "stop_reason": "end_turn",
    "stop_sequence": None, "usage": {"input_tokens": 12, "output_tokens": 3},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "id": "resp_5e0c", "object": "response", "created_at": 1700000000, "model": "tiny",
    "status": "completed",
    "output": [{
        "type": "message", "id": "msg_5e0c-0", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Hello!", "annotations": []}],
    }],
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hello"}]


def _get(path: str, summary: str, schema: Any, example: Any, media: str = JSON) -> Operation:
    return Operation(path, summary, (Content(media, schema, example),))


OPERATIONS = (
    Operation(
        "/v1/chat/completions", "Answer a chat",
        (Content(JSON, ChatCompletion, CHAT), Content(EVENTS, ChatCompletionChunk, CHAT_STREAM)),
        Content(JSON, ChatBody, {"model": "tiny", "messages": HELLO, "max_tokens": 32}),
    ),
    Operation(
        "/v1/completions", "Continue a text",
        (Content(JSON, TextCompletion, CONTINUED | {"usage": USAGE}),
         Content(EVENTS, TextCompletion, _events(CONTINUED))),
        Content(JSON, CompletionBody,
                {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16}),
    ),
    Operation(
        "/v1/messages", "Answer a chat, in Anthropic's form", (Content(JSON, None, MESSAGE),),
        Content(JSON, MessagesBody, {"model": "tiny", "messages": HELLO, "max_tokens": 32}),
    ),
    Operation(
        "/v1/messages/count_tokens", "The tokens of a chat, in Anthropic's form",
        (Content(JSON, None, {"input_tokens": 12}),),
        Content(JSON, CountBody, {"model": "tiny", "messages": HELLO}),
    ),
    Operation(
        "/v1/responses", "Answer a chat, in the form of OpenAI's responses",
        (Content(JSON, None, RESPONSE),),
        Content(JSON, ResponseBody, {"model": "tiny", "input": "Hello", "max_output_tokens": 32}),
    ),
    Operation(
        "/tokenize", "The tokens of a text or of a chat",
        (Content(JSON, reply.TokenizeReply, TOKENS),),
        Content(JSON, TokenizeBody, {"model": "tiny", "prompt": "Hello"}),
    ),
    Operation(
        "/detokenize", "The text of tokens",
        (Content(JSON, reply.DetokenizeReply, {"prompt": "Hello"}),),
        Content(JSON, DetokenizeBody, {"model": "tiny", "tokens": [5, 9]}),
    ),
    _get("/v1/models", "All models: one", reply.ModelList, {"object": "list", "data": [CARD]}),
    _get("/v1/models/{name}", "The model of this name", reply.Model, CARD),
    _get("/health", "Whether a decode worker answers", Status, {"status": "ok"}),
    _get("/ping", "The same, as SageMaker asks", Status, {"status": "ok"}),
    _get("/version", "The version of kvlane, as vLLM tells its own", None, {"version": "0.1.0"}),
    _get("/load", "Generation requests that this router has open, as vLLM tells them",
         None, {"server_load": 0}),
    _get("/live", "That this router's loop turns, and which workers make progress",
         Status, {"status": "live", "workers": {"decode-0": "live"}}),
    _get("/ready", "Whether requests can be served now", Status, {"status": "ready"}),
    _get("/metrics", "The routers' metrics, for Prometheus", None, "# HELP …", TEXT),
    _get("/metrics/targets",
         "Where every member serves its metrics, for Prometheus' HTTP service discovery",
         None, [{"targets": ["127.0.0.1:9100"], "labels": {"worker": "decode-0"}}]),
    _get("/dashboard/data",
         "Workers, load, throughput and latencies of the last minutes, and who was replaced",
         None, {"model": "tiny", "workers": [], "routers": [], "changes": []}),
    _get("/config", "The resolved configuration and the members of the cluster",
         None, {"config": {}, "members": [], "version": "0.1.0", "notes": []}),
    Operation(
        f"{ORDERS}drain", "Drain a worker or router and remove it, as `kvlane drain`",
        (Content(JSON, None, {"name": "decode-1", "finished": True}),),
        Content(JSON, DrainOrder, {"name": "decode-1", "timeout_s": 600}),
    ),
    Operation(
        f"{ORDERS}role", "Make a worker one of the other role, as `kvlane role`",
        (Content(JSON, None, {"name": "decode-1", "role": "prefill"}),),
        Content(JSON, RoleOrder, {"name": "decode-1", "role": "prefill"}),
    ),
    Operation("/reset_prefix_cache", "Empty all workers' prefix trees of what no request uses", ()),
)  # fmt: skip


def document(version: str, model: str, *, guarded: Sequence[str]) -> dict[str, Any]:
    """The document; paths that begin with one of `guarded` need a key."""
    taken = [op.body.schema for op in OPERATIONS if op.body is not None and op.body.schema]
    bodies = [body for body in taken if issubclass(body, BaseModel)]
    orders = [body for body in taken if issubclass(body, Struct)]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies],  # type: ignore[arg-type,misc]
        ref_template=REF + "{model}",
    )
    replies = {body.schema for op in OPERATIONS for body in op.replies if body.schema}
    _, more = msgspec.json.schema_components(
        sorted(
            [*replies, *orders, ErrorReply, MessageErrorReply], key=lambda schema: schema.__name__
        ),
        ref_template=REF + "{name}",
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"] | more}
    if guarded:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        shown = _operation(op, model)
        if op.path.startswith(tuple(guarded)):
            shown["security"] = [{"key": []}]
        paths[op.path] = {op.method: shown}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvlane",
            "version": version,
            "description": "OpenAI's API, and Anthropic's."
            + " Paths with a lock need an API key: Authorize." * bool(guarded),
        },
        "tags": [{"name": group} for group in GROUPS],
        "paths": paths,
        "components": components,
    }


def _operation(op: Operation, model: str) -> dict[str, Any]:
    content = {media: value for body in op.replies for media, value in body.shown(model).items()}
    failed = Content(JSON, ErrorReply, {"error": ERROR}).shown(model)
    if op.path.startswith(ANTHROPIC):
        told = {"type": ERROR["type"], "message": ERROR["message"]}
        failed = Content(JSON, MessageErrorReply, {"type": "error", "error": told}).shown(model)
    responses = {
        "200": {"description": "Served", "content": content},
        "4XX": {"description": "The request is wrong, or comes too early", "content": failed},
        "5XX": {"description": "It could not be served", "content": failed},
    }
    if op.path in ("/health", "/ping", "/ready"):
        responses["503"] = {"description": "Not now; `reason` says why", "content": content}
    shown: dict[str, Any] = {
        "summary": op.summary,
        "tags": [op.group],
        "operationId": op.path.strip("/").replace("/", "_").replace("{name}", "name"),
        "responses": responses,
    }
    if op.group in ("Orders", "Operators"):
        shown["description"] = ORDERED if op.path.startswith(ORDERS) else OPENED
    if op.body is not None:
        shown["requestBody"] = {"required": True, "content": op.body.shown(model)}
    if "{name}" in op.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        shown["parameters"] = [name | {"example": model}]
    return shown
