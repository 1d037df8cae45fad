"""Tools: the functions that a chat may call, and the grammar of a call."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import Field, ValidationError

from router.config import CallFormat
from router.errors import invalid
from router.openai.custom_calls import as_function
from router.openai.reading import RequestModel, mapping, refused
from router.openai.schema import ChatBody
from router.text.bounded import Bounds
from router.text.call_formats import CHANNEL, ENDS, MESSAGE, Bare, Harmony, Marked
from router.text.grammar import Part, quoted, schema_part
from router.text.parsers import (
    CALL,
    CALL_END,
    Calls,
    FirstCallOnly,
    Hermes,
    Llama3,
    Parser,
    Plain,
)

# Keys of `parameters` that say nothing of what parameters there are.
WITHOUT_NAMES = frozenset({"type", "title", "description", "required", "$schema", "$defs"})

# Formats by what a chat template has that writes them; the first that is there counts.
SIGNS: tuple[tuple[str, CallFormat], ...] = (
    ("<|channel|>", "harmony"),
    ("[ARGS]", "mistral11"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|start_of_role|>", "granite"),
    (CALL, "hermes"),
    ("<|tool|>", "phi"),
    ("<start_of_turn>", "gemma"),
    ("[gMASK]", "glm"),
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
)
# What is written out although it may be a special token; what calls begin with comes first.
MARKS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": (CALL, CALL_END),
    "mistral": ("[TOOL_CALLS]",),
    "mistral11": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "granite": ("<|tool_call|>", CALL, CALL_END),
    "phi": ("<|tool_call|>", "functools", "<|/tool_call|>"),
    "gemma": ("```tool_code", "```"),
    "harmony": (CHANNEL, MESSAGE, "<|constrain|>", *ENDS),
}


class Function(RequestModel):
    """A function as OpenAI describes it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


class Tool(RequestModel):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of one request."""

    given: list[dict[str, Any]]  # as the client wrote them, for the template
    functions: tuple[Function, ...] = ()
    demanded: tuple[Function, ...] = ()  # if there are any, one of them must be called
    custom: frozenset[str] = frozenset()  # names of those that take a text
    parallel: bool = True


def tools_of(body: ChatBody) -> Tools:
    """The tools of a request, none if tool_choice forbids calls. Bad ones raise an ApiError."""
    choice = body.tool_choice
    if choice == "none" or (not body.tools and choice in (None, "auto")):
        return Tools([])
    if not body.tools:
        raise invalid("tool_choice needs tools", "tool_choice")
    given = [as_function(tool, f"tools.{i}") for i, tool in enumerate(body.tools)]
    functions = tuple(_function(i, tool) for i, tool in enumerate(given))
    kinds = zip(functions, body.tools, strict=True)
    custom = frozenset(function.name for function, tool in kinds if tool.get("type") == "custom")
    if mapping(choice).get("type") == "allowed_tools":
        choice, names = _allowed(choice, functions)
        kept = [i for i, function in enumerate(functions) if function.name in names]
        given, functions = [given[i] for i in kept], tuple(functions[i] for i in kept)
    demanded: tuple[Function, ...] = ()
    parallel = body.parallel_tool_calls
    if choice == "required":
        demanded = functions
    elif choice not in (None, "auto"):
        name = _chosen(choice)
        demanded = tuple(function for function in functions if function.name == name)[:1]
        if not demanded:
            raise invalid(f"tool_choice: no tool has the name {name!r}", "tool_choice")
        parallel = False  # a function by name is called once, as in OpenAI's API
    return Tools(given, functions, demanded, custom, parallel)


def _function(i: int, tool: dict[str, Any]) -> Function:
    try:
        return Tool.model_validate(tool).function
    except ValidationError as error:
        raise refused(error, f"tools.{i}") from None


def _allowed(choice: Any, functions: Sequence[Function]) -> tuple[str, set[str]]:
    """The mode of `allowed_tools` and the names of these: the model hears of no others."""
    param = "tool_choice.allowed_tools"
    fields = mapping(mapping(choice).get("allowed_tools"))
    mode, tools = fields.get("mode"), fields.get("tools")
    tools = cast("list[Any]", tools) if isinstance(tools, list) else []
    names = {_chosen(tool) for tool in tools}
    if mode not in ("auto", "required") or not names:
        raise invalid(f"{param}: needs a mode, auto or required, and tools", param)
    unknown = sorted(names - {function.name for function in functions})
    if unknown:
        raise invalid(f"{param}: no tool has the name {unknown[0]!r}", param)
    return mode, names


def _chosen(choice: Any) -> str:
    fields = mapping(choice)
    kind = str(fields.get("type"))
    name = mapping(fields.get(kind)).get("name")
    if kind not in ("function", "custom") or not isinstance(name, str):
        message = "tool_choice: must be none, auto, required, allowed_tools or a tool by name"
        raise invalid(message, "tool_choice")
    return name


def detected(template: str) -> CallFormat:
    """The format of a model's calls, by its chat template; "hermes" if the template has no sign.

    A required call follows a grammar. So even a model that does not know tools keeps to the format.
    """
    for sign, form in SIGNS:
        if sign in template:
            return form
    return "hermes"


def parser(form: CallFormat, tools: Tools) -> Parser:
    """A parser that takes the calls out of an answer."""
    if form == "none" or not (tools.functions or form == "harmony"):
        return Plain()
    names = [function.name for function in tools.functions]
    calls: Calls = Hermes()
    if form == "llama3":
        calls = Llama3(names)
    elif form == "glm":
        calls = Bare(names)
    elif form == "harmony":
        calls = Harmony()
    elif form != "hermes":
        num = 2 if form in ("granite", "phi") else 1
        closes = () if form.startswith("mistral") else MARKS[form][num:]
        calls = Marked(MARKS[form][:num], closes, python=form == "gemma")
    return calls if tools.parallel else FirstCallOnly(calls)


def call_rules(
    form: CallFormat, tools: Tools, symbol: Callable[[str], str], bounds: Bounds
) -> tuple[list[tuple[str, Part]], list[str]]:
    """Grammars and lark rules of `calls`: of the demanded functions if there are any, else of all.

    symbol: of a mark in a grammar, as a token or a text. Raises an ApiError if the model has no
    format for calls, or one that cannot be demanded yet (harmony).
    """
    if form in ("none", "harmony"):
        message = "no format of tool calls is known for this model (router.tool_parser)"
        raise invalid(f"tool_choice: {message}", "tool_choice")
    key = "parameters" if form == "llama3" else "arguments"
    parts: list[tuple[str, Part]] = []
    rules: list[str] = []
    for i, function in enumerate(tools.demanded or tools.functions):
        schema = {"type": "object", **function.parameters}
        if set(schema) <= WITHOUT_NAMES:  # a function without parameters, as in OpenAI's API
            schema["properties"] = {}
        part = schema_part(schema, "tools", bounds, lenient=not function.strict)
        parts.append((f"arguments_{i}", part))
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        rule = f'{quoted(head)} @arguments_{i} "}}"'
        if form == "glm":
            rule = f"{quoted(function.name + chr(10))} @arguments_{i}"
        elif form == "mistral11":
            rule = f"{symbol('[TOOL_CALLS]')} {quoted(function.name)} {symbol('[ARGS]')}"
            rule += f" @arguments_{i}"
        rules.append(f"object_{i}: {rule}")
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(parts))))
    call, between, first, last = "object", quoted("; "), "", ""
    if form == "hermes":
        opened, closed = symbol(CALL), symbol(CALL_END)
        call, between = f'{opened} "\\n" object "\\n" {closed}', quoted("\n")
    elif form == "mistral11":
        between = ""
    elif form in ("mistral", "granite", "phi"):
        between, first, last = quoted(", "), f'{symbol(MARKS[form][0])} "[" ', ' "]"'
    elif form == "gemma":
        between, last = quoted("\n"), f" {quoted(chr(10) + MARKS[form][1])}"
        first = f"{quoted(MARKS[form][0] + chr(10))} "
    rules.append(f"call: {call}")
    most = bounds.max_calls if tools.parallel and form != "glm" else 1
    more = f"{{0,{most - 1}}}" if most else "*"
    several = "" if most == 1 else f" ({between} call){more}"
    rules.append(f"calls: {first}call{several}{last}")
    return parts, rules
