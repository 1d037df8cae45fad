"""POST /v1/responses: OpenAI's responses as chats, and what a response says of its request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from router.adapters.items import messages_of
from router.adapters.messages import refuse_foreign, valid, word
from router.adapters.store import Item, ResponseStore
from router.errors import invalid, unsupported
from router.openai.defaults import Temperature, TopP
from router.openai.fields import foreign
from router.openai.reading import Many, RequestModel, mapping
from router.openai.schema import MAX_TOOLS, ChatBody
from router.openai.served import Served
from worker.api import MAX_LOGPROBS

NOT_KEPT = ("conversation", "prompt")  # name what is kept at OpenAI's
TOOL_KEYS = ("type", "name", "description", "parameters", "strict", "format")
LOGPROBS = "message.output_text.logprobs"  # of `include`


class ResponseBody(RequestModel):
    """POST /v1/responses; also of `/v1/responses/input_tokens`."""

    model: str = ""
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    background: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: Many[dict[str, Any]] = Field([], max_length=MAX_TOOLS)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field({})
    reasoning: dict[str, Any] = Field({})
    include: Many[str] = Field([])
    metadata: dict[str, str] = Field({})
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Its items; a text is the user's."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input)


def conversation_of(body: ResponseBody, store: ResponseStore, owner: str) -> list[Item]:
    """The items of the responses before, and then its own; raises an ApiError, 404."""
    before: Sequence[Item] = ()
    if body.previous_response_id is not None:
        name = "previous_response_id"
        before = store.get(body.previous_response_id, owner, name).conversation
    return [*before, *body.inputs]


def chat_of_response(body: ResponseBody, conversation: Sequence[Item]) -> ChatBody:
    """The chat that a response is; raises an ApiError, 400, that names the field."""
    extra = body.model_extra or {}
    refuse_foreign(extra)
    for name in NOT_KEPT:
        if name in extra:
            raise unsupported(f"{name}: none is kept here", name)
    if body.background and (body.stream or not body.store):
        raise invalid("background: such a response is stored and not streamed", "background")
    instructions = body.instructions
    fields: dict[str, Any] = {
        **extra, "model": body.model, "stream": body.stream,
        "messages": [{"role": "system", "content": instructions}] * (instructions is not None),
        "max_completion_tokens": body.max_output_tokens, "temperature": body.temperature,
        "top_p": body.top_p, "parallel_tool_calls": body.parallel_tool_calls,
        "tools": list(_tools(body.tools)), "tool_choice": _choice(body.tool_choice),
    }  # fmt: skip
    fields["messages"] += messages_of(conversation, "input")
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.top_logprobs or LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    unheeded = [*foreign("tools", body.tools, TOOL_KEYS), *foreign("text", body.text, ("format",))]
    unheeded += foreign("reasoning", body.reasoning, ("effort",))
    unheeded += [f"include.{name}" for name in body.include if name != LOGPROBS]
    fields |= dict.fromkeys(unheeded, True)
    fields["reasoning_effort"] = body.reasoning.get("effort")
    form = mapping(body.text.get("format"))
    if form:
        described = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": form.get("type"), "json_schema": described}
    return valid(fields)


def _tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, tool in enumerate(tools):
        if tool.get("type") == "custom":
            yield {"type": "custom", "custom": tool}
            continue
        if tool.get("type") != "function":
            name = f"tools.{i}.type"
            raise unsupported(f"{name}: tools of type {tool.get('type')!r} are not run here", name)
        names = ("name", "description", "parameters", "strict")
        given = {name: tool[name] for name in names if tool.get(name) is not None}
        yield {"type": "function", "function": given}


def _choice(choice: Any) -> Any:
    """`tool_choice` as chats write it."""
    fields = mapping(choice)
    match fields.get("type"):
        case "function" | "custom" as kind:
            return {"type": kind, kind: {"name": word(fields, "name", "tool_choice")}}
        case "allowed_tools":
            allowed = fields.get("tools")
            chosen = map(_choice, allowed if isinstance(allowed, list) else [])  # pyright: ignore[reportUnknownArgumentType]
            inner = {"mode": fields.get("mode"), "tools": list(chosen)}
            return {"type": "allowed_tools", "allowed_tools": inner}
        case _:
            return choice


def head_of(body: ResponseBody, served: Served) -> dict[str, Any]:
    """What a response repeats of its request."""
    defaults = served.defaults
    return {
        "object": "response",
        "model": served.model,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "background": body.background,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **body.reasoning},
        "text": {"format": {"type": "text"}, **body.text},
        "top_logprobs": body.top_logprobs,
        "truncation": body.truncation,
        "store": body.store,
    }
