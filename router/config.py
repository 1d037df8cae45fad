"""The router's part of the configuration tree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from worker.config import Auto, Section

Origin = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]


class RouterConfig(Section):
    """How the HTTP front behaves. Limits are per router process."""

    policy: str = "least_loaded"  # how workers are chosen: a name of router.policy.POLICIES
    request_timeout_s: float = Field(default=600.0, gt=0)  # from arrival to the last token
    queue_timeout_s: float = Field(default=60.0, ge=0)  # wait for a decode worker; then 429 or 503
    max_inflight: int = Field(default=4096, ge=1)  # choices that have not ended; then 429 at once
    # An HTTP connection is closed when it is idle, or its client reads nothing, for so long.
    keep_alive_s: float = Field(default=120.0, gt=0)
    header_timeout_s: float = Field(default=30.0, gt=0)  # for a request's head to arrive; then cut
    body_timeout_s: float = Field(default=60.0, gt=0)  # for its body, after the head; then 408
    max_body_bytes: int = Field(default=32 << 20, ge=1)  # a larger request body gets 413
    sse_ping_s: float = Field(default=15.0, gt=0)  # a stream silent for so long gets a comment line
    stop_timeout_s: float = Field(default=5.0, gt=0)  # at shutdown, for clients that do not read
    api_key_file: str = ""  # keys, one a line, read at the start; "" = everyone is served
    # Pages of which origins (scheme://host:port, "*": any) a browser lets read answers. auto: any
    # where the router listens on loopback without keys, else none.
    cors_origins: Auto | tuple[Origin, ...] = "auto"
    access_log: bool = True  # a line at INFO for every HTTP request; probes at DEBUG
    tool_parser: Literal["auto", "hermes", "llama3", "none"] = "auto"  # auto: by the chat template
    reasoning_parser: Literal["auto", "qwen3", "none"] = "auto"  # qwen3: <think>…</think>
