"""Bodies of HTTP responses.

A field that is UNSET is not written. So a field that OpenAI's published schema requires has no
default, and is written even where it is null.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType

from router.observe.stages import StageTimes


class PromptTokensDetails(Struct, kw_only=True):
    """How much of the prompt did not have to be computed."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of one HTTP request, all its choices together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, kw_only=True):
    """One of the likeliest tokens at a position of a chat's answer."""

    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TopLogprob, kw_only=True):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Every token of a chat's answer, whether it is content, reasoning or a call."""

    content: list[ContentLogprob]
    refusal: None = None


class TextLogprobs(Struct, kw_only=True):
    """Every token of a completion, with `echo` of its prompt, too: the first has no logprob.

    Offsets count characters from the start of its own text, with `echo` of the prompt.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, kw_only=True):
    """Of a token of a prompt, or one that might have stood there; rank: null if it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; of the first token null


class FunctionCall(Struct, kw_only=True):
    """The function's name and its arguments as JSON text; in a chunk, what is new of both."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomCall(Struct, kw_only=True):
    """The name of a tool that takes a text, and that; in a chunk, what is new of both."""

    name: str | UnsetType = UNSET
    input: str


class ToolCall(Struct, kw_only=True):
    """A whole call, or what a chunk adds to one; id, type and name come once."""

    index: int | UnsetType = UNSET  # in a chunk
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET  # one of the two
    custom: CustomCall | UnsetType = UNSET


class AssistantMessage(Struct, kw_only=True):
    """A whole answer."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, as newer clients call it
    tool_calls: list[ToolCall] | UnsetType = UNSET


class DeltaMessage(Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TracedStep(Struct, kw_only=True):
    """What one decode step did for a choice: a line of its accept trace.

    It stored the KV of tokens `position` to `position + width - 1` of prompt and output: the last
    token drawn before it, and the `drafts` behind that. -1 is a draft that there was not. It drew
    `num_accepted` + 1 tokens; those behind a stop string are not part of the answer.
    """

    position: int
    width: int
    drafts: Sequence[int]
    num_accepted: int


class Choice(Struct, kw_only=True):
    """What every choice has.

    `stages` comes with the finish reason if return_stages was set, `kvlane_trace` if return_trace
    was. `token_ids` are those that are new, if return_token_ids was set.
    """

    index: int
    token_ids: Sequence[int] | UnsetType = UNSET
    stages: StageTimes | UnsetType = UNSET
    kvlane_trace: Sequence[TracedStep] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """A choice of a chat completion."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChunkChoice(Choice, kw_only=True):
    """A choice of a chat completion chunk."""

    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class TextChoice(Choice, kw_only=True):
    """A choice of a text completion, whole or chunk."""

    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # with the first `token_ids`
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", bound=Choice)


class Completion(Struct, Generic[ChoiceT], kw_only=True):
    """Any of the four bodies; `object` says which, `choices` holds the choices of that kind."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = (
        UNSET  # of a chat; in a stream, of its first chunk
    )
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of a chat


class ChatCompletion(Completion[ChatChoice], kw_only=True):
    """A whole answer."""


class ChatCompletionChunk(Completion[ChunkChoice], kw_only=True):
    """One event of a stream; the event after the last one is `[DONE]`."""


class TextCompletion(Completion[TextChoice], kw_only=True):
    """A whole answer, or one event of a stream; the event after the last one is `[DONE]`."""


class TokenizeReply(Struct, kw_only=True):
    """Token ids, and the text of each if it was asked for."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct, kw_only=True):
    """A text."""

    prompt: str


class Model(Struct, kw_only=True):
    """The model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvlane"
    root: str  # the directory of the model and its tokenizer, at the server
    max_model_len: int
    default_sampling_params: dict[str, float] = {}
    simulated_accept_len: float | UnsetType = UNSET  # answers are junk: acceptance is simulated


class ModelList(Struct):
    """All models: one."""

    data: list[Model]
    object: str = "list"


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
