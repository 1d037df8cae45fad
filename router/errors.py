"""What a client gets when a request fails: HTTP status and OpenAI's error body."""

import math
import re
from typing import Any, Self

from fastapi.responses import JSONResponse

from worker.api import GRAMMAR_PARAM
from worker.errors import KvlaneError

STATUS = {
    "invalid_value": 400,  # a field is wrong; `param` names it
    "unsupported": 400,  # a valid field or value that is not supported yet
    "context_length_exceeded": 400,  # prompt (or prompt and max_tokens) beyond the model's length
    "invalid_api_key": 401,  # keys are configured and the request has none of them
    "permission_denied": 403,  # its key is valid, but not for this
    "model_not_found": 404,  # another model's name
    "taken_over": 409,  # the same Idempotency-Key was sent again, and that one has the answer
    "request_timeout": 408,  # the request itself did not arrive in time
    "body_too_large": 413,
    "rate_limit_exceeded": 429,  # of its API key; Retry-After
    "busy": 429,  # no room until the queue timeout; Retry-After
    "out_of_pages": 429,
    "placement": 429,  # an order asks for more than the cluster has room for
    "internal_error": 500,  # our mistake, or a request that was there when two workers died
    "missing_library": 500,
    "worker_lost": 502,  # another process of its worker is gone
    "transfer_failed": 502,
    "transfer_timeout": 502,
    "unreachable": 502,
    "incompatible": 502,
    "revoked": 502,
    "world_error": 502,
    "no_worker": 503,  # none lives at present; Retry-After
    "draining": 503,  # the router is; Retry-After
    "timeout": 504,  # the request was not finished in time
}
# Outcomes of a request that are no errors, or the client's; the alerts leave out the same.
NO_FAULT = frozenset({
    "stop", "length", "abort", "invalid_value", "unsupported", "context_length_exceeded",
    "invalid_api_key", "permission_denied", "model_not_found", "body_too_large",
    "request_timeout", "taken_over", "rate_limit_exceeded",
})  # fmt: skip
LATER = (429, 503)
THREAD = "thread"  # a field; whoever is told that there is no such one sends all messages again
ANTHROPIC = "/v1/messages"  # paths that begin so answer in Anthropic's form
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
KINDS = {  # its names of statuses; others: api_error, or the client's mistake
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error",
}  # fmt: skip
# What other APIs call fields of a chat: by the beginning of their paths, that of a field's.
CALLED = {
    ANTHROPIC: {
        r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"response_format(\.json_schema)?": "output_config.format",
        "reasoning_effort": "output_config.effort",
    },
    "/v1/responses": {
        r"tools\.(\d+)\.(function|custom)": r"tools.\1",
        r"response_format(\.json_schema)?": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_completion_tokens": "max_output_tokens",
    },
}
HEADERS = {408: {"connection": "close"}, 415: {"accept-encoding": "identity"}}


class ApiError(KvlaneError):
    """Ends a request with the HTTP status of `code`; `param` is the wrong field."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = STATUS.get(code, 500)
        self.code = code
        self.message = message
        self.param = param
        # Who is told to come again is told when.
        later = 1.0 if self.status in LATER else None
        self.retry_after_s = later if retry_after_s is None else retry_after_s
        self.words = ""  # in place of the message, for Anthropic's clients
        # False: the client shall not try again by itself. Of two with one key one would take the
        # answer from the other; what took too long would take as long again.
        self.retry = code not in ("taken_over", "timeout")

    def answered(self, status: int) -> Self:
        """The same with another HTTP status."""
        self.status = status
        return self

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return TYPES.get(self.status, other)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object; the same in a response and in an event of a stream."""
        names = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": names}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Anthropic's error object; the same in a response and in an event of a stream."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind, message = KINDS.get(self.status, other), self.words or self.message
        names: dict[str, Any] = {"type": kind, "message": message}
        if self.param == THREAD:
            names["details"] = {"error_code": "thread_not_found"}
        return {"type": "error", "error": names}

    @property
    def headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds; `x-should-retry` is what OpenAI's clients obey."""
        headers = dict(HEADERS.get(self.status, {}))
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if not self.retry:
            headers["x-should-retry"] = "false"
        return headers

    def response_to(self, path: str = "") -> JSONResponse:
        """The HTTP response of a request that has failed so, in the form of who asks for `path`."""
        if field := self.param:
            self.param = called(field, path)
            self.message = self.message.replace(field, self.param)
        body = self.anthropic if path.startswith(ANTHROPIC) else self.body
        return JSONResponse(body, self.status, self.headers)


class TooLong(ApiError):
    """400: more tokens than the context has, in the words by which clients know to shorten.

    asked: what the request has, as words; num_tokens: those of its prompt, or "at least" so many.
    """

    def __init__(self, limit: int, asked: str, num_tokens: str, param: str) -> None:
        message = f"This model's maximum context length is {limit} tokens. However, {asked}. "
        message += "Please reduce the length of the messages or completion."
        super().__init__("context_length_exceeded", message, param=param)
        self.words = f"prompt is too long: {num_tokens} tokens > {limit} maximum"


def called(field: str, path: str) -> str:
    """What a field of a chat, given with the path to it, is called by who asks for `path`."""
    for api, names in CALLED.items():
        for pattern, name in names.items():
            if path.startswith(api) and (found := re.match(rf"{pattern}(?![^.])", field)):
                return found.expand(name) + field[found.end() :]
    return field


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: a field has a value that it cannot have."""
    return ApiError("invalid_value", message, param=param)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """400: a valid field or value that is not supported yet."""
    return ApiError("unsupported", message, param=param)


def of_grammar(error: ApiError, param: str) -> ApiError:
    """`error`, with the field `param` in place of a worker's name for the grammar it asked for."""
    if error.param == GRAMMAR_PARAM:
        error.param = param
        error.message = error.message.replace(f"{GRAMMAR_PARAM}: ", f"{param}: ", 1)
    return error
