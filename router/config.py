"""The router's part of the configuration tree."""

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from worker.config import Auto, Section

TokenizerBackend = Literal["auto", "huggingface", "fastokens"]
CallFormat = Literal[  # `router.text.forms.known` has them
    "hermes", "qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32", "minicpm5",
    "functionary31", "functionary32", "mistral11", "mistral32", "deepseek_r1", "deepseek_v31",
    "kimi_k2", "mistral", "cohere", "command_r", "granite", "phi", "firefunction", "nemotron",
    "apertus", "olmo3", "lfm2", "pythonic", "gemma", "gemma4", "functiongemma", "glm", "llama3",
    "harmony", "none",
]  # fmt: skip
ReasoningFormat = Literal[
    "auto", "qwen3", "mistral", "seed_oss", "cohere", "cohere2", "granite", "granite32", "none"
]
Origin = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]


def _network(text: str) -> str:
    """As it is; raises a ValueError that says what is wrong with it."""
    ipaddress.ip_network(text)
    return text


Network = Annotated[str, AfterValidator(_network)]


class RouterConfig(Section):
    """How the HTTP front behaves. Limits are per router process."""

    policy: str = "prefix_aware"
    """How workers are chosen: least_loaded, prefix_aware or round_robin."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """From a request's arrival to its last token."""
    queue_timeout_s: float = Field(default=60.0, ge=0)
    """Wait for a decode worker; then 429 or 503."""
    max_inflight: int = Field(default=4096, ge=1)
    """Choices of one router that have not ended; beyond, requests get 429 at once."""
    keep_alive_s: float = Field(default=120.0, gt=0)
    """An HTTP connection is closed when it is idle, or its client reads nothing, for so long."""
    header_timeout_s: float = Field(default=30.0, gt=0)
    """For a request's head to arrive; then its connection is cut."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """For a request's body to arrive, after the head; then 408."""
    max_body_bytes: int = Field(default=32 << 20, ge=1)
    """A larger request body gets 413."""
    max_bodies_mib: int = Field(default=128, ge=1)
    """Of bodies that arrive or are prepared, in all; beyond, 429. A client has half of it."""
    sse_ping_s: float = Field(default=15.0, gt=0)
    """A stream that is silent for so long gets a comment line."""
    stop_timeout_s: float = Field(default=5.0, gt=0)
    """At shutdown, for clients that do not read."""
    api_key_file: str = ""
    """Keys, one a line, with their limits; read again when it changes. Empty: none is needed."""
    fair_by: Literal["key", "address"] = "key"
    """Between whom turns and limits of the router are fair: API keys, without any addresses; or
    addresses in any case. Of IPv6 the first 64 bits count."""
    trusted_proxies: tuple[Network, ...] = ()
    """Networks (10.0.0.0/8) of proxies whose Forwarded or X-Forwarded-For tells a client's address.

    Without, all clients of a proxy are one.
    """
    admin_access: Literal["auto", "open"] = "auto"
    """Who sees /metrics, /load, /config, /dashboard; auto: where there are keys, who has one.

    If lines of the file say admin=yes, only those keys. A browser asks for it: any name, the key as
    password. open: whoever reaches the port.
    """
    tls_cert_file: str = ""
    """Certificate chain (PEM) of the API's port, with `tls_key_file`; read again when it changes.

    Empty: plain HTTP. The port on which routers ask one another for metrics stays plain.
    """
    tls_key_file: str = ""
    """Its private key, without a password."""
    cors_origins: Auto | tuple[Origin, ...] = "auto"
    """Pages of which origins (scheme://host:port, "*": any) a browser lets read answers.

    auto: any where the router listens on loopback without keys, else none.
    """
    vllm_metrics: bool = True
    """Also serve the metrics under vLLM's names, for endpoint pickers, KEDA and dashboards."""
    access_log: bool = False
    """A line at INFO for every HTTP request but probes; false: at DEBUG."""
    tool_parser: Auto | CallFormat = "auto"
    """Format of tool calls in the model's text; auto: as the chat template writes them.

    GET /config says which was found, and how: by probe, guess or none.
    """
    reasoning_parser: ReasoningFormat = "auto"
    """Format of the model's reasoning (qwen3: <think>…</think>, mistral: [THINK]…[/THINK]).

    auto: by the chat template.
    """
    tokenizer_backend: TokenizerBackend = "auto"
    """What encodes prompts; auto: fastokens where its ids are Hugging Face's, else huggingface."""
    tokenizer_cache_mib: int = Field(default=64, ge=0)
    """Of parts of prompts whose tokens are kept: what a conversation repeats; 0: none."""
    unknown_fields: Literal["tell", "refuse"] = "tell"
    """Fields of a request that have no effect here but might change an answer elsewhere.

    tell: a response header, X-Kvlane-Unknown-Fields, names them. refuse: a 400 does.
    """
    stored_responses_mib: int = Field(default=64, ge=0)
    """Of responses (/v1/responses) that are kept, in memory; 0: none.

    The oldest go first of the key that has stored most.
    """
    stored_response_mib: int = Field(default=4, ge=1)
    """Of one of them, with its conversation; a larger one is refused unless it says store=false."""
    stored_response_ttl_s: float = Field(default=3600.0, gt=0)
    """How long a response is kept, in the memory of the router that made it."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Sampling where a request says nothing; auto: the model's generation_config.json."""
    strict_tools: bool = False
    """Whether calls that nothing demands follow their tools' schemas, also without `strict`."""
    max_string_chars: Auto | Annotated[int, Field(ge=0, le=32768)] = "auto"
    """Of a string in structured output whose schema has no limit; 0: none, auto: context / 4."""
    max_integer: int = Field(default=9 * 10**18, ge=0, le=9 * 10**18)
    """Of an integer in structured output whose schema has no limit, either sign; 0: none."""
    max_tool_calls: Auto | Annotated[int, Field(ge=0, le=1024)] = "auto"
    """Calls of one answer whose grammar is theirs; 0: any number, auto: context / 256, 8 to 128."""
