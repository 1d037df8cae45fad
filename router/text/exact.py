"""Integers that are no doubles, which is what llguidance takes numbers of JSON schemas for.

Bounds move inward. Where a `const` or an `enum` has such an integer, lark rules write what stands
around it, and llguidance gets the rest of the schema.
"""

import json
import math
from decimal import Decimal
from typing import Any, cast

from router.text.bounded import MAX_WORK
from router.text.forms.schema import (
    NAMED,
    Schema,
    at,
    kind_of,
    kinds_listed,
    listed,
    names_listed,
    number_of,
    resolved,
    values_listed,
)

EXACT = 1 << 53  # from here on not every integer is a double
EDGE = (1 << 63) - (1 << 10)  # the widest bound that llguidance takes, as a double
OPEN_ENDED = 10**18  # of a bound from here on it needs the other one, too
SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
BOUNDS = frozenset(name for *names, _ in SIDES for name in names)
# Keywords that constrain nothing; their values are no schemas.
SILENT = frozenset({
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
    "writeOnly", "$schema", "$id", "id", "$defs", "definitions", "x-guidance",
})  # fmt: skip
START, OPTIONS = "start", "x-guidance"


class Unkept(ValueError):
    """The path of what no grammar keeps to, and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)


def mend_bounds(schema: Schema, path: str) -> None:
    """Move bounds to doubles within; a range of integers without any becomes an `enum`.

    Raises Unkept if nothing that llguidance can count to is within them.
    """
    numbers = [number_of(schema[key]) for key in BOUNDS if key in schema]
    if not any(number is not None and abs(number) >= EXACT for number in numbers):
        return
    whole = kinds_listed(schema) & {"integer", "number"} == {"integer"}
    (low, lowest), (high, highest) = (_bound(schema, path, side, whole=whole) for side in SIDES)
    given = {key: schema.pop(key) for key in BOUNDS & set(schema)}
    if lowest[1] <= highest[1]:
        is_far = max(lowest[1], -highest[1]) >= OPEN_ENDED  # llguidance needs both sides then
        schema |= dict([lowest] if is_far or low > -math.inf else [])
        schema |= dict([highest] if is_far or high < math.inf else [])
    elif whole and low <= high and not {"multipleOf", "enum", "const"} & set(schema):
        schema["enum"] = [*range(int(low), int(high) + 1)]
    else:
        raise Unkept(at(path, sorted(given)[0]), "there is no number within these bounds")


def _bound(
    schema: Schema, path: str, side: tuple[str, str, int], *, whole: bool
) -> tuple[int | float, tuple[str, int | float]]:
    """A bound of one side, and its keyword and value as a double; none is infinite."""
    inclusive, exclusive, sign = side  # with the sign the bound is a lower one
    given = [(number_of(schema.get(inclusive)), schema.get(exclusive) is True)]
    given.append((number_of(schema.get(exclusive)), True))
    own = [(sign * number, strict) for number, strict in given if number is not None]
    bound, strict = max(own, default=(-math.inf, False))
    if whole and own:
        bound, strict = (math.floor(bound) + 1 if strict else math.ceil(bound)), False
    if bound > EDGE:
        raise Unkept(at(path, inclusive), f"grammars count from -{EDGE} to {EDGE}")
    within = max(bound, -EDGE)
    near = float(within)
    while min(near, near if whole else _written(near)) < within:
        near = math.nextafter(near, math.inf)
    kept = sign * (int(near) if near.is_integer() else near)
    return sign * bound, (exclusive if strict and near == bound else inclusive, kept)


def _written(near: float) -> float | Decimal:
    """A bound of a `number` as llguidance writes it: as few digits as tell the double apart."""
    return near if abs(near) < EXACT else Decimal(repr(near))


def exact_part(schema: Schema) -> str | None:
    """Lark rules of a closed `schema` that lists integers which are no doubles; None: it does not.

    Raises Unkept where they stand in what these rules cannot say.
    """
    made = _Exact(schema)
    if not made.holds(schema):
        return None
    return "\n".join([f"{START}: {made.node(schema, '')}", *made.rules])


class _Exact:
    """Makes the rules. What has no such integer stays a schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work = 0
        self._names: dict[int, str] = {}  # of rules, by ids of what is referred to in `root`
        self._leaves: dict[str, str] = {}
        self.rules: list[str] = []

    def holds(self, schema: Any) -> bool:
        """Whether such an integer stands in a schema, or in what it refers to."""
        todo, seen = [schema], set[int]()
        while todo:
            one = todo.pop()
            if not isinstance(one, dict | list) or id(cast("object", one)) in seen:
                continue
            seen.add(id(cast("object", one)))
            self._work += 1
            if self._work > MAX_WORK:
                raise Unkept("", "too large for integers beyond 2^53")
            if isinstance(one, list):
                todo += cast("list[Any]", one)
                continue
            given = cast("Schema", one)
            if any(map(_is_inexact, values_listed(given))):
                return True
            for key, inner in given.items():
                if key in NAMED and key not in SILENT and isinstance(inner, dict):
                    todo += cast("Schema", inner).values()
                elif key not in SILENT | {"enum", "const"}:
                    todo.append(inner)
            todo += [resolved(given, self._root)] if "$ref" in given else []
        return False

    def node(self, schema: Any, path: str) -> str:
        """What a value of `schema` is in a rule."""
        if not self.holds(schema):
            return self._leaf(schema)
        given = cast("Schema", schema)
        says = set(given) - SILENT
        if values_listed(given):
            return self._values(given, says, path)
        if says == {"$ref"}:
            return self._referred(resolved(given, self._root), path)
        if says == {"anyOf"}:
            ways = enumerate(listed(given["anyOf"]))
            return "(" + " | ".join(self.node(x, at(path, "anyOf", str(i))) for i, x in ways) + ")"
        if says == {"allOf"} and len(given["allOf"]) == 1:
            return self.node(given["allOf"][0], at(path, "allOf", "0"))
        kinds = kinds_listed(given)
        null = '| "null"' if "null" in kinds else ""
        if kinds - {"null"} == {"array"} and says <= {"type", "items", "minItems", "maxItems"}:
            return f"({self._array(given, path)} {null})"
        shown = {"type", "properties", "required", "additionalProperties"}
        closed = given.get("additionalProperties") is False
        if kinds - {"null"} == {"object"} and says <= shown and closed:
            return f"({self._object(given, path)} {null})"
        beside = ", ".join(sorted(says))
        raise Unkept(path, f"an integer beyond 2^53 is listed within {beside}: no grammar has it")

    def _rule(self, body: str, name: str = "") -> str:
        name = name or f"x{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _leaf(self, schema: Any) -> str:
        if schema is True or schema is False:
            schema = {} if schema else {"enum": []}
        whole = {**schema, OPTIONS: self._root.get(OPTIONS, {})}
        whole |= {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        text = json.dumps(whole)
        if text not in self._leaves:
            self._leaves[text] = self._rule(f"%json {text}")
        return self._leaves[text]

    def _referred(self, schema: Any, path: str) -> str:
        key = id(cast("object", schema))
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            body = self.node(schema, path)
            self._rule(body, self._names[key])
        return self._names[key]

    def _values(self, schema: Schema, says: set[str], path: str) -> str:
        other = says - {"enum", "const", "type"} - BOUNDS
        if other:
            words = f"a list with an integer beyond 2^53 beside {sorted(other)[0]}"
            raise Unkept(path, f"{words}: no grammar has it")
        found = [value for value in values_listed(schema) if _fits(value, schema)]
        if not found:
            raise Unkept(path, "no value fits")
        return "(" + " | ".join(_quoted(value) for value in found) + ")"

    def _array(self, schema: Schema, path: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._rule(self.node(schema["items"], at(path, "items")))
        if most == 0:
            return '"[]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){more}' if most != 1 else item
        return f'"[" ({some}){"" if least else "?"} "]"'

    def _object(self, schema: Schema, path: str) -> str:
        """Properties in their order: rules of all from the i-th on, behind others and first."""
        behind, first = '""', '""'
        for name, own in reversed(cast("Schema", schema.get("properties", {})).items()):
            is_needed = name in names_listed(schema)
            if own is False and not is_needed:
                continue
            value, rest = self.node(own, at(path, "properties", name)), self._rule(behind)
            one = f"{_quoted(name, ':')} {value} {rest}"
            behind = f'"," {one}' + ("" if is_needed else f" | {rest}")
            first = one + ("" if is_needed else f" | {self._rule(first)}")
        return f'"{{" {self._rule(first)} "}}"'


def _is_inexact(value: Any) -> bool:
    """Whether llguidance takes an integer in `value` for another one."""
    if isinstance(value, dict | list):
        inner = (
            cast("Schema", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        )
        return any(map(_is_inexact, inner))
    if not isinstance(value, int) or abs(value) < EXACT:
        return False
    return abs(value) > 1 << 1000 or int(float(value)) != value or value <= -(1 << 63)


def _fits(value: Any, schema: Schema) -> bool:
    """Whether a listed value has the type and is within the bounds of `schema`."""
    kinds, number = kinds_listed(schema), number_of(value)
    own = [kind_of(value), *(["number"] if number is not None else [])]
    own += ["integer"] if isinstance(value, float) and value.is_integer() else []
    if kinds and kinds.isdisjoint(own):
        return False
    if number is None:
        return True
    for inclusive, exclusive, sign in SIDES:
        least, more = number_of(schema.get(inclusive)), number_of(schema.get(exclusive))
        more = least if schema.get(exclusive) is True else more
        if least is not None and sign * number < sign * least:
            return False
        if more is not None and sign * number <= sign * more:
            return False
    return True


def _quoted(value: Any, behind: str = "") -> str:
    """A value as JSON in a string of a lark grammar."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + behind
    return json.dumps(text, ensure_ascii=False)
