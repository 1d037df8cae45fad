"""A model's chat template, run in jinja2's sandbox with the names that Hugging Face defines."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.probe import Probe, probed
from worker.errors import UserError

COUNTED = "_counted"  # a name of templates: `_limited_turns`
MAX_TURNS = 1_000_000  # of all loops of a template for one prompt; a second, at most


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """Counts the turns of `for` loops: the only way a template could run on and on."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Call(nodes.Name(COUNTED, "load"), [loop.iter], [], None, None)
            loop.iter.set_lineno(loop.lineno).set_environment(self)
        return template


def _limited_turns() -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Passes on what loops of one prompt run over; raises TemplateError beyond MAX_TURNS."""
    turns = iter(range(MAX_TURNS))

    def counted(values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            if next(turns, None) is None:
                raise jinja2.TemplateError(f"more than {MAX_TURNS} turns of loops")
            yield value

    return counted


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A model's chat template, run in jinja2's sandbox with the names that Hugging Face defines.

    `special` has bos_token and the like, by name.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
        now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
        names = {"raise_exception": _raise, "strftime_now": now}
        self._special = dict(special)
        self._template = environment.from_string(source, globals=names)
        self.source = source

    @cached_property
    def probe(self) -> Probe:
        """What it makes of calls; tried when it is asked for first."""
        return probed(self.render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt of a chat; raises a UserError if the template refuses these messages."""
        names: dict[str, Any] = {"documents": None} | self._special
        names |= dict(extra or {}) | {"tools": list(tools) or None}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        names[COUNTED] = _limited_turns()
        try:
            return self._template.render(names)
        except Exception as error:  # a template is a program: it may raise anything
            raise UserError(f"the chat template refused: {error}", "messages") from error
