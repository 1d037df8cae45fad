"""What types a tool's schema gives its arguments, for forms that write them as bare text."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

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
UNIONS = ("anyOf", "oneOf", "allOf")
_ALONE: Mapping[str, Any] = dict.fromkeys(UNIONS)  # without its members
MAX_SCHEMAS = 256  # that are looked at for one argument


def kind_of(value: Any) -> str:
    """The type of a value, as schemas call it."""
    kind = cast("type[object]", type(value))
    return _KINDS[kind]


def properties_of(root: Any) -> dict[str, Any]:
    """The schemas of the arguments of a function with the parameters `root`, by name."""
    found = dict[str, Any]()
    for schema in _same(root, root):
        given = schema.get("properties")
        for name, own in (cast("dict[str, Any]", given) if isinstance(given, dict) else {}).items():
            found.setdefault(name, own)
    return found


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """The types that a value of `schema` may have; empty: any. `root`: has its definitions."""
    kinds, narrowed = set[str](), set[str]()
    for one in _same(schema, root):
        told: Any = one.get("type")
        own = {kind for kind in listed(told) or [told] if isinstance(kind, str)}
        own = {kind_of(value) for value in _values(one)} or own
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
        if own := _values(one):
            values += own
        elif one.get("type") == "null":
            values.append(None)
        elif not any(key in one for key in UNIONS):
            return []
    if _entry(resolved(schema, root), "oneOf") and len(values) <= MAX_SCHEMAS:
        return [value for value in values if values.count(value) == 1] or values
    return values


def text_schema(schema: Any, root: Any) -> dict[str, Any]:
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


def _values(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else listed(schema.get("enum"))


def _entry(value: Any, key: str) -> Any:
    return cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None


def _same(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that it consists of, or is one of: further schemas of the same value."""
    todo, num = [schema], 0
    while todo and num < MAX_SCHEMAS:
        num += 1
        one = resolved(todo.pop(0), root)
        if not isinstance(one, dict):
            continue
        given = cast("dict[str, Any]", one)
        yield given
        for key in UNIONS:
            todo += listed(given.get(key))
