"""The router's part of the configuration tree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from worker.config import Auto, Section


class RouterConfig(Section):
    """How the HTTP front behaves. Limits are per router process."""

    policy: str = "least_loaded"  # how workers are chosen: a name of router.policy.POLICIES
    request_timeout_s: float = Field(default=600.0, gt=0)  # from arrival to the last token
    queue_timeout_s: float = Field(default=60.0, ge=0)  # wait for a decode worker; then 429 or 503
    max_inflight: int = Field(default=4096, ge=1)  # choices that have not ended; then 429 at once
    # An HTTP connection is closed when it is idle, or its client reads nothing, for so long.
    keep_alive_s: float = Field(default=120.0, gt=0)
    max_body_bytes: int = Field(default=32 << 20, ge=1)  # a larger request body gets 413
    sse_ping_s: float = Field(default=15.0, gt=0)  # a stream silent for so long gets a comment line
    stop_timeout_s: float = Field(default=5.0, gt=0)  # at shutdown, for clients that do not read
    api_key_file: str = ""  # keys, one a line, read at the start; "" = everyone is served
    tool_parser: Literal["auto", "hermes", "llama3", "none"] = "auto"  # auto: by the chat template
    # Sampling where a request says nothing. auto: the model's generation_config.json.
    generation_config: Literal["auto", "ignore"] = "auto"
    # Of a string and an integer in structured output whose schema has no limit; 0 = none.
    max_string_chars: Auto | Annotated[int, Field(ge=0, le=32768)] = "auto"  # auto: context / 4
    max_integer: int = Field(default=9 * 10**18, ge=0, le=9 * 10**18)  # and least: -max_integer
    # Calls of one answer whose grammar is theirs; 0 = any number. auto: context / 256, 8 to 128
    max_tool_calls: Auto | Annotated[int, Field(ge=0, le=1024)] = "auto"
    reasoning_parser: Literal["auto", "qwen3", "none"] = "auto"  # qwen3: <think>…</think>
