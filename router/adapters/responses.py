"""POST /v1/responses: OpenAI's responses as chats, and what a response says of its request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from msgspec import Raw
from msgspec.json import encode as to_json
from pydantic import Field

from router.adapters.items import fit, flat, messages_of
from router.adapters.messages import refuse_foreign, valid, word
from router.adapters.store import Item, Kept, MissingResponse, fewer, items_of
from router.errors import invalid, unsupported
from router.openai.defaults import Temperature, TopP
from router.openai.fields import foreign
from router.openai.reading import Many, RequestModel, mapping
from router.openai.schema import MAX_TOOLS, ChatBody
from router.openai.served import Served
from worker.api import MAX_LOGPROBS
from worker.errors import KvlaneError

NOT_KEPT = ("conversation", "prompt")  # name what is kept at OpenAI's
TOOL_KEYS = ("type", "name", "description", "parameters", "strict", "format")
SPACE_KEYS = (*TOOL_KEYS, "tools")
KEYS = {"function": TOOL_KEYS, "custom": TOOL_KEYS, "namespace": SPACE_KEYS}
CHOICE_KEYS = ("type", "name", "namespace", "mode", "tools")
REASONING_KEYS, TEXT_KEYS = ("effort", "summary"), ("verbosity",)
FORMAT_KEYS = ("type", "name", "description", "schema", "strict")
MAX_ITEMS = 16_384  # of a conversation; one may take 1 KB, as long as it is prepared
MAX_NAMED = 32  # responses of whose output a request names items
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


class OpenResponseBody(ResponseBody):
    """POST /v1/responses/input_tokens and /compact: what came before may be all."""

    input: str | Many[dict[str, Any]] = Field([])


Space = tuple[str, str]  # a namespace, and the name of a function in it


class Wanted(KvlaneError):
    """Responses that a request goes on with, or of which it names items, by the field."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__(*names)
        self.names = names


def conversation_of(
    body: ResponseBody, known: Mapping[str, Kept | None]
) -> tuple[Sequence[bytes], list[Item]]:
    """The parts of a conversation, the last of which are the request's own items; and all items.

    known: responses, None for one that is nowhere. Raises Wanted for others, or an ApiError, 404 or
    400.
    """
    parts, items, name = list[bytes](), list[Item](), body.previous_response_id
    if name is not None:
        before = _known(known, {name: "previous_response_id"})[name]
        if before is None:
            raise MissingResponse(name, "previous_response_id")
        parts += before.parts
        items += items_of(parts)
    given = body.inputs
    if len(items) + len(given) > MAX_ITEMS:
        raise invalid(f"input: at most {MAX_ITEMS} items in a conversation", "input")
    own = _resolved(given, {str(item.get("id")): item for item in items}, known)
    return fewer([*parts, to_json([fit(item) for item in own])]), items + own


def _known(known: Mapping[str, Kept | None], names: Mapping[str, str]) -> dict[str, Kept | None]:
    wanted = {name: param for name, param in names.items() if name not in known}
    if wanted:
        raise Wanted(wanted)
    return {name: known[name] for name in names}


def _resolved(
    given: Sequence[Item], items: dict[str, Item], known: Mapping[str, Kept | None]
) -> list[Item]:
    """The items, what they refer to in place of references. items: those before, by id."""
    named, wanted = dict[int, str](), dict[str, str]()
    for i, item in enumerate(given):
        is_named = "id" in item and "role" not in item  # a reference, also without its type
        kind = item.get("type") or ("item_reference" if is_named else "message")
        if kind == "item_reference":
            name = named[i] = word(item, "id", f"input.{i}")
            if name not in items:
                wanted.setdefault(response_of(name), f"input.{i}.id")
    if len(wanted) > MAX_NAMED:
        raise invalid(f"input: items of more than {MAX_NAMED} responses", "input")
    for kept in filter(None, _known(known, wanted).values()):
        items |= {str(item.get("id")): item for item in items_of(kept.parts[-1:])}
    for i, name in named.items():
        if name not in items:
            raise MissingResponse(response_of(name), f"input.{i}.id", name)
    return [items[named[i]] if i in named else item for i, item in enumerate(given)]


def response_of(name: str) -> str:
    """The response that has put an item out: the item's id has its id."""
    return "resp_" + name.partition("_")[2].rpartition("-")[0]


def spaces_of(body: ResponseBody) -> dict[str, Space]:
    """Of functions in namespaces: how the model calls them -> what the client does.

    Raises an ApiError, 400, if two tools would have one name.
    """
    names = dict[str, Space]()
    plain = [tool.get("name") for tool in body.tools if tool.get("type") != "namespace"]
    for i, tool in enumerate(body.tools):
        if tool.get("type") == "namespace":
            for j, one in enumerate(_inside(tool, f"tools.{i}")):
                where = f"tools.{i}.tools.{j}"
                space = word(tool, "name", f"tools.{i}"), word(one, "name", where)
                name = flat(*space)
                if name in names or name in plain:
                    raise invalid(f"{where}: two tools have the name {name}", where)
                names[name] = space
    return names


def chat_of_response(body: ResponseBody, conversation: Sequence[Item]) -> ChatBody:
    """The chat that a response is; raises an ApiError, 400, that names the field."""
    extra = body.model_extra or {}
    refuse_foreign(extra)
    if not conversation:
        raise invalid("input: must not be empty", "input")
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
        "tools": list(_tools(body.tools)),
        "tool_choice": _choice(body.tool_choice, body.tools, spaces_of(body)),
    }  # fmt: skip
    fields["messages"] += messages_of(conversation, "input")
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.top_logprobs or LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    known = [(tool, KEYS.get(str(tool.get("type")))) for tool in body.tools]
    unheeded = [name for tool, keys in known if keys for name in foreign("tools", tool, keys)]
    unheeded += foreign("text", body.text, ("format",))
    unheeded += foreign("reasoning", body.reasoning, ("effort",))
    unheeded += [f"include.{name}" for name in body.include if name != LOGPROBS]
    fields |= dict.fromkeys(unheeded, True)
    fields["reasoning_effort"] = body.reasoning.get("effort")
    form, asked = mapping(body.text.get("format")), body.text.get("format")
    if asked not in (None, {}):
        described = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": form.get("type"), "json_schema": described}
    return valid(ChatBody, fields)


def _tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "custom":
            yield {"type": "custom", "custom": tool}
        elif kind == "namespace":
            about = [f"{tool.get('name')}: {tool['description']}"] * bool(tool.get("description"))
            for one in _inside(tool, f"tools.{i}"):  # the first says what they are
                named: dict[str, Any] = {"name": flat(str(tool.get("name")), str(one.get("name")))}
                own = one.get("description") or ""
                if isinstance(own, str):
                    named["description"] = "\n".join([*about, own]).strip()
                yield from _tools([{**one, **named}])
                about = []
        elif kind == "function":
            names = ("name", "description", "parameters", "strict")
            given = {name: tool[name] for name in names if tool.get(name) is not None}
            yield {"type": "function", "function": given}
        else:  # nothing that is run here: `tools_of`
            yield {"type": kind}


def _inside(space: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools of a namespace."""
    given = space.get("tools")
    if not isinstance(given, list):
        raise invalid(f"{where}.tools: must be a list", f"{where}.tools")
    tools = [mapping(tool) for tool in cast("list[Any]", given)]
    for i, tool in enumerate(tools):
        if tool.get("type") not in ("function", "custom"):
            name = f"{where}.tools.{i}.type"
            raise invalid(f"{name}: must be function or custom", name)
    return tools


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]], spaces: Mapping[str, Space]) -> Any:
    """`tool_choice` as chats write it."""
    fields = mapping(choice)
    match fields.get("type"):
        case "function" | "custom" as kind:
            name, space = word(fields, "name", "tool_choice"), fields.get("namespace")
            if isinstance(space, str):
                name = flat(space, name)
            elif all(tool.get("name") != name for tool in tools):
                name = next((one for one, (_, own) in spaces.items() if own == name), name)
            return {"type": kind, kind: {"name": name}}
        case "namespace":
            inside = [name for name, (space, _) in spaces.items() if space == fields.get("name")]
            chosen = [{"type": "function", "function": {"name": name}} for name in inside]
            allowed = {"mode": "required", "tools": chosen}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case "allowed_tools":
            chosen = list[Any]()
            allowed = fields.get("tools")
            for one in cast("list[Any]", allowed) if isinstance(allowed, list) else ():
                made = _choice(one, tools, spaces)
                inner = mapping(mapping(made).get("allowed_tools")).get("tools")
                chosen += [made] if inner is None else inner
            inner = {"mode": fields.get("mode"), "tools": chosen}
            return {"type": "allowed_tools", "allowed_tools": inner}
        case _:
            return choice


def head_of(body: ResponseBody, served: Served) -> dict[str, Raw]:
    """What a response repeats of its request, as JSON; of mappings the fields that are known."""
    defaults, form = served.defaults, body.text.get("format", {"type": "text"})
    head: dict[str, Any] = {
        "object": "response",
        "model": served.model,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "tool_choice": _fit(body.tool_choice, CHOICE_KEYS),
        "tools": [_fit(tool, SPACE_KEYS) for tool in body.tools],
        "background": body.background,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **_fit(body.reasoning, REASONING_KEYS)},
        "text": {"format": _fit(form, FORMAT_KEYS), **_fit(body.text, TEXT_KEYS)},
        "top_logprobs": body.top_logprobs,
        "truncation": body.truncation,
    }
    return {name: Raw(to_json(value)) for name, value in head.items()}


def _fit(value: Any, keys: Sequence[str]) -> Any:
    """Without the fields that are not known; a schema may have any."""
    if not isinstance(value, dict):
        return value
    fields = {k: v for k, v in cast("dict[str, Any]", value).items() if k in keys}
    inner, known = fields.get("tools"), SPACE_KEYS if "parameters" in keys else CHOICE_KEYS
    if isinstance(inner, list):
        fields["tools"] = [_fit(tool, known) for tool in cast("list[Any]", inner)]
    return fields
