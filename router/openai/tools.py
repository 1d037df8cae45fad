"""Tools: the functions that a chat may call, and the grammar of a call."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import Field, ValidationError

from router.errors import invalid
from router.openai.reading import RequestModel, mapping, refused
from router.openai.schema import ChatBody
from router.text.bounded import Bounds
from router.text.grammar import Part, quoted, schema_part
from router.text.parsers import CALL, CALL_END, FirstCallOnly, Hermes, Llama3, Parser, Plain

# Keys of `parameters` that say nothing of what parameters there are.
WITHOUT_NAMES = frozenset({"type", "title", "description", "required", "$schema", "$defs"})

CallFormat = Literal["hermes", "llama3", "none"]


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
    parallel: bool = True


def tools_of(body: ChatBody) -> Tools:
    """The tools of a request, none if tool_choice forbids calls. Bad ones raise an ApiError."""
    choice = body.tool_choice
    if choice == "none" or (not body.tools and choice in (None, "auto")):
        return Tools([])
    if not body.tools:
        raise invalid("tool_choice needs tools", "tool_choice")
    functions = tuple(_function(i, tool) for i, tool in enumerate(body.tools))
    given = body.tools
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
    return Tools(given, functions, demanded, parallel)


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
    name = mapping(fields.get("function")).get("name")
    if fields.get("type") != "function" or not isinstance(name, str):
        message = "tool_choice: must be none, auto, required, allowed_tools or a function by name"
        raise invalid(message, "tool_choice")
    return name


def detected(template: str) -> CallFormat:
    """The format of a model's calls, by its chat template; "hermes" if the template has no sign.

    A required call follows a grammar. So even a model that does not know tools keeps to the format.
    """
    if CALL in template:
        return "hermes"
    return "llama3" if "<|python_tag|>" in template or "ipython" in template else "hermes"


def parser(form: CallFormat, tools: Tools) -> Parser:
    """A parser that takes the calls out of an answer."""
    if form == "none" or not tools.functions:
        return Plain()
    names = [function.name for function in tools.functions]
    calls = Hermes() if form == "hermes" else Llama3(names)
    return calls if tools.parallel else FirstCallOnly(calls)


def call_rules(
    form: CallFormat, tools: Tools, is_token: Callable[[str], bool], bounds: Bounds
) -> tuple[list[tuple[str, Part]], list[str]]:
    """Grammars and lark rules of `calls`: of the demanded functions if there are any, else of all.

    Raises an ApiError if the model has no format for calls.
    """
    if form == "none":
        message = "no format of tool calls is known for this model (router.tool_parser)"
        raise invalid(f"tool_choice: {message}", "tool_choice")
    key = "arguments" if form == "hermes" else "parameters"
    parts: list[tuple[str, Part]] = []
    rules: list[str] = []
    for i, function in enumerate(tools.demanded or tools.functions):
        schema = {"type": "object", **function.parameters}
        if set(schema) <= WITHOUT_NAMES:  # a function without parameters, as in OpenAI's API
            schema["properties"] = {}
        part = schema_part(schema, "tools", bounds, lenient=not function.strict)
        parts.append((f"arguments_{i}", part))
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        rules.append(f'object_{i}: {quoted(head)} @arguments_{i} "}}"')
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(parts))))
    if form == "llama3":
        call, between = "object", quoted("; ")
    else:
        opened, closed = (mark if is_token(mark) else quoted(mark) for mark in (CALL, CALL_END))
        call, between = f'{opened} "\\n" object "\\n" {closed}', quoted("\n")
    rules.append(f"call: {call}")
    most = bounds.max_calls if tools.parallel else 1
    more = f"{{0,{most - 1}}}" if most else "*"
    rules.append("calls: call" if most == 1 else f"calls: call ({between} call){more}")
    return parts, rules
