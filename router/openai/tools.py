"""Tools: the functions that a chat may call, and the grammar of a call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import Field, ValidationError, field_validator

from router.errors import invalid, unsupported
from router.openai.custom_calls import as_function
from router.openai.fields import is_hosted
from router.openai.reading import RequestModel, mapping, refused
from router.openai.schema import ChatBody
from router.text.bounded import Bounds
from router.text.forms.form import Form
from router.text.forms.free import Around, free_rules
from router.text.forms.known import HARMONY
from router.text.forms.parser import FormParser
from router.text.forms.recognise import recognised
from router.text.forms.rules import Called, CallRules, rules_of
from router.text.grammar import Spelling
from router.text.harmony import Harmony
from router.text.parsers import Calls, FirstCallOnly, Parser, Plain
from router.text.template import ChatTemplate

NO_OBJECTS = "array", "string", "number", "integer", "boolean", "null"  # other types of JSON


class Function(RequestModel):
    """A function as OpenAI describes it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")  # 64 at OpenAI's, 128 at Anthropic's
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type") in NO_OBJECTS:
            raise ValueError("must be the schema of an object: its properties are the arguments")
        return schema


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
    taken = [(f"tools.{i}", tool) for i, tool in enumerate(body.tools) if not is_hosted(tool)]
    if not taken and choice in (None, "auto"):
        return Tools([])
    given = [as_function(tool, where) for where, tool in taken]
    functions = tuple(_function(*pair) for pair in zip((w for w, _ in taken), given, strict=True))
    kinds = zip(functions, taken, strict=True)
    custom = frozenset(one.name for one, (_, tool) in kinds if tool.get("type") == "custom")
    if mapping(choice).get("type") == "allowed_tools":
        choice, names = _allowed(choice, functions)
        kept = [i for i, function in enumerate(functions) if function.name in names]
        given, functions = [given[i] for i in kept], tuple(functions[i] for i in kept)
    demanded: tuple[Function, ...] = ()
    parallel = body.parallel_tool_calls
    if choice == "required":
        demanded = functions
        if not functions:
            raise unsupported("tool_choice: none of these tools is run here", "tool_choice")
    elif choice not in (None, "auto"):
        name = _chosen(choice)
        demanded = tuple(function for function in functions if function.name == name)[:1]
        if not demanded:
            hosted = any(tool.get("name") == name for tool in body.tools if is_hosted(tool))
            problem = "is not run here" if hosted else "is the name of no tool"
            raise invalid(f"tool_choice: {name!r} {problem}", "tool_choice")
        parallel = False  # a function by name is called once, as in OpenAI's API
    return Tools(given, functions, demanded, custom, parallel)


def _function(where: str, tool: dict[str, Any]) -> Function:
    try:
        return Tool.model_validate(tool).function
    except ValidationError as error:
        raise refused(error, where) from None


def _allowed(choice: Any, functions: Sequence[Function]) -> tuple[str, set[str]]:
    """The mode of `allowed_tools` and the names of these: the model hears of no others."""
    param = "tool_choice.allowed_tools"
    fields = mapping(mapping(choice).get("allowed_tools"))
    mode, tools = fields.get("mode"), fields.get("tools")
    tools = cast("list[Any]", tools) if isinstance(tools, list) else []
    names = {_chosen(tool) for tool in tools if not is_hosted(mapping(tool))}
    if mode not in ("auto", "required") or not tools:
        raise invalid(f"{param}: needs a mode, auto or required, and tools", param)
    unknown = sorted(names - {function.name for function in functions})
    if unknown:
        raise invalid(f"{param}: no tool has the name {unknown[0]!r}", param)
    return mode, names


def _chosen(choice: Any) -> str:
    fields = mapping(choice)
    kind = str(fields.get("type"))
    name = mapping(fields.get(kind)).get("name")
    if is_hosted(fields) and kind != "allowed_tools":
        raise unsupported(f"tool_choice: tools of type {kind!r} are not run here", "tool_choice")
    if kind not in ("function", "custom") or not isinstance(name, str):
        message = "tool_choice: must be none, auto, required, allowed_tools or a tool by name"
        raise invalid(message, "tool_choice")
    return name


def detected(template: str) -> Form:
    """The form of a model's calls, by the source of its chat template; hermes where it tells none.

    A required call follows a grammar. So even a model that does not know tools keeps to the form.
    """
    made = ChatTemplate(template, {"bos_token": "", "eos_token": ""})
    return recognised(made.probe, template).form


def parser(form: Form | None, tools: Tools) -> Parser:
    """A parser that takes the calls out of an answer; None: they are not told apart."""
    if form is HARMONY:
        calls: Calls = Harmony()
    elif form is None or not tools.functions:
        return Plain()
    else:
        calls = FormParser(form, {one.name: one.parameters for one in tools.functions})
    return calls if tools.parallel else FirstCallOnly(calls)


def call_rules(
    form: Form | None, tools: Tools, spelling: Callable[[], Spelling], bounds: Bounds
) -> CallRules:
    """The rules of `calls`: of the demanded functions if there are any, else of all.

    Raises an ApiError if the model has no form of calls, or for a schema of which no grammar can
    be made.
    """
    if form is None:
        message = "no format of tool calls is known for this model (router.tool_parser)"
        raise invalid(f"tool_choice: {message}", "tool_choice")
    functions = _called(tools.demanded or tools.functions)
    return rules_of(form, functions, bounds.max_calls if tools.parallel else 1, spelling(), bounds)


def can_be_free(form: Form | None, *, begun: bool) -> bool:
    """Whether `answer_rules` has any; begun: the prompt ends within the answer.

    It has none where text of an answer has marks of its own, but for messages of harmony.
    """
    return form is not None and not form.says and not (form is HARMONY and begun)


def answer_rules(
    form: Form | None, tools: Tools, spelling: Spelling, bounds: Bounds, around: Around
) -> CallRules:
    """The rules of `answer`, text with calls of all functions.

    Raises an ApiError for a schema of which no grammar can be made.
    """
    assert form is not None
    several = tools.parallel and not form.single
    functions = _called(tools.functions)
    functions += [Called(name, {}) for name in form.silent if several]  # text comes behind them
    num = bounds.max_calls if several and (form.last or form.bare) else 1  # else all have a mark
    made = rules_of(form, functions, num, spelling, bounds)
    if form is HARMONY:
        made.rules.append("answer: final SAID | calls")
    else:
        made.rules += free_rules(form, functions, spelling, around, several=several)
    return made


def _called(functions: Iterable[Function]) -> list[Called]:
    return [Called(one.name, one.parameters, one.strict) for one in functions]
