"""Bodies of HTTP requests; null means the default. Responses: `router.openai.reply`.

Unknown fields are accepted, as in vLLM, but not in silence: `router.openai.fields`.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from router.errors import invalid
from router.openai.body import Named
from router.openai.defaults import Defaults, MinP, RepetitionPenalty, Temperature, TopK, TopP, given
from router.openai.fields import OF_RENDERING, check_built, foreign, is_hosted
from router.openai.reading import Many, RequestModel, contradiction, mapping, read
from worker.api import MAX_LOGPROBS, MAX_STOP_IDS, Sampling

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 16 << 10  # of all stop strings of a request
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 1024
MAX_TTL_S = 86_400.0
TTLS_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0}  # Anthropic's and OpenAI's
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_TOOLS = 512
MIN_TEMPERATURE = 1e-4  # less is greedy: the reciprocal must fit a float32
# Fields of a body that workers get as they are.
AS_GIVEN = ("ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "return_trace")
DRAWN = tuple(Defaults.model_fields)  # and of those that may be the model's


def _listed(value: Any) -> Any:
    """A single stop string counts as a list of one."""
    return [value] if isinstance(value, str) else value


def _few(value: Any) -> Any:
    """Refuses a mapping with too many entries before they are checked."""
    if isinstance(value, dict) and len(cast("dict[Any, Any]", value)) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} entries")
    return cast("Any", value)


def _prompts(value: Any) -> Any:
    """Normalises the four forms of `prompt` to a list of strings or of lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids, or lists of token ids")
    items = cast("list[Any]", value)
    if all(isinstance(item, str) for item in items):
        return items
    if all(type(item) is int for item in items):
        return [items]
    for item in items:
        if not isinstance(item, list) or not all(type(i) is int for i in cast("list[Any]", item)):
            raise ValueError("must not mix strings, token ids and lists")
    return items


def _many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT: dict[str, Any] = {"type": "string"}  # of fields that take more forms than the normal one
IDS = _many({"type": "integer"})


class StreamOptions(RequestModel):
    """What a stream says beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage in every chunk


class Salted(RequestModel):
    """Whose prompts a prompt may share what is kept with: those of the same salt."""

    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT_CHARS,
        description="vLLM's: only requests with the same one share cached prompts",
    )  # fmt: skip

    def salt(self, own: str) -> str:
        """A digest of `own`, of the API key (`Key.own_salt`), and what the body says.

        Without both it is empty. Workers get it: neither a key nor a client's secret leaves here.
        """
        if not own and self.cache_salt is None:
            return ""
        # `own` is hexadecimal, so that no two pairs give the same text.
        parts = f"{own}/{self.cache_salt or ''}"
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


class CacheOptions(RequestModel):
    """How long OpenAI's clients want a prompt to be kept; of parts of it nothing is kept apart."""

    ttl: Literal["5m", "30m", "1h", "12h"] | None = None


class Sessioned(RequestModel):
    """Which conversation a request is a turn of, and how long its KV is worth keeping."""

    session_id: str | None = Field(None, max_length=MAX_SESSION_CHARS)  # SGLang's
    prompt_cache_key: str | None = Field(None, max_length=MAX_SESSION_CHARS)  # OpenAI's
    prompt_cache_options: CacheOptions | None = None
    cache_ttl: float | None = Field(
        None, ge=0, le=MAX_TTL_S,
        description="kvlane's own: seconds after its end in which its KV is evicted last",
    )  # fmt: skip

    @property
    def named(self) -> Named:
        """What it says of its session."""
        key = self.prompt_cache_key or ""
        user = mapping((self.model_extra or {}).get("metadata")).get("user_id")
        if not key and isinstance(user, str) and user.startswith("{"):  # Claude Code's
            with suppress(ValueError, RecursionError):
                inside = mapping(json.loads(user)).get("session_id")
                key = inside if isinstance(inside, str) else ""
        options, ttl_s = self.prompt_cache_options, self.cache_ttl
        if ttl_s is None and options is not None and options.ttl is not None:
            ttl_s = TTLS_S[options.ttl]
        return Named(self.session_id or "", key, ttl_s)


class GenerationBody(Salted, Sessioned):
    """What both generation endpoints share."""

    # Output tokens where the body names no limit; None: as many as the prompt leaves room for.
    default_max_tokens: ClassVar[int | None] = None
    fits_max_tokens: ClassVar[bool] = False  # whether a limit that has no room is cut to it

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None  # where it is None, here and below: `Defaults`
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        Many[str], BeforeValidator(_listed), WithJsonSchema({"anyOf": [TEXT, _many(TEXT)]})
    ] = Field(default_factory=list[str], max_length=MAX_STOP_STRINGS)
    priority: int = Field(0, ge=-(2**31), lt=2**31)  # vLLM's: the least is first
    stop_token_ids: Many[int] = Field(default_factory=list[int], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)
    ] = Field(default_factory=dict[int, float])
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None  # SGLang's, as the next two
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # the last ones; -1: what has room
    # vLLM's: as `logprobs`, of the prompt's tokens
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_stages: bool = False  # ours: where the time of each choice went
    return_resumes: bool = False  # ours: a stream says where it goes on at another worker
    return_trace: bool = Field(
        False, description="kvlane's own: each choice has its accept trace, `kvlane_trace`"
    )
    add_special_tokens: bool | None = None

    def unknown(self, template: str) -> Iterator[str]:
        """The paths of fields that have no effect here; `template`: source of the chat template."""
        yield from self.model_extra or {}
        options, form = self.stream_options, self.response_format or {}
        yield from foreign("stream_options", options and options.model_extra)
        yield from foreign("structured_outputs", self.structured_outputs)
        yield from foreign("response_format", form)
        yield from foreign("response_format.json_schema", form.get("json_schema"))

    @property
    def asked_max_tokens(self) -> tuple[int | None, str]:
        """The limit of output tokens that the body names, if any, and the field that has it."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int:
        """Alternatives to report for each token; -1: no logprobs."""
        return -1

    @property
    def num_prompt_logprobs(self) -> int:
        """Alternatives to compute for each token of the prompt; -1: no logprobs."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def num_samples(self) -> int:
        """Answers to compute for each prompt, of which `n` are returned."""
        return self.n

    @model_validator(mode="after")
    def _scores_whole(self) -> "GenerationBody":
        if self.stream and self.prompt_logprobs is not None:
            raise contradiction("prompt_logprobs", "a stream has none")
        return self

    def sampling(
        self, max_tokens: int, vocab_size: int, defaults: Defaults, grammar: str = ""
    ) -> Sampling:
        """The sampling parameters as workers get them; `defaults` where the body says nothing.

        Raises an ApiError if fields contradict each other or name ids that do not exist.
        """
        if self.min_tokens > max_tokens:
            raise invalid(f"min_tokens must be at most max_tokens ({max_tokens})", "min_tokens")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if any(not 0 <= token < vocab_size for token in ids):
                raise invalid(f"{name} must be in [0, {vocab_size})", name)
        for name, asked in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
            if grammar and asked:
                raise invalid(f"{name} contradicts structured output, which has its own end", name)
        fields = self.__dict__
        named = {name: fields[name] for name in DRAWN if fields[name] is not None}
        drawn = defaults.model_copy(update=named) if named else defaults
        # Nothing but the likeliest token is left by these.
        greedy = drawn.temperature < MIN_TEMPERATURE or drawn.top_p == 0 or drawn.min_p == 1
        return Sampling(
            **{name: fields[name] for name in AS_GIVEN},
            max_tokens=max_tokens,
            temperature=0.0 if greedy else drawn.temperature,
            top_p=drawn.top_p or 1.0,
            top_k=max(0, drawn.top_k),
            min_p=drawn.min_p if drawn.min_p < 1 else 0.0,
            repetition_penalty=drawn.repetition_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            stop_ids=tuple(sorted(set(self.stop_token_ids))),
            logit_bias=tuple(self.logit_bias.items()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=grammar,
        )


def seed_of(seed: int, sample: int) -> int:
    """The seed of a choice; the first keeps the one of the request."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


class Message(RequestModel):
    """One message of a chat; fields that only the template knows are passed to it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[dict[str, Any]] = ""
    tool_calls: Many[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])


class OfTemplate(RequestModel):
    """What the chat template gets beside messages and tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on with the last message
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    documents: Many[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _continues(self) -> "OfTemplate":
        if self.continue_final_message:
            asks = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
            messages = getattr(self, "messages", None)
            last = messages[-1] if messages else None
            if asks or last is None or last.role != "assistant" or not last.content:
                message = "needs a last message of the assistant, and no add_generation_prompt"
                raise contradiction("continue_final_message", message)
        return self

    @property
    def of_template(self) -> dict[str, Any]:
        """All of it by the names that templates know; OpenAI's effort "none" has one of its own."""
        named = given({name: getattr(self, name) for name in ("documents", "reasoning_effort")})
        silent = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return silent | self.chat_template_kwargs | named


class ChatBody(OfTemplate, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: Many[dict[str, Any]] = Field(default_factory=list[dict[str, Any]], max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    def unknown(self, template: str) -> Iterator[str]:
        yield from super().unknown(template)
        yield from dict.fromkeys(foreign("tools", [t for t in self.tools if not is_hosted(t)]))
        yield from dict.fromkeys(f"tools.{t['type']}" for t in self.tools if is_hosted(t))
        named = self.of_template
        for name in named:
            from_kwargs = name in self.chat_template_kwargs
            is_none = name == "reasoning_effort" and named[name] == "none"
            reads = name in template and name not in OF_RENDERING
            known = reads or (is_none and "enable_thinking" in template)
            if not known and (from_kwargs or name != "enable_thinking"):
                yield f"chat_template_kwargs.{name}" if from_kwargs else name

    @model_validator(mode="after")
    def _agrees(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "needs logprobs = true")
        return self

    @property
    def asked_max_tokens(self) -> tuple[int | None, str]:
        """`max_completion_tokens` has replaced `max_tokens` in OpenAI's API; it wins."""
        if self.max_completion_tokens is None:
            return super().asked_max_tokens
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def num_logprobs(self) -> int:
        return self.top_logprobs if self.logprobs else -1


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's default, and vLLM's

    prompt: Annotated[
        Many[str] | Many[Many[int]],
        BeforeValidator(_prompts),
        WithJsonSchema({"anyOf": [TEXT, _many(TEXT), IDS, _many(IDS)]}),
    ]
    max_tokens: int | None = Field(None, ge=0)  # 0: the prompt alone is wanted
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _agrees(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < self.n:
            raise contradiction("best_of", f"must be at least n ({self.n})")
        if self.stream and self.num_samples > self.n:
            raise contradiction("best_of", "a stream cannot choose: it must be n")
        return self

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse(model: type[BodyT], raw: bytes) -> BodyT:
    """The body of a request that asks for generation.

    Raises an ApiError, 400, naming the field that is wrong or not supported.
    """
    return checked(read(model, raw))


def checked(body: BodyT) -> BodyT:
    """A body that asks for generation, if its fields agree; raises as `parse` does."""
    check_built(body.model_extra or {})
    if any(not stop for stop in body.stop):
        raise invalid("stop strings must not be empty", "stop")
    if sum(map(len, body.stop)) > MAX_STOP_CHARS:
        raise invalid(f"stop: at most {MAX_STOP_CHARS} characters in all", "stop")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream = true", "stream_options")
    return body
