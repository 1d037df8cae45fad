"""JSON schemas in words that llguidance keeps to; what it lacks is told by its path.

It takes numbers for doubles, has no look-around and no back-references in patterns, some formats,
no `oneOf` of values that may fit twice, and no bounds on how many optional properties there are.
Here this is said otherwise where it can be (an output then fits the schema as it was given), and
else left out and told, or refused.
"""

import re
from collections.abc import Callable
from itertools import combinations, islice
from typing import Any, NamedTuple, cast

from router.text.exact import Unkept, mend_bounds
from router.text.forms.schema import (
    CONDITIONS,
    GROUPS,
    Schema,
    at,
    kind_of,
    kinds_listed,
    listed,
    mapping,
    names_listed,
    resolved,
    values_listed,
    with_inner,
)
from router.text.trial import TOO_MUCH

# Keywords that no grammar keeps to, and values that are no constraint.
UNREAD: Schema = {
    "not": False, "contains": None, "minContains": 0, "maxContains": None, "uniqueItems": False,
    "if": None, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {},
    "unevaluatedItems": True, "$dynamicRef": None, "$recursiveRef": None,
}  # fmt: skip
ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
# Formats of JSON Schema itself. Others are somebody's own names, which say no more than a pattern.
STANDARD = FORMATS | {
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
_DAY = (
    r"^(?:[0-9]{4}-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]"
    r"|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_MINUTE = "[0-9]{2}:[0-9]{2}:[0-5]"
# What llguidance's formats allow too much: 29 February of any year, and leap seconds of any minute.
BESIDE = {"date": [_DAY], "date-time": [_DAY, f"^.{{11}}{_MINUTE}"], "time": [f"^{_MINUTE}"]}
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_WAYS = 64  # of choosing properties
MAX_PATTERNS = 512  # that are tried
MAX_DEPTH, MAX_WORK = 4, 1 << 14  # of schemas that are compared
_SETS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)

# Says of a schema why llguidance cannot read it; empty: it can.
Tried = Callable[[Schema], str]


class Kept(NamedTuple):
    """A schema in llguidance's words, and the paths of what it does not keep to."""

    schema: Schema
    told: list[str]


def kept(schema: Schema, tried: Tried, *, strict: bool) -> Kept:
    """A copy of `schema`; raises Unkept: if strict, for what would be told, and for numbers."""
    keeper = _Keeper(schema, tried, strict=strict)
    return Kept(keeper.copy(schema, ""), keeper.told)


def readable(pattern: str) -> str:
    """A pattern of JavaScript's as Rust's, which has sets of characters within sets."""

    def literal(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] != "[":
            return text
        start = 2 if text[1] == "^" else 1
        inner = re.sub(
            r"\\.|[\[&~]", lambda c: c[0] if len(c[0]) > 1 else "\\" + c[0], text[start:-1]
        )
        return text[:start] + inner.replace("--", r"-\-") + "]"

    return _SETS.sub(literal, pattern)


def own_format(form: str, pattern: Any) -> bool:
    """Whether a format is somebody's own name for what a pattern beside it says, as zod's are."""
    return form not in STANDARD and isinstance(pattern, str)


class _Keeper:
    """Copies one schema, the innermost first."""

    def __init__(self, root: Schema, tried: Tried, *, strict: bool) -> None:
        self._root, self._tried, self._strict = root, tried, strict
        self._work = 0  # schemas that were compared
        self._known: dict[str, bool] = {}  # whether llguidance lacks a pattern
        self.told: list[str] = []

    def copy(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        given = cast("Schema", schema)
        copy = with_inner(given, lambda one, key, name: self.copy(one, at(path, key, name)))
        for key, nothing in UNREAD.items():
            if key in given and given[key] == nothing:
                del copy[key]
            elif key in given:
                self._tell(path, key)
        for key in ANCHORS if "if" in given else (*ANCHORS, *CONDITIONS):
            copy.pop(key, None)
        for key in SIZES:
            if isinstance(given.get(key), float) and given[key].is_integer():
                copy[key] = int(given[key])
        self._names(copy, path)
        self._texts(copy, path)
        mend_bounds(copy, path)
        self._count(copy, path)
        self._one_of(given, copy, path)
        return copy

    def _tell(self, path: str, key: str, why: str = "no grammar keeps to it") -> None:
        where = at(path, key)
        if self._strict:
            raise Unkept(where, f"{why}; leave it out, or ask without strict")
        self.told.append(where)

    def _texts(self, copy: Schema, path: str) -> None:
        """Patterns and formats."""
        pattern, form = copy.get("pattern"), copy.get("format")
        kinds = kinds_listed(copy)
        if kinds and "string" not in kinds:  # neither is a constraint then
            copy.pop("pattern", None)
            copy.pop("format", None)
            return
        if isinstance(pattern, str):
            copy["pattern"] = readable(pattern)
            if self._lacks(copy["pattern"], at(path, "pattern")):
                del copy["pattern"]
                self._tell(path, "pattern")
        if not isinstance(form, str):
            return
        if form not in FORMATS:
            del copy["format"]
            if not own_format(form, copy.get("pattern")):
                self._tell(path, "format", f"no grammar knows the format {form[:40]!r}")
        elif "pattern" in copy and self._tried(
            {"type": "string", **{k: copy[k] for k in ("pattern", "format")}}
        ):
            del copy["format"]  # both at once are too much, or contradict each other
            self._tell(path, "format", "no grammar has this format beside this pattern")
        elif form in BESIDE and "pattern" not in copy:
            more = [{"pattern": beside} for beside in BESIDE[form]]
            copy["allOf"] = [*listed(copy.get("allOf")), *more]

    def _lacks(self, pattern: str, path: str) -> bool:
        """Whether llguidance cannot read a pattern; raises Unkept if it takes too long."""
        if pattern not in self._known:
            if len(self._known) == MAX_PATTERNS:
                raise Unkept(path, f"at most {MAX_PATTERNS} patterns may be in a schema")
            why = self._tried({"type": "string", "pattern": pattern})
            if why == TOO_MUCH:
                raise Unkept(path, why)
            self._known[pattern] = bool(why)
        return self._known[pattern]

    def _names(self, copy: Schema, path: str) -> None:
        """Names of properties: `propertyNames`, `patternProperties`, `required`."""
        if "propertyNames" in copy:
            self._property_names(copy, path)
        if copy.get("unevaluatedProperties") is False:
            del copy["unevaluatedProperties"]  # so it is closed by all that it names
        elif "unevaluatedProperties" in copy:
            if copy.pop("unevaluatedProperties") not in (True, {}):
                self._tell(path, "unevaluatedProperties")
            copy.setdefault("additionalProperties", True)
        patterns: Any = copy.get("patternProperties")
        if isinstance(patterns, dict):
            patterns = cast("Schema", patterns)
            mended = {readable(name): own for name, own in patterns.items()}
            lacking = [name for name in mended if self._lacks(name, at(path, "patternProperties"))]
            for name in lacking:
                copy.setdefault("additionalProperties", mended.pop(name))
                self._tell(at(path, "patternProperties"), name)
            copy["patternProperties"] = mended
        if copy.get("additionalProperties") is False:
            self._required(copy, path)

    def _required(self, copy: Schema, path: str) -> None:
        """Names that are required and yet forbidden: no output has them."""
        known: Any = copy.get("properties", {})
        patterns = copy.get("patternProperties")
        if not isinstance(known, dict) or patterns or any(key in copy for key in (*GROUPS, "$ref")):
            return
        missing = [name for name in names_listed(copy) if name not in known]
        if missing:
            copy["required"] = [name for name in names_listed(copy) if name in known]
            self._tell(
                path, "required", f"{str(missing[0])[:40]!r} is no property, and no other may be"
            )

    def _property_names(self, copy: Schema, path: str) -> None:
        names: Any = copy.pop("propertyNames")
        if names in (True, {}) or not isinstance(names, dict):
            return
        names = cast("Schema", names)
        says = set(names) - {"type", "title", "description", "$comment"}
        if not says and "string" in (kinds_listed(names) or {"string"}):
            return
        more = copy.get("additionalProperties", True)
        alone = not copy.get("properties") and not copy.get("patternProperties")
        values = values_listed(names)
        if (
            alone
            and says <= {"enum", "const"}
            and values
            and all(isinstance(v, str) for v in values)
        ):
            copy |= {"properties": dict.fromkeys(values, more), "additionalProperties": False}
        elif alone and says == {"pattern"}:
            copy |= {"patternProperties": {names["pattern"]: more}, "additionalProperties": False}
        else:
            self._tell(path, "propertyNames")

    def _count(self, copy: Schema, path: str) -> None:
        """How many properties there are, where some of the named ones are optional."""
        known: Any = copy.get("properties")
        if not isinstance(known, dict) or not known:
            return
        known, needed = cast("Schema", known), names_listed(copy)
        optional = [name for name in known if name not in needed]
        is_open = bool(copy.get("additionalProperties") or copy.get("patternProperties"))
        for key, least in (("minProperties", True), ("maxProperties", False)):
            given = copy.get(key)
            if not isinstance(given, int) or not optional:
                continue
            wanted = given - sum(name in known for name in needed)
            if not is_open and (wanted <= 0 if least else wanted >= len(optional)):
                del copy[key]
            elif is_open or not 0 <= wanted <= len(optional):
                if not is_open and not least:
                    continue  # llguidance says that nothing fits
                del copy[key]
                self._tell(path, key)
            else:
                num = wanted if least else len(optional) - wanted
                ways = list(islice(combinations(optional, num), MAX_WAYS + 1))
                self._choose(copy, path, key, ways)

    def _choose(self, copy: Schema, path: str, key: str, ways: list[tuple[str, ...]]) -> None:
        del copy[key]
        if len(ways) > MAX_WAYS:
            self._tell(path, key)
            return
        chosen: list[Schema] = [
            {"required": [*way]}
            if key == "minProperties"
            else {"properties": dict.fromkeys(way, False)}
            for way in ways
        ]
        copy["allOf"] = [*listed(copy.get("allOf")), {"anyOf": chosen}]

    def _one_of(self, given: Schema, copy: Schema, path: str) -> None:
        """`oneOf` is `anyOf` where no value fits two of its members."""
        members = listed(given.get("oneOf"))
        if not members:
            return
        shared = {"type": given["type"]} if "type" in given else {}
        found = [resolved(member, self._root) for member in members]
        whole: list[Schema] = [
            {**shared, **one, "required": names_listed(given) + names_listed(cast("Schema", one))}
            for one in found
            if isinstance(one, dict)
        ]
        alone = len(whole) == len(members) <= MAX_WAYS
        alone = alone and all(self._apart(*pair) for pair in combinations(whole, 2))
        if not alone:
            self._tell(path, "oneOf", "a value may fit two of its members")
        ways = copy.pop("oneOf")
        if "anyOf" in copy:
            copy["allOf"] = [*listed(copy.get("allOf")), {"anyOf": ways}]
        else:
            copy["anyOf"] = ways

    def _apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value fits both."""
        one, other = resolved(one, self._root), resolved(other, self._root)
        if one is False or other is False:
            return True
        self._work += 1
        is_much = depth > MAX_DEPTH or self._work > MAX_WORK
        if is_much or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        pair = cast("Schema", one), cast("Schema", other)
        values, others = map(values_listed, pair)
        if values and others and not any(value in others for value in values):
            return True
        kinds, far_kinds = map(_kinds, pair)
        if kinds and far_kinds and not kinds & far_kinds:
            return True
        if not kinds == far_kinds == {"object"}:
            return False
        for own, far in (pair, pair[::-1]):
            known, far_known = mapping(own, "properties"), mapping(far, "properties")
            is_closed = far.get("additionalProperties") is False and "patternProperties" not in far
            for name in names_listed(own):
                if name not in far_known and is_closed:
                    return True
                both = name in known and name in far_known
                if both and self._apart(known[name], far_known[name], depth + 1):
                    return True
        return False


def _kinds(schema: Schema) -> set[str]:
    """The types that a schema names or lists values of; empty: it does neither."""
    found = kinds_listed(schema) or {kind_of(value) for value in values_listed(schema)}
    return {"number" if kind == "integer" else kind for kind in found}
