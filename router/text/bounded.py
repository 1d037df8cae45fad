"""JSON schemas closed and bounded, so that a model cannot write on and on.

Objects get no properties but those that their schema names, unless it says `additionalProperties`:
the schemas of most client libraries do not, and mean none. Strings and integers without a limit get
one. Free objects, free values, patterns, arrays and decimals stay as they are.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from llguidance import LLMatcher

from router.text.forms.schema import (
    CONDITIONS,
    GROUPS,
    Schema,
    kinds_listed,
    listed,
    mapping,
    names_listed,
    number_of,
    with_inner,
)

NAMING = ("properties", "patternProperties")
ALLOWING = ("additionalProperties", "unevaluatedProperties")
DEFINITIONS = ("#/$defs/", "#/definitions/")
FORMAT_CHARS = 256  # the longest text of a format with a length of its own, a host name, fits
OPEN = ".kvlane-open"  # ends the name of the copy of a definition that stays open
# Schemas looked at and names written to close others: references may multiply both. 0.2 s; the text
# of a grammar has room for a quarter of so many names.
MAX_WORK = 1 << 17


class TooLarge(ValueError):
    """A schema closed would be far larger than what was given."""


def grammar_of(schema: Schema) -> str:
    """A grammar of one schema, as llguidance reads it."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _tried(schema: Schema) -> str:
    return LLMatcher.validate_grammar(grammar_of(schema))


class Bounds(NamedTuple):
    """Limits of what a schema, or a demand for calls, leaves without one; 0 = none.

    tried: says of a schema why llguidance cannot read it, empty: it can; at any cost, by default.
    """

    max_string_chars: int
    max_integer: int
    max_calls: int = 0
    tried: Callable[[Schema], str] = _tried


class _Names:
    """The properties that some schemas of one value name."""

    def __init__(self) -> None:
        self.known: Schema = {}  # name -> true
        self.patterns: Schema = {}
        self.free = False  # one of them says what else there may be


def bounded(schema: Schema, bounds: Bounds) -> Schema:
    """A copy of `schema` that is closed and bounded; RecursionError if too deep, or TooLarge."""
    copier, done = _Copy(schema, bounds), set[str]()
    copy = copier.copy(schema)
    while todo := [ref for ref in copier.opened if ref not in done]:
        for ref in todo:
            done.add(ref)
            place, name = copier.opened[ref]
            copy[place][name + OPEN] = copier.copy(schema[place][name], closed=False)
    return copy


class _Copy:
    """Copies parts of one schema.

    Several schemas of one value (`allOf`, or `anyOf` beside `properties`) may name different
    properties of it. A closed one would forbid the properties of the others. So they stay open, and
    the schema that holds them names all of their properties and is closed.
    """

    def __init__(self, root: Schema, bounds: Bounds) -> None:
        self._root = root
        self._bounds = bounds
        self._work = 0
        self.opened: dict[str, tuple[str, str]] = {}  # definitions that are wanted open

    def copy(self, schema: Any, *, closed: bool = True, limited: bool = True) -> Any:
        if not isinstance(schema, dict):
            return schema
        given = cast("Schema", schema)
        split = self._num_parts(given) > 1

        def inner(one: Any, key: str, _: str) -> Any:
            if key in CONDITIONS:
                return self.copy(one, closed=False)
            if key not in GROUPS:
                return self.copy(one)
            # A limit of ours may contradict a limit or a pattern of another member of allOf.
            is_alone = key != "allOf" or len(listed(given[key])) == 1
            return self.copy(one, closed=closed and not split, limited=is_alone)

        copy = with_inner(given, inner)
        definition = self._definition(given.get("$ref")) if split or not closed else None
        if definition is not None:
            self.opened[given["$ref"]] = definition
            copy["$ref"] = given["$ref"] + OPEN
        if closed and not any(key in given for key in ALLOWING):
            self._close(given, copy, split=split)
        if limited:
            self._limit(copy)
        return copy

    def _num_parts(self, given: Schema) -> int:
        """How many schemas of one value may name properties of it."""
        num = len(listed(given.get("allOf"))) + sum(
            key in given for key in ("anyOf", "oneOf", "$ref")
        )
        num += any(key in given for key in CONDITIONS)
        return num + any(key in given for key in NAMING)

    def _close(self, given: Schema, copy: Schema, *, split: bool) -> None:
        if any(not isinstance(given.get(key, {}), dict) for key in NAMING):
            return  # llguidance says what is wrong
        names = _Names()
        self._collect(given, names, set()) if split else self._add_own(given, names)
        is_object = split and (names.known or names.patterns)
        self._count(len(names.known) + len(names.patterns) if split else 0)
        if names.free or not (is_object or any(key in given for key in NAMING)):
            return
        copy["properties"] = names.known | copy.get("properties", {})
        if names.patterns:
            copy["patternProperties"] = names.patterns | copy.get("patternProperties", {})
        copy["additionalProperties"] = False

    def _collect(self, schema: Any, names: _Names, seen: set[str]) -> None:
        """Add the names of `schema` and of all further schemas of the same value."""
        if not isinstance(schema, dict):
            return
        self._count(1)
        given = cast("Schema", schema)
        self._add_own(given, names)
        members = [member for key in GROUPS for member in listed(given.get(key))]
        for further in (*members, *map(given.get, CONDITIONS)):
            self._collect(further, names, seen)
        ref = given.get("$ref")
        if not isinstance(ref, str) or ref in seen:
            return
        definition = self._definition(ref)
        if definition is None:  # it stands elsewhere: nobody knows what it names
            names.free = True
            return
        seen.add(ref)
        self._collect(self._root[definition[0]][definition[1]], names, seen)

    def _count(self, num: int) -> None:
        self._work += num
        if self._work > MAX_WORK:
            raise TooLarge

    def _add_own(self, given: Schema, names: _Names) -> None:
        names.free |= any(given.get(key, False) is not False for key in ALLOWING)
        own = (*mapping(given, "properties"), *names_listed(given))
        names.known.update(dict.fromkeys(own, True))
        names.patterns.update(dict.fromkeys(mapping(given, "patternProperties"), True))

    def _definition(self, ref: Any) -> tuple[str, str] | None:
        """Where the definition stands that `ref` names, if it is one of the root's."""
        for prefix in DEFINITIONS:
            if isinstance(ref, str) and ref.startswith(prefix):
                place, name = prefix[2:-1], ref.removeprefix(prefix)
                if name in mapping(self._root, place):
                    return place, name
        return None

    def _limit(self, copy: Schema) -> None:
        kinds = kinds_listed(copy)
        if "enum" in copy or "const" in copy:
            return
        chars, most = self._bounds[:2]
        if "string" in kinds and chars and not any(key in copy for key in ("maxLength", "pattern")):
            least = FORMAT_CHARS if "format" in copy else number_of(copy.get("minLength")) or 0
            copy["maxLength"] = max(chars, least)
        if "integer" in kinds and "number" not in kinds and most:
            highest, lowest = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
            for side, other, sign in ((highest, lowest, 1), (lowest, highest, -1)):
                fits = all(sign * (number_of(copy.get(name)) or 0) < most for name in other)
                if fits and not any(name in copy for name in side):
                    copy[side[0]] = sign * most
