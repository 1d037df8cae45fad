"""Bodies of HTTP responses.

`to_json` writes the fields that were set, and only those. So a field that OpenAI's published schema
requires is set even where it is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from pydantic import BaseModel, SerializeAsAny


def to_json(body: BaseModel) -> bytes:
    """The bytes of a response, without the fields that were never set."""
    return body.model_dump_json(exclude_unset=True).encode()


class PromptTokensDetails(BaseModel):
    """How much of the prompt did not have to be computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one HTTP request, all its choices together; a prompt counts once."""

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


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a position of a chat's answer."""

    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Every token of a chat's answer, whether it is content, reasoning or a call."""

    content: list[ContentLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Every token of a completion; offsets count characters from the start of its own text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(BaseModel):
    """The function's name and its arguments as JSON text; in a chunk, what is new of both."""

    name: str = ""
    arguments: str


class ToolCall(BaseModel):
    """A whole call."""

    id: str
    type: str
    function: FunctionCall


class ToolCallDelta(BaseModel):
    """What a chunk adds to a call; id, type and name come once."""

    index: int
    id: str = ""
    type: str = ""
    function: FunctionCall


class AssistantMessage(BaseModel):
    """A whole answer."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class DeltaMessage(BaseModel):
    """What a chunk adds to an answer."""

    role: str = ""
    content: str = ""
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class StageTimes(BaseModel):
    """Where the time of one choice went, in seconds; each stage begins where the one before ends.

    All stages before `decode` together are shorter than first_token_s; the difference is the time
    that messages took between router and worker.
    """

    router_queue_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    first_step_s: float
    decode_s: float
    first_token_s: float
    prefilled_by: str | None
    decoded_by: str


class TracedStep(BaseModel):
    """What one decode step did for a choice: a line of its accept trace.

    It stored the KV of tokens `position` to `position + width - 1` of prompt and output: the last
    token drawn before it, and the `drafts` behind that. -1 is a draft that there was not. It drew
    `num_accepted` + 1 tokens; those behind a stop string are not part of the answer.
    """

    position: int
    width: int
    drafts: Sequence[int]
    num_accepted: int


class Choice(BaseModel):
    """What every choice has.

    `stages` comes with the finish reason if return_stages was set, `kvlane_trace` if return_trace
    was.
    """

    index: int
    stages: StageTimes | None = None
    kvlane_trace: Sequence[TracedStep] = ()


class ChatChoice(Choice):
    """A choice of a chat completion."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChunkChoice(Choice):
    """A choice of a chat completion chunk."""

    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class TextChoice(Choice):
    """A choice of a text completion, whole or chunk."""

    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class Completion(BaseModel, Generic[ChoiceT]):
    """Any of the four bodies; `object` says which, `choices` holds the choices of that kind."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[SerializeAsAny[ChoiceT]]
    usage: Usage | None = None
