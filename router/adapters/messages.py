"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages as chats.

Fields of chats that Anthropic does not have, such as `seed` or `chat_template_kwargs`, work as
there; those of a form that its answers do not have are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from router.errors import THREAD, ApiError, invalid, unsupported
from router.openai.chat import rendered
from router.openai.defaults import Temperature, TopK, TopP
from router.openai.fields import foreign
from router.openai.reading import Many, RequestModel, mapping, read, refused
from router.openai.reply import Model
from router.openai.schema import MAX_STOP_STRINGS, MAX_TOOLS, ChatBody, checked
from router.openai.served import Served
from router.openai.tools import tools_of
from router.text.template import billless

# Fields of chats that have no place in an answer of other forms.
NOT_HERE = (
    "n", "logprobs", "top_logprobs", "return_token_ids", "return_stages", "return_trace",
    "return_resumes", "prompt_logprobs", "max_completion_tokens", "include_usage",
)  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KNOWN = {  # keys of fields
    "tools": ("type", "name", "description", "input_schema", "strict", "cache_control"),
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
    "thinking": ("type", "display"),
    "output_config": ("effort", "format"),
}
SWITCH = "enable_thinking"  # of templates

Blocks = Many[dict[str, Any]]
ChatT = TypeVar("ChatT", bound=ChatBody)


def _blocks(value: Any) -> Any:
    """A text counts as one block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    Blocks,
    BeforeValidator(_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Turn(RequestModel):
    """One of Anthropic's messages."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CountBody(RequestModel):
    """POST /v1/messages/count_tokens."""

    model: str = ""
    messages: Many[Turn] = Field(min_length=1)
    system: Content = Field([])
    tools: Blocks = Field([], max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: dict[str, Any] = Field({})
    output_format: dict[str, Any] | None = None  # as it was called before `output_config.format`


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Many[str] = Field([], max_length=MAX_STOP_STRINGS)
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


class MessageChat(ChatBody):
    """The chat of a message: its `max_tokens` is a limit, and reserves nothing."""

    fits_max_tokens: ClassVar[bool] = True


def chat_of(body: CountBody, template: str) -> ChatBody:
    """The chat that a body asks for; `template`: the source of the chat template.

    Raises an ApiError, 400, that names the field.
    """
    extra = body.model_extra or {}
    refuse_foreign(extra)
    if "stop" in extra:
        raise invalid("stop: it is called stop_sequences here", "stop")
    if body.thread.get("type", "create") != "create":
        message = "no thread is kept here: send all messages"
        raise ApiError("unsupported", message, param=THREAD).answered(404)
    fields: dict[str, Any] = dict(extra) | _sampling(body)
    fields["messages"] = [*_system(body), *_messages(body)]
    fields["tools"] = [_tool(tool) for tool in body.tools]
    fields |= _choice(body.tool_choice)
    fields |= _thinking(body, template, mapping(extra.get("chat_template_kwargs")))
    fields |= _form(body)
    fields.setdefault("prompt_cache_options", _kept(body))
    for name, known in KNOWN.items():
        given = getattr(body, name)
        if name == "tools":  # of hosted ones the header names the types
            given = [tool for tool in body.tools if tool.get("type") in (None, "custom")]
        fields |= dict.fromkeys(foreign(name, given, known), True)
    if fields["messages"][-1] == {"role": "assistant", "content": ""}:
        fields["messages"].pop()  # as in Anthropic's API the last one may be empty
    elif body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    return valid(MessageChat, fields)


def _kept(body: CountBody) -> dict[str, Any]:
    """For how long: the longest time that any part asks for, as parts are not kept apart."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("", body.model_extra or {})]
    for name, blocks in (("tools", body.tools), ("system", body.system)):
        parts += [(f"{name}.{i}.", block) for i, block in enumerate(blocks)]
    for i, turn in enumerate(body.messages):
        parts += [(f"messages.{i}.content.{j}.", part) for j, part in enumerate(turn.content)]
    longest = None
    for where, part in parts:
        ttl = mapping(part.get("cache_control")).get("ttl")
        if ttl not in (None, "5m", "1h"):
            param = f"{where}cache_control.ttl"
            raise invalid(f"{param}: must be 5m or 1h", param)
        longest = longest if ttl is None or longest == "1h" else ttl
    return {"ttl": longest}


def refuse_foreign(extra: Mapping[str, Any]) -> None:
    """Raise an ApiError, 400, if there is a field of chats that has no place in such an answer."""
    for name in NOT_HERE:
        if name in extra:
            raise unsupported(f"{name} has no place in an answer of this form", name)


def valid(kind: type[ChatT], fields: Mapping[str, Any]) -> ChatT:
    """The chat with these fields; raises an ApiError, 400, that names one."""
    try:
        return checked(kind.model_validate(fields))
    except ValidationError as error:
        raise refused(error) from None


def count_tokens(served: Served, own_salt: str, raw: bytes) -> dict[str, int]:
    """The answer to /v1/messages/count_tokens; raises an ApiError, or what `rendered` raises."""
    body = read(CountBody, raw)
    served.check_model(body.model)
    chat = chat_of(body, served.text.template_source)
    return {"input_tokens": num_tokens(served, own_salt, chat)}


def num_tokens(served: Served, own_salt: str, chat: ChatBody) -> int:
    """Those of a chat's prompt; raises as `count_tokens`."""
    prompt = rendered(chat.messages, chat, tools_of(chat).given, served.text)
    adds = bool(chat.add_special_tokens)
    return len(served.encode(prompt, "messages", adds=adds, salt=chat.salt(own_salt)))


def model_card(card: Model) -> dict[str, Any]:
    """The model, as Anthropic's `/v1/models` shows it."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat()
    return {"type": "model", "id": card.id, "display_name": card.id, "created_at": created}


def _sampling(body: CountBody) -> dict[str, Any]:
    if not isinstance(body, MessagesBody):
        return {}
    if any(not stop for stop in body.stop_sequences):
        raise invalid("stop_sequences: none may be empty", "stop_sequences")
    names = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    return {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}


def _system(body: CountBody) -> Iterator[dict[str, Any]]:
    texts = [text_of(block, f"system.{i}") for i, block in enumerate(body.system)]
    if content := billless("\n".join(texts)):
        yield {"role": "system", "content": content}


def text_of(block: Mapping[str, Any], param: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a block of one of these types; raises an ApiError, 400, if it has none."""
    kind, text = block.get("type"), block.get("text")
    if kind not in kinds:
        raise unsupported(f"{param}: content of type {kind!r} is not supported", param)
    if not isinstance(text, str):
        raise invalid(f"{param}.text: must be a string", f"{param}.text")
    return text


def word(fields: Mapping[str, Any], name: str, param: str) -> str:
    """A field that has to be a text; raises an ApiError, 400, if it is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}: must be a string", f"{param}.{name}")
    return value


def _messages(body: CountBody) -> Iterator[dict[str, Any]]:
    for i, turn in enumerate(body.messages):
        where = f"messages.{i}.content"
        if turn.role == "assistant":
            yield _said(turn.content, where)
        else:
            yield from _asked(turn.role, turn.content, where)


def _asked(role: str, blocks: Sequence[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """A user's message: results of tools are messages of their own in a chat."""
    texts = list[str]()
    for i, block in enumerate(blocks):
        param = f"{where}.{i}"
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            inner = _blocks(block.get("content") or [])
            if not isinstance(inner, list):
                raise invalid(f"{param}.content: must be a string or blocks", f"{param}.content")
            shown = [
                text_of(part, f"{param}.content") for part in map(mapping, cast("list[Any]", inner))
            ]
            call = word(block, "tool_use_id", param)
            yield {"role": "tool", "tool_call_id": call, "content": "\n".join(shown)}
        else:
            texts.append(text_of(block, param))
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _said(blocks: Sequence[dict[str, Any]], where: str) -> dict[str, Any]:
    """A message of the assistant; reasoning that is not readable is left out."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for i, block in enumerate(blocks):
        param, kind = f"{where}.{i}", block.get("type")
        if kind == "thinking":
            thoughts.append(word(block, "thinking", param))
        elif kind == "tool_use":
            given: Any = block.get("input")
            arguments = (
                given if isinstance(given, str) else json.dumps({} if given is None else given)
            )
            function = {"name": word(block, "name", param), "arguments": arguments}
            calls.append({"id": word(block, "id", param), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(text_of(block, param))
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        said["reasoning"] = "\n".join(thoughts)
    return said | ({"tool_calls": calls} if calls else {})


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":  # nothing that is run here: `tools_of`
        return {"type": kind, "name": tool.get("name")}
    function: dict[str, Any] = {"name": tool.get("name")}
    function["parameters"] = tool.get("input_schema") or {}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        name = word(choice, "name", "tool_choice")
        made: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        made = CHOICES[kind]
    else:
        raise invalid("tool_choice.type: must be auto, any, tool or none", "tool_choice.type")
    alone = choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        name = "tool_choice.disable_parallel_tool_use"
        raise invalid(f"{name}: must be true or false", name)
    return {"tool_choice": made, "parallel_tool_calls": not alone}


def _thinking(body: CountBody, template: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """As in Anthropic's API a model thinks only if it is asked to, where its template has a say."""
    thinking = body.thinking or {"type": "disabled"}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        name = "thinking.type"
        raise invalid(f"{name}: must be enabled, adaptive or disabled", name)
    shown = {"include_reasoning": False} if thinking.get("display") == "omitted" else {}
    switch = {SWITCH: kind != "disabled"} if SWITCH in template else {}
    effort = mapping(body.output_config).get("effort")
    efforts = {} if effort is None else {"reasoning_effort": effort}
    return {"chat_template_kwargs": {**switch, **given}, **efforts, **shown}


def _form(body: CountBody) -> dict[str, Any]:
    """Structured output."""
    param = "output_config.format" if body.output_format is None else "output_format"
    form = body.output_format or mapping(body.output_config).get("format")
    if form is None:
        return {}
    fields = mapping(form)
    if fields.get("type") != "json_schema" or not isinstance(fields.get("schema"), dict):
        raise invalid(f"{param}: must be a json_schema with a schema", param)
    described = {"name": "output", "schema": fields["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": described}}
