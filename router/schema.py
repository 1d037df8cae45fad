"""HTTP bodies: what is asked, what is answered, and the one table of what is not built yet.

Requests accept unknown fields, as vLLM does; null means the default. Responses hold every field
that OpenAI's published schema requires, nulls included; they are written with `to_json`, which
leaves out what was not set on purpose.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from router.errors import invalid, unsupported
from worker.api import Sampling

MAX_STOP_STRINGS = 64


def _listed(value: Any) -> Any:
    """A single stop string counts as a list of one."""
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """Normalises the four forms of `prompt` to a list of strings or of id lists."""
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


class Open(BaseModel):
    """A request object: unknown fields are kept aside, null means the default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return {name: item for name, item in fields.items() if item is not None}


class StreamOptions(Open):
    """What a stream says beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage in every chunk


class GenerationBody(Open):
    """What both generation endpoints share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, lt=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[str], BeforeValidator(_listed)] = Field([], max_length=MAX_STOP_STRINGS)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        """The explicit limit of the output, if there is one."""
        return self.max_tokens

    def sampling(self, max_tokens: int, vocab_size: int) -> Sampling:
        """The wire's form.

        Args:
            max_tokens: the limit that applies to this prompt.
            vocab_size: ids of the model.

        Raises:
            ApiError: fields contradict each other or name ids that do not exist.
        """
        if self.min_tokens > max_tokens:
            raise invalid(f"min_tokens must be at most max_tokens ({max_tokens})", "min_tokens")
        if any(not 0 <= token < vocab_size for token in self.stop_token_ids):
            raise invalid(f"stop_token_ids must be in [0, {vocab_size})", "stop_token_ids")
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=seed,
            ignore_eos=self.ignore_eos,
            stop_ids=tuple(sorted(set(self.stop_token_ids))),
            min_tokens=self.min_tokens,
        )


class Message(Open):
    """One message of a chat; what the template knows beyond role and content passes through."""

    role: str
    content: str | list[dict[str, Any]] = ""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def asked_max_tokens(self) -> int | None:
        """`max_completion_tokens` has replaced `max_tokens` in OpenAI's API; it wins."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]


Fields = Mapping[str, Any]

# Fields that would change the output and are not built. Each row says when the value is harmless;
# building one means deleting its row and adding the field above.
NOT_BUILT: dict[str, Callable[[Any, Fields], bool]] = {
    "n": lambda value, _: value == 1,
    "best_of": lambda value, _: value == 1,
    "use_beam_search": lambda value, _: not value,
    "presence_penalty": lambda value, _: value == 0,
    "frequency_penalty": lambda value, _: value == 0,
    "repetition_penalty": lambda value, _: value == 1,
    "logit_bias": lambda value, _: not value,
    "allowed_token_ids": lambda value, _: not value,
    "bad_words": lambda value, _: not value,
    "logprobs": lambda value, _: value is False,
    "top_logprobs": lambda value, _: type(value) is int and value == 0,
    "prompt_logprobs": lambda value, _: False,
    "tools": lambda value, fields: not value or fields.get("tool_choice") == "none",
    "functions": lambda value, fields: not value or fields.get("function_call") == "none",
    "response_format": lambda value, _: value == {"type": "text"},
    "structured_outputs": lambda value, _: not value,
    "guided_json": lambda value, _: not value,
    "guided_regex": lambda value, _: not value,
    "guided_choice": lambda value, _: not value,
    "guided_grammar": lambda value, _: not value,
    "modalities": lambda value, _: value == ["text"],
    "audio": lambda value, _: not value,
    "echo": lambda value, _: not value,
    "suffix": lambda value, _: not value,
    "prompt_embeds": lambda value, _: not value,
    "truncate_prompt_tokens": lambda value, _: False,
    "include_stop_str_in_output": lambda value, _: not value,
    "continue_final_message": lambda value, _: not value,
    "chat_template": lambda value, _: not value,
}

BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse(model: type[BodyT], raw: bytes) -> BodyT:
    """The request body of an endpoint.

    Raises:
        ApiError: 400, naming the field: not JSON, a wrong value, or a wish that is not built.
    """
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise invalid(f"the body is not valid JSON: {first['msg']}") from None
        param = ".".join(_path(first["loc"])) or None
        message = first["msg"].removeprefix("Value error, ")
        raise invalid(f"{param or 'body'}: {message}", param) from None
    extra = body.model_extra or {}
    for name, harmless in NOT_BUILT.items():
        if name in extra and not harmless(extra[name], extra):
            raise unsupported(f"{name} is not supported yet with this value", name)
    if any(not stop for stop in body.stop):
        raise invalid("stop strings must not be empty", "stop")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream = true", "stream_options")
    return body


def _path(loc: Sequence[int | str]) -> list[str]:
    """Where a value is wrong; what follows the name of a form of it says only which form."""
    parts = [str(part) for part in loc]
    forms = [i for i, part in enumerate(parts) if part == "str" or part.startswith("list[")]
    return parts[: forms[0]] if forms else parts


def to_json(body: BaseModel) -> bytes:
    """The bytes of a response; fields that were never set are left out."""
    return body.model_dump_json(exclude_unset=True).encode()


class PromptTokensDetails(BaseModel):
    """How much of the prompt did not have to be computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one HTTP request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Counts in, usage out."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class AssistantMessage(BaseModel):
    """A whole answer."""

    role: str
    content: str
    refusal: None


class Delta(BaseModel):
    """What a chunk adds to an answer."""

    role: str = ""
    content: str = ""
    refusal: None = None


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: str


class ChunkChoice(BaseModel):
    """A choice of a chat completion chunk."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: str | None


class TextChoice(BaseModel):
    """A choice of a text completion, whole or chunk."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(BaseModel):
    """Any of the four answers; `object` says which, `choices` holds what belongs to it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[SerializeAsAny[BaseModel]]
    usage: Usage | None = None
