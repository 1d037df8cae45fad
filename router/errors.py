"""What a client is told when a request fails: HTTP status and OpenAI's error body.

status  code                     when
400     invalid_value            a field is wrong; `param` names it
400     unsupported              a valid field or value that is not supported yet
400     context_length_exceeded  prompt (or prompt and max_tokens) beyond the model's length
401     invalid_api_key          keys are configured and the request has none of them
404     model_not_found          another model's name
408     request_timeout          the request itself did not arrive in time
413     body_too_large           request body over the limit
415     unsupported              an encoded body (Content-Encoding)
429     busy                     no room until the queue timeout; Retry-After
502     worker_lost, transfer_*  the worker that had the request is gone
503     no_worker, draining      no worker at present, or the router is draining; Retry-After
504     timeout                  the request was not finished in time
500     internal_error           our mistake, or a request whose workers were lost twice
"""

from __future__ import annotations

import math
from typing import Any

from fastapi.responses import JSONResponse

from worker.api import GRAMMAR_PARAM
from worker.errors import KvlaneError

STATUS = {
    "invalid_value": 400,
    "unsupported": 400,
    "missing_library": 500,
    "busy": 429,
    "worker_lost": 502,
    "transfer_failed": 502,
    "transfer_timeout": 502,
    "unreachable": 502,
    "incompatible": 502,
    "revoked": 502,
    "out_of_pages": 503,
    "world_error": 503,
    "placement": 503,
    "no_worker": 503,
    "draining": 503,
    "timeout": 504,
}
# Outcomes of a request that are no errors, or the client's; the alerts leave out the same.
NO_FAULT = frozenset({
    "stop", "length", "abort", "invalid_value", "unsupported", "context_length_exceeded",
    "invalid_api_key", "model_not_found", "body_too_large", "request_timeout",
})  # fmt: skip
HEADERS = {408: {"connection": "close"}, 415: {"accept-encoding": "identity"}}


class ApiError(KvlaneError):
    """Ends one HTTP request."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.retry = True  # False: the client shall not try again by itself

    @classmethod
    def of(cls, code: str, message: str, *, retry_after_s: float | None = None) -> ApiError:
        """The error for a `worker.errors` code (or one of the table above)."""
        return cls(STATUS.get(code, 500), code, message, retry_after_s=retry_after_s)

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object; the same in a response and in an event of a stream."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds; `x-should-retry` is what OpenAI's clients obey."""
        headers = dict(HEADERS.get(self.status, {}))
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if not self.retry:
            headers["x-should-retry"] = "false"
        return headers

    @property
    def response(self) -> JSONResponse:
        """The HTTP response of a request that has failed so."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: a field has a value that it cannot have."""
    return ApiError(400, "invalid_value", message, param=param)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """400: a valid field or value that is not supported yet."""
    return ApiError(400, "unsupported", message, param=param)


def of_grammar(error: ApiError, param: str) -> ApiError:
    """`error`, with the field `param` in place of a worker's name for the grammar it asked for."""
    if error.param == GRAMMAR_PARAM:
        error.param = param
        error.message = error.message.replace(f"{GRAMMAR_PARAM}: ", f"{param}: ", 1)
    return error
