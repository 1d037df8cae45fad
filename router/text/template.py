"""Chat templates of models, run in jinja2's sandbox with the names that Hugging Face defines."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from router.text.probe import Probe, probed
from router.text.writing import CountingEnvironment, to_json, within
from worker.config.checkpoint.fields import Fields, is_list, read_fields
from worker.errors import KvlaneError, UserError

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates
FILE = "chat_template.jinja"
OLDER_FILES = ("chat_template.json", "processor_config.json")  # of multimodal models
OTHERS = "additional_chat_templates/*.jinja"
FILES = (FILE, *OLDER_FILES, OTHERS)
BILLING = re.compile(r"\A(?:x-anthropic-[\w-]+:.*(?:\n|\Z))+")
MAX_CHARS = 1 << 25  # of a prompt, if nobody says how many


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        return caller()


class AsWritten(dict[str, str]):
    """A call's arguments that are no JSON object: where a template writes them as JSON or as text,
    this is `text` itself; where it writes them one by one, there is one, `arguments`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(arguments=text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's, whose options templates also give by their place."""
    if isinstance(value, AsWritten):
        return value.text
    how = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
    return to_json(value, indent, **how)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One template; `special` has bos_token and the like, by name. It is tried at once: `probe`.

    max_chars: of a prompt.
    """

    def __init__(self, source: str, special: Mapping[str, str], max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        environment = CountingEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
        now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
        names = {"raise_exception": _raise, "strftime_now": now}
        self._special = dict(special)
        self._template = environment.from_string(source, globals=names)
        self.source = source
        self.probe = probed(self.render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt of a chat; raises a UserError if the template refuses these messages, TooMuch
        if it writes too much of them, and `Slow`.

        Tools are given as they are; to a template that refuses them, with what they leave out.
        """
        names: dict[str, Any] = {"documents": None} | self._special
        names |= dict(extra or {}) | {"tools": list(tools) or None}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._rendered(names)
        except KvlaneError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            if tools and (filled := [_filled(tool) for tool in tools]) != names["tools"]:
                with suppress(Exception):
                    return self._rendered(names | {"tools": filled})
            raise UserError(f"the chat template refused: {error}", "messages") from error

    def _rendered(self, names: Mapping[str, Any]) -> str:
        return within(self._max_chars, lambda: self._template.render(names))


def _filled(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with all that OpenAI's API lets a client leave out, and some templates do not."""
    given: Any = tool.get("function")
    if not isinstance(given, dict):
        return dict(tool)
    function: dict[str, Any] = {"description": "", "parameters": dict[str, Any]()}
    function |= cast("dict[str, Any]", given)
    if isinstance(function["parameters"], dict):
        empty = {"type": "object", "properties": dict[str, Any]()}
        function["parameters"] = empty | cast("dict[str, Any]", function["parameters"])
    return {**tool, "function": function}


class Templates:
    """A model's chat templates: one for all chats, or another for those with tools.

    `sources`: by name. Raises a UserError if one that is used is no template.
    """

    def __init__(
        self, sources: Mapping[str, str], special: Mapping[str, str], max_chars: int = MAX_CHARS
    ) -> None:
        alone = next(iter(sources)) if len(sources) == 1 else ""
        self._names = ", ".join(sorted(sources))
        plain, tools = (sources.get(name, sources.get(alone)) for name in (DEFAULT, WITH_TOOLS))
        self._plain = None if plain is None else ChatTemplate(plain, special, max_chars)
        self._with_tools = self._plain
        if tools is not None and tools != plain:
            self._with_tools = ChatTemplate(tools, special, max_chars)
        self.source = "\n".join(dict.fromkeys(filter(None, (plain, tools))))

    @property
    def probe(self) -> Probe:
        """What the template of chats with tools makes of calls."""
        return Probe() if self._with_tools is None else self._with_tools.probe

    def of(self, *, tools: bool) -> ChatTemplate:
        """The template of a chat with or without tools; raises a UserError if there is none."""
        template = self._with_tools if tools else self._plain
        if template is not None:
            return template
        reason = "no chat template; use /v1/completions"
        if self._names:
            reason = f"no default among its chat templates ({self._names}): name one {DEFAULT}"
        raise UserError(f"this model has {reason}", "messages")


def read_templates(directory: Path, config: Fields) -> dict[str, str]:
    """The sources of a model's chat templates by name. config: tokenizer_config.json.

    As in transformers 5.24 a default among files of their own counts alone; where they have none,
    the other files' count beside them. Raises a UserError for what is no template by its form.
    """
    own = [(path.stem, path) for path in sorted(directory.glob(OTHERS))]
    if (directory / FILE).is_file():
        own.insert(0, (DEFAULT, directory / FILE))
    found = {name: path.read_text(encoding="utf-8") for name, path in own}
    if DEFAULT in found:
        return found
    named = _named(config)
    for path in (directory / name for name in OLDER_FILES):
        if not named and path.is_file():
            named = _named(read_fields(path))
    return named | found


def _named(fields: Fields) -> dict[str, str]:
    """What a file has as `chat_template`: one, or several by name."""
    value: Any = fields.get("chat_template") or {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if is_list(value) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, dict):
        named = cast("dict[Any, Any]", value)
        if all(isinstance(text, str) for pair in named.items() for text in pair):
            return named
    raise fields.error("chat_template", "must be a text, or texts by their names")


def billless(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A system prompt without the lines at its head that Claude Code writes for who bills it.

    They differ in each request, so that no prompt would be found in a cache.
    """
    if isinstance(content, str):
        return BILLING.sub("", content)
    first = BILLING.sub("", content[0]["text"]) if content else ""
    return [{**content[0], "text": first}, *content[1:]] if first else content[1:]


def text_of_parts(parts: Sequence[Mapping[str, Any]], param: str) -> str:
    """The text of `parts`, the content of a message; a UserError for `param` if one is not text."""
    return "\n".join(part["text"] for part in text_parts(parts, param))


def text_parts(parts: Sequence[Mapping[str, Any]], param: str) -> list[dict[str, Any]]:
    """The same parts, refusals as texts; raises as `text_of_parts`."""
    texts: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") not in ("text", "refusal"):
            message = f"content parts of type {part.get('type')!r} are not supported"
            raise UserError(message, param)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise UserError("a content part of type text needs a string in `text`", param)
        texts.append({**part, "type": "text", "text": text})
    return texts
