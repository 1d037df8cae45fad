"""What JSON schemas say: where others stand in them, and what types and values they give."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

Schema = dict[str, Any]

# Where schemas stand within a schema.
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
SINGLE = (
    "items", "prefixItems", "additionalItems", "contains", "additionalProperties", "propertyNames",
    "not", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
GROUPS = ("allOf", "anyOf", "oneOf")  # lists of schemas of the same value
CONDITIONS = ("if", "then", "else")  # further ones of it

_KINDS: Mapping[type[object], str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip
# Keywords that only values of one type heed; they tell the type where `type` is missing.
TELLING: Mapping[str, str] = {
    "properties": "object", "patternProperties": "object", "required": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "minLength": "string", "maxLength": "string", "format": "string",
    "minimum": "number", "maximum": "number", "multipleOf": "number",
}  # fmt: skip
TEXT = frozenset({"string"})
_ALONE: Mapping[str, Any] = dict.fromkeys(GROUPS)  # without its members
MAX_SCHEMAS = 256  # that are looked at for one argument


def kind_of(value: Any) -> str:
    """The type of a value, as schemas call it."""
    kind = cast("type[object]", type(value))
    return _KINDS[kind]


def at(path: str, *steps: str) -> str:
    """A place in a schema; `path` is empty at its root."""
    return ".".join(filter(None, (path, *steps)))


def with_inner(given: Schema, change: Callable[[Any, str, str], Any]) -> Schema:
    """A copy with what `change` makes of each schema in it, its keyword, and its name or number."""
    copy = dict(given)
    for key in NAMED:
        if key in given:
            copy[key] = {n: change(x, key, n) for n, x in mapping(given, key).items()} or given[key]
    for key in (*SINGLE, *GROUPS, *CONDITIONS):
        if key in given:
            several = [change(x, key, str(i)) for i, x in enumerate(listed(given[key]))]
            copy[key] = several or change(given[key], key, "")
    return copy


def mapping(schema: Any, key: str) -> Schema:
    """The object under a key; empty: there is none."""
    found = _entry(schema, key)
    return cast("Schema", found) if isinstance(found, dict) else {}


def names_listed(schema: Schema) -> list[str]:
    """The properties that are required."""
    return [name for name in listed(schema.get("required")) if isinstance(name, str)]


def values_listed(schema: Schema) -> list[Any]:
    """The values of `const`, or of `enum`."""
    return [schema["const"]] if "const" in schema else listed(schema.get("enum"))


def kinds_listed(schema: Schema) -> set[str]:
    """What `type` says; empty: nothing."""
    told: Any = schema.get("type")
    return {kind for kind in listed(told) or [told] if isinstance(kind, str)}


def number_of(value: Any) -> int | float | None:
    """A finite number as it is; None: it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and (isinstance(value, int) or math.isfinite(value)) else None


def properties_of(root: Any) -> Schema:
    """The schemas of the arguments of a function with the parameters `root`, by name."""
    found = Schema()
    for schema in _same(root, root):
        found = mapping(schema, "properties") | found
    return found


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """The types that a value of `schema` may have; empty: any. `root`: has its definitions."""
    kinds, narrowed = set[str](), set[str]()
    for one in _same(schema, root):
        own = {kind_of(value) for value in values_listed(one)} or kinds_listed(one)
        if one.get("nullable") is True and own:
            own.add("null")
        narrowed |= {kind for key, kind in TELLING.items() if key in one} if not own else set()
        kinds |= own
    return frozenset(kinds or narrowed)


def values_of(schema: Any, root: Any) -> list[Any]:
    """All values that a schema allows, where it lists them; empty: it does not.

    Of `oneOf`, those that stand once.
    """
    values = list[Any]()
    for one in _same(schema, root):
        if own := values_listed(one):
            values += own
        elif one.get("type") == "null":
            values.append(None)
        elif not any(key in one for key in GROUPS):
            return []
    if _entry(resolved(schema, root), "oneOf") and len(values) <= MAX_SCHEMAS:
        return [value for value in values if values.count(value) == 1] or values
    return values


def text_schema(schema: Any, root: Any) -> Schema:
    """The one of a schema's members that is of texts; empty: there are several, or none."""
    found = [one for one in _same(schema, root) if "string" in kinds_of({**one, **_ALONE}, root)]
    return found[0] if len(found) == 1 else {}


def resolved(schema: Any, root: Any) -> Any:
    """What a `$ref` to a place in `root` stands for; others as they are."""
    for _ in range(MAX_SCHEMAS):
        ref = _entry(schema, "$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema
        schema = root
        for step in ref[1:].split("/")[1:]:
            schema = _entry(schema, step.replace("~1", "/").replace("~0", "~"))
    return None


def listed(value: Any) -> list[Any]:
    """A list as it is; empty: it is none."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _entry(value: Any, key: str) -> Any:
    return cast("Schema", value).get(key) if isinstance(value, dict) else None


def _same(schema: Any, root: Any) -> Iterator[Schema]:
    """A schema and all that it consists of, or is one of: further schemas of the same value."""
    todo, num = [schema], 0
    while todo and num < MAX_SCHEMAS:
        num += 1
        one = resolved(todo.pop(0), root)
        if not isinstance(one, dict):
            continue
        given = cast("Schema", one)
        yield given
        for key in GROUPS:
            todo += listed(given.get(key))
