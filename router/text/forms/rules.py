"""The lark rules of calls in any form: what `parser` reads is what a grammar of these forces.

Arguments come in the order of the schema's properties; optional ones may be left out. What stands
as bare text between marks is anything up to its end, if the schema says no more: no form can
escape its own marks, so a value with such a one is the one thing that cannot be said.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from router.errors import ApiError, invalid
from router.text.bounded import Bounds
from router.text.forms.form import Form, Json, Pairs, Tags
from router.text.forms.schema import (
    GROUPS,
    TEXT,
    at,
    kinds_of,
    listed,
    properties_of,
    resolved,
    text_schema,
    values_of,
)
from router.text.forms.texts import patterns_of
from router.text.grammar import Part, Spelling, quoted, regex, schema_part

# Keys of `parameters` that say nothing of what parameters there are.
WITHOUT_NAMES = frozenset({"type", "title", "description", "required", "$schema", "$defs"})
CALL_ID = "call_id: /[a-zA-Z0-9]{1,9}/"
ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
MAX_MORE = 16  # arguments that no schema names; special tokens in one text
# What arguments between marks cannot be held to, all of them together and a bare text.
OF_ALL = ("anyOf", "oneOf", "if", "not", "dependentRequired", "minProperties", "maxProperties")
LOOSE = ("not", "if", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True, slots=True)
class Called:
    """A function as a grammar of calls needs it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(slots=True)
class CallRules:
    """Grammars and lark rules of `calls`, and keywords of schemas that they do not keep to."""

    parts: list[tuple[str, Part]] = field(default_factory=list[tuple[str, Part]])
    rules: list[str] = field(default_factory=list[str])
    unkept: list[str] = field(default_factory=list[str])


def rules_of(
    form: Form, functions: Sequence[Called], num_calls: int, spelling: Spelling, bounds: Bounds
) -> CallRules:
    """The rules of at most so many calls (0: any number) of `functions`.

    Raises an ApiError, 400, for a schema of which no grammar can be made.
    """
    made = _Rules(form, spelling, bounds)
    for i, function in enumerate(functions):
        made.call(i, function)
    made.rules.append("told: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    made.rule("call", spelling.literal(form.opens), "told")
    between, most = spelling.literal(form.between), 1 if form.single else num_calls
    more = f"{{0,{most - 1}}}" if most else "*"
    made.rule("more", "" if most == 1 else f"({between} call){more}", spelling.literal(form.last))
    made.rule("calls", spelling.literal(form.first), "call", "more")
    made.rules.append(CALL_ID)
    return CallRules(made.parts, made.rules, list(dict.fromkeys(made.unkept)))


class _Rules:
    """Rules of one form, as they are made."""

    def __init__(self, form: Form, spelling: Spelling, bounds: Bounds) -> None:
        self._form, self._spelling, self._bounds = form, spelling, bounds
        self._literal = spelling.literal
        self.parts: list[tuple[str, Part]] = []
        self.rules: list[str] = []
        self.unkept: list[str] = []
        self._root: Mapping[str, Any] = {}  # the parameters of the function that is at hand
        self._strict, self._path = False, ""

    def rule(self, name: str, *what: str) -> str:
        """Add a rule, of which empty parts are left out; returns its name."""
        self.rules.append(f"{name}: " + (" ".join(filter(None, what)) or '""'))
        return name

    def call(self, i: int, function: Called) -> None:
        form, style = self._form, self._form.style
        schema = {"type": "object", **function.parameters}
        if set(schema) <= WITHOUT_NAMES:  # a function without parameters, as in OpenAI's API
            schema["properties"] = {}
        self._root, self._strict = schema, function.strict
        name, self._path = f"arguments_{i}", f"tools.{function.name}"
        if isinstance(style, Json):
            arguments, ends = self._part(name, schema), ""
        else:
            arguments = self._sequence(name, schema)
            ends = style.ends if isinstance(style, Pairs) else ""
        self.rule(f"rest_{i}", arguments, self._literal(ends + form.closes))
        self.rule(f"call_{i}", quoted(function.name), self._literal(form.named), f"rest_{i}")

    def _sequence(self, name: str, schema: Mapping[str, Any]) -> str:
        """Arguments by a schema: one rule for all from the i-th on, before the first and behind."""
        style = self._form.style
        assert isinstance(style, Tags | Pairs)
        self._told(schema, *OF_ALL)
        known, needed = properties_of(schema), listed(schema.get("required"))
        known |= {key: {} for key in needed if isinstance(key, str) and key not in known}
        if isinstance(style, Pairs) and style.quote:  # templates of these sort them
            known = dict(sorted(known.items()))
        between = self._literal(style.between)
        behind = before = '""'
        if schema.get("additionalProperties") or schema.get("patternProperties"):
            more = self._argument(f"{name}_more", None, schema.get("additionalProperties"))
            behind = f"({between} {more}){{0,{MAX_MORE}}}"
            before = f"({more} {behind})?"
        root = self._path
        for i, (key, own) in reversed(list(enumerate(known.items()))):
            self._path = at(root, "properties", key)
            one = self._argument(f"{name}_{i}", key, own)
            self._path = root
            rests = self.rule(f"{name}_behind_{i + 1}", behind), f"{name}_before_{i + 1}"
            if key not in needed:
                self.rule(rests[1], before)
            before = f"{one} {rests[0]}" + (f" | {rests[1]}" if key not in needed else "")
            behind = f"{between} {one} {rests[0]}" + (f" | {rests[0]}" if key not in needed else "")
        return self.rule(name, before)

    def _argument(self, name: str, key: str | None, schema: Any) -> str:
        """An argument, whole: its name (None: any), and its value as text or otherwise."""
        style = self._form.style
        if isinstance(style, Tags):
            opens, named, closes, other = style.opens, style.named, style.closes, style.other
            other, ends = other or named, self._literal(closes)
        else:
            assert isinstance(style, Pairs)
            opens, named, closes = "", style.equals + style.quote, style.quote
            other, ends = style.equals, ""
        kinds, ways = kinds_of(schema, self._root), list[str]()
        marks_texts = isinstance(style, Tags) or bool(style.quote)
        values = values_of(schema, self._root)
        for value in values:
            if marks_texts and isinstance(value, str):
                ways.append(self._literal(named + value + closes))
            else:
                spelled = self._spelled(json.dumps(value, ensure_ascii=False))
                ways.append(f"{self._literal(other + spelled)} {ends}")
        if not values:
            is_text = marks_texts and (not kinds or "string" in kinds)
            if is_text:
                ways += self._texts(f"{name}_text", schema, named, closes)
            if not is_text or (other != named and kinds != TEXT):
                ways.append(f"{self._literal(other)} ({self._bare(name, schema)}) {ends}")
            elif "null" in kinds:
                ways.append(f"{self._literal(other + self._spelled('null'))} {ends}")
        called = ANY_NAME if key is None else quoted(key)
        return self.rule(name, self._literal(opens), called, f"({' | '.join(ways)})")

    def _bare(self, name: str, schema: Any) -> str:
        """A value that is no bare text: in JSON, or as the form spells it."""
        kinds, style = kinds_of(schema, self._root), self._form.style
        if isinstance(style, Pairs) and style.quote and (not kinds or kinds & {"object", "array"}):
            self._told(self._with_definitions(schema), "properties", "items")
            return self._free(style.quote)
        own, ways = {"boolean": ("true", "false"), "null": ("null",)}, list[str]()
        for kind, words in own.items():
            spelled = [self._spelled(word) for word in words]
            if kind in kinds and spelled != [*words]:
                ways += map(quoted, spelled)
                kinds -= {kind}
        if kinds or not ways:
            ways.append(self._part(f"{name}_value", self._with_definitions(schema)))
        return " | ".join(ways)

    def _free(self, quote: str) -> str:
        """Any value of a style that quotes strings by marks, and their keys by none."""
        if not any(rule.startswith("free: ") for rule in self.rules):
            text = f"{self._literal(quote)} {self._until('free_text', {}, quote)}"
            self.rule("free_pair", f'{ANY_NAME} ":" free')
            self.rule("free", f'{text} | /-?[0-9]{{1,18}}(\\.[0-9]{{1,18}})?/ | "true" | "false"')
            self.rules[-1] += f" | {quoted(self._spelled('null'))}"
            self.rules[-1] += (
                ' | "{" (free_pair ("," free_pair)*)? "}" | "[" (free ("," free)*)? "]"'
            )
        return "free"

    def _texts(self, name: str, schema: Any, named: str, closes: str) -> list[str]:
        """The ways of a bare text, with the marks before and behind it."""
        own, given = text_schema(schema, self._root), resolved(schema, self._root)
        if not own and isinstance(given, dict):  # what it is one of, or all of, is not tried
            self._told(cast("dict[str, Any]", given), *GROUPS, *LOOSE)
        if values := values_of(own, self._root):
            return [
                self._literal(f"{named}{one}{closes}") for one in values if isinstance(one, str)
            ]
        return [f"{self._literal(named)} {self._text(name, own, closes)}"]

    def _text(self, name: str, schema: dict[str, Any], closes: str) -> str:
        """A bare text, and the mark that ends it."""
        self._told(schema, *LOOSE)
        if isinstance(self._form.style, Tags) and self._form.style.cdata:
            short = self._until(f"{name}_short", schema, closes, r"[^<&\n]")
            long = self._until(f"{name}_long", schema, f"]]>{closes}")
            return f'({short} | "<![CDATA[" {long})'
        return self._until(name, schema, closes)

    def _until(self, name: str, schema: Mapping[str, Any], closes: str, char: str = ".") -> str:
        """A text of any characters up to the mark `closes`, and this.

        A mark that is a token in the grammar may also be spelled; then that ends the text.
        """
        least, most = (schema.get(key) for key in ("minLength", "maxLength"))
        least = least if isinstance(least, int) else 0
        limit = most if isinstance(most, int) else max(self._bounds.max_string_chars, least) or ""
        body = f"(?s:{char}{{{least},{limit}}})"
        patterns = patterns_of(schema, self._bounds.tried, partial(self._told, schema))
        bodies = [f"(?s:{pattern})" for pattern in patterns]
        bodies += [body] if least or most is not None or not patterns else []
        pieces = self._spelling.pieces(closes)
        space = pieces[0] if isinstance(pieces[0], str) and not pieces[0].strip() else ""
        first = pieces[0] if isinstance(pieces[0], str) and not space else closes
        name = name.upper()
        self.rules.append(f"{name}: " + _all(bodies, regex(first)))
        self.rules.append(f"{name.lower()}_end[lazy]: {name}")
        rest = [self._spelling.piece(piece) for piece in pieces]
        ways = " ".join((f"{name.lower()}_end", *(rest[1:] if first is pieces[0] else ())))
        if first is not pieces[0]:
            self.rules.append(f"{name}_TEXT: " + _all(bodies, regex(space)))
            ways = f"({ways} | {name}_TEXT {' '.join(rest[bool(space) :])})"
        return ways

    def _spelled(self, value: str) -> str:
        """A value of JSON as the form spells it."""
        words = ("true", "false", "null")
        return self._form.words[words.index(value)] if value in words else value

    def _with_definitions(self, schema: Any) -> dict[str, Any]:
        """A schema by itself, with what it may refer to."""
        places = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        one = resolved(schema, self._root)
        return {**places, **(cast("dict[str, Any]", one) if isinstance(one, dict) else {})}

    def _part(self, name: str, schema: dict[str, Any]) -> str:
        try:
            part = schema_part(
                schema, self._path, self._bounds, lenient=not self._strict, told=self.unkept
            )
        except ApiError as error:
            error.param = "tools"
            raise
        self.parts.append((name, part))
        return f"@{name}"

    def _told(self, schema: Mapping[str, Any], *keys: str) -> None:
        found = [at(self._path, key) for key in keys if key in schema]
        if found and self._strict:
            raise invalid(f"{found[0]}: no grammar of this form keeps to it", "tools")
        self.unkept += found


def _all(bodies: Sequence[str], end: str) -> str:
    return " & ".join(f"/{body}{end}/" for body in bodies)
