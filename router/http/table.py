"""All paths that are served: their methods, who may ask, how requests are logged, and what the
document at /openapi.json says. No other place lists them.
"""

import json
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, cast

from msgspec import Struct
from pydantic import BaseModel

from router.adapters.messages import CountBody, MessagesBody
from router.adapters.responses import OpenResponseBody, ResponseBody
from router.http.orders import DrainOrder, RoleOrder
from router.openai import reply
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokens import DetokenizeBody, TokenizeBody

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REF = "#/components/schemas/"


class Guard(Enum):
    """Whom a path is for, where there are API keys."""

    OPEN = auto()  # anybody
    KEYED = auto()  # who has a key
    OPERATOR = auto()  # who has a key that opens operators' pages; anybody by `router.admin_access`
    ROUTER = auto()  # other routers alone
    ADMIN = auto()  # who has a key that says admin=yes; where there are no keys, nobody


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
        reference: dict[str, Any] = {"$ref": REF + self.schema.__name__} if self.schema else {}
        if self.media == EVENTS:  # of an event, as OpenAPI 3.2 has it
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": reference}
            either = {"anyOf": [data, {"const": "[DONE]"}]}
            reference = {"type": "object", "required": ["data"], "properties": {"data": either}}
        return {self.media: {"schema": reference, "example": example}}


class Route(NamedTuple):
    """One path. `endpoint` is the name of one in `routes.Endpoints`; "": its row guards a tree."""

    group: str  # of the document
    guard: Guard
    path: str
    endpoint: str
    methods: Sequence[str] = ("GET",)
    summary: str = ""  # "": it is not in the document
    replies: Sequence[Content] = ()
    body: Content | None = None
    generates: str = ""  # OpenTelemetry's name of what POST begins here
    is_probe: bool = False  # machines ask every few seconds: its lines are logged at DEBUG

    @property
    def shown_path(self) -> str:
        """As the document writes it."""
        return self.path.replace(":path", "")


def _json(schema: Any, example: Any) -> Content:
    return Content(JSON, schema, example)


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    head = {"id": "cmpl-5e0c", "object": kind, "created": 1700000000, "model": "tiny"}
    return head | {"choices": [{"index": 0, "logprobs": None, **choice}]}


def _events(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


USAGE = {
    "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
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
COMPACTED: dict[str, Any] = {
    "id": "resp_5e0c", "object": "response.compaction", "created_at": 1700000000,
    "output": [{"type": "compaction", "id": "cmp_5e0c-0", "encrypted_content": "…"}],
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hello"}]
CARD = {
    "id": "tiny", "object": "model", "created": 1700000000, "owned_by": "kvlane",
    "root": "/models/tiny", "max_model_len": 4096,
}  # fmt: skip

HTML = (Content("text/html", None, "<!doctype html>…"),)
POST = ("POST",)
_generate = partial(Route, "Generate", Guard.KEYED)
_tokens = partial(Route, "Models and tokens", Guard.KEYED)
_probe = partial(Route, "Probes", Guard.OPEN)
_operator = partial(Route, "Operators", Guard.OPERATOR)
_order = partial(Route, "Orders", Guard.ADMIN)
_page = partial(Route, "", Guard.OPEN)
_absent = partial(Route, "", Guard.KEYED, endpoint="api.not_served", methods=("GET", "POST"))

ROUTES = (
    _generate(
        "/v1/chat/completions", "api.chat", POST, "Answer a chat",
        (_json(reply.ChatCompletion, CHAT),
         Content(EVENTS, reply.ChatCompletionChunk, CHAT_STREAM)),
        _json(ChatBody, {"model": "tiny", "messages": HELLO, "max_tokens": 32}), "chat",
    ),
    _generate(
        "/v1/completions", "api.completions", POST, "Continue a text",
        (_json(reply.TextCompletion, CONTINUED | {"usage": USAGE}),
         Content(EVENTS, reply.TextCompletion, _events(CONTINUED))),
        _json(CompletionBody, {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16}),
        "text_completion",
    ),
    _generate(
        "/v1/messages", "api.messages", POST, "Answer a chat, in Anthropic's form",
        (_json(None, MESSAGE),),
        _json(MessagesBody, {"model": "tiny", "messages": HELLO, "max_tokens": 32}), "chat",
    ),
    _generate(
        "/v1/messages/count_tokens", "api.count_tokens", POST,
        "The tokens of a chat, in Anthropic's form", (_json(None, {"input_tokens": 12}),),
        _json(CountBody, {"model": "tiny", "messages": HELLO}),
    ),
    _generate(
        "/v1/responses", "responses.create", POST,
        "Answer a chat, in the form of OpenAI's responses", (_json(None, RESPONSE),),
        _json(ResponseBody, {"model": "tiny", "input": "Hello", "max_output_tokens": 32}), "chat",
    ),
    _generate(
        "/v1/responses/input_tokens", "responses.count", POST,
        "The tokens of a chat, in the form of OpenAI's responses",
        (_json(None, {"object": "response.input_tokens", "input_tokens": 12}),),
        _json(OpenResponseBody, {"model": "tiny", "input": "Hello"}),
    ),
    _generate(
        "/v1/responses/compact", "responses.compact", POST,
        "Condense a conversation to a summary by the model", (_json(None, COMPACTED),),
        _json(OpenResponseBody, {"model": "tiny", "input": "Hello"}), "chat",
    ),
    _generate("/v1/responses/{name}", "responses.get", summary="A response that was stored",
              replies=(_json(None, RESPONSE),)),
    _generate("/v1/responses/{name}", "responses.delete", ("DELETE",), "Forget a response",
              (_json(None, {"id": "resp_5e0c", "object": "response", "deleted": True}),)),
    _generate("/v1/responses/{name}/input_items", "responses.inputs",
              summary="The items that a response was asked with",
              replies=(_json(None, {"object": "list", "data": [], "has_more": False}),)),
    _generate("/v1/responses/{name}/cancel", "responses.cancel", POST,
              "End a background response", (_json(None, RESPONSE | {"status": "cancelled"}),)),
    _tokens(
        "/tokenize", "api.tokenize", POST, "The tokens of a text or of a chat",
        (_json(reply.TokenizeReply, TOKENS),),
        _json(TokenizeBody, {"model": "tiny", "prompt": "Hello"}),
    ),
    _tokens(
        "/detokenize", "api.detokenize", POST, "The text of tokens",
        (_json(reply.DetokenizeReply, {"prompt": "Hello"}),),
        _json(DetokenizeBody, {"model": "tiny", "tokens": [5, 9]}),
    ),
    _tokens("/v1/models", "api.models", summary="All models: one",
            replies=(_json(reply.ModelList, {"object": "list", "data": [CARD]}),)),
    _tokens("/v1/models/{name:path}", "api.one_model", summary="The model of this name",
            replies=(_json(reply.Model, CARD),)),
    *(_absent(path) for path in (
        "/v1/embeddings", "/v1/audio/{rest:path}", "/v1/images/{rest:path}", "/v1/moderations",
        "/v1/conversations",
    )),
    _tokens("/v1/", ""),
    _probe("/health", "status.health", summary="Whether a decode worker answers",
           replies=(_json(reply.Status, {"status": "ok"}),), is_probe=True),
    _probe("/ping", "status.health", ("GET", "POST"), "The same, as SageMaker asks",
           replies=(_json(reply.Status, {"status": "ok"}),), is_probe=True),
    _probe("/version", "status.version", summary="The version of kvlane, as vLLM tells its own",
           replies=(_json(None, {"version": "0.1.0"}),)),
    _probe("/live", "status.live", is_probe=True,
           summary="That this router's loop turns, and which workers make progress",
           replies=(_json(reply.Status, {"status": "live", "workers": {"decode-0": "live"}}),)),
    _probe("/ready", "status.ready", summary="Whether requests can be served now", is_probe=True,
           replies=(_json(reply.Status, {"status": "ready"}),)),
    _order(
        "/admin/drain", "orders.drain", POST,
        "Drain a worker or router and remove it, as `kvlane drain`",
        (_json(None, {"name": "decode-1", "finished": True}),),
        _json(DrainOrder, {"name": "decode-1", "timeout_s": 600}),
    ),
    _order(
        "/admin/role", "orders.role", POST,
        "Make a worker one of the other role, as `kvlane role`",
        (_json(None, {"name": "decode-1", "role": "prefill"}),),
        _json(RoleOrder, {"name": "decode-1", "role": "prefill"}),
    ),
    _order("/admin/", ""),
    Route("Orders", Guard.OPERATOR, "/reset_prefix_cache", "status.reset_prefix_cache", POST,
          "Empty all workers' prefix trees of what no request uses"),
    _operator("/load", "status.load", is_probe=True, replies=(_json(None, {"server_load": 0}),),
              summary="Generation requests that this router has open, as vLLM tells them"),
    _operator("/metrics", "status.metrics", summary="The routers' metrics, for Prometheus",
              replies=(Content(TEXT, None, "# HELP …"),), is_probe=True),
    _operator(
        "/metrics/targets", "status.targets",
        summary="Where every member serves its metrics, for Prometheus' HTTP service discovery",
        replies=(_json(None, [{"targets": ["127.0.0.1:9100"],
                               "labels": {"worker": "decode-0"}}]),),
    ),
    _operator(
        "/dashboard/data", "pages.data", is_probe=True,
        summary="Workers, load, throughput and latencies of the last minutes, and who was replaced",
        replies=(_json(None, {"model": "tiny", "workers": [], "routers": [], "changes": []}),),
    ),
    _operator("/dashboard", "pages.page", summary="A page: workers, load, latencies",
              replies=HTML),
    _operator("/dashboard/playground", "pages.page", summary="A page: to try the model",
              replies=HTML),
    _operator("/dashboard/own", "pages.own", is_probe=True,
              summary="What this router alone knows of `/dashboard/data`",
              replies=(_json(None, {}),)),
    _operator("/dashboard/static/{name:path}", "pages.file"),
    Route("", Guard.ROUTER, "/dashboard/responses/{verb}/{owner}/{name}", "stored.answer", POST),
    _operator(
        "/config", "status.config",
        summary="The resolved configuration and the members of the cluster",
        replies=(_json(None, {"config": {}, "members": [], "version": "0.1.0", "notes": []}),),
    ),
    _page("/", "pages.index"),
    _page("/docs", "pages.page"),
    _page("/docs/static/{name:path}", "pages.file"),
)  # fmt: skip

OPERATIONS = [route for route in ROUTES if route.summary]
GENERATING = {route.path: route.generates for route in ROUTES if route.generates}
# Requests with bodies of clients; also those that count tokens have to be admitted.
ADMITTED = frozenset(route.path for route in ROUTES if route.body and route.guard is Guard.KEYED)
PROBES = frozenset(route.path for route in ROUTES if route.is_probe)
_EXACT = {route.path: route.guard for route in ROUTES if "{" not in route.path}
# With what the paths below a row begin, the longest first.
_BELOW = sorted(
    {route.path.partition("{")[0].rstrip("/") + "/": route.guard for route in ROUTES}.items(),
    key=lambda row: -len(row[0]),
)


def guard_of(path: str) -> Guard:
    """Of a path, also where nothing is served but something above it is."""
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    return next((guard for begin, guard in _BELOW if path.startswith(begin)), Guard.OPEN)
