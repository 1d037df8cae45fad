"""The constraint of an output, from the fields of a request that may ask for one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from router.errors import invalid, unsupported
from router.openai.reading import mapping
from router.openai.schema import GenerationBody
from router.text.bounded import Bounds
from router.text.grammar import Part, ebnf_part, quoted, regex_part, schema_part

FIELDS = ("json", "regex", "choice", "grammar")
NOT_BUILT = "structural_tag"  # of structured_outputs
SGLANG = (("json", "json_schema"), ("regex", "regex"), ("ebnf", "ebnf"))


class Constraint(NamedTuple):
    """One constraint of the output, and the field that asks for it."""

    part: Part
    param: str
    told: Sequence[str] = ()  # paths of what it does not keep to


def _part(kind: str, value: Any, param: str, bounds: Bounds) -> Part:
    if kind == "json":
        return schema_part(value, param, bounds)
    if kind == "choice":
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if not items or not all(isinstance(item, str) and item for item in items):
            raise invalid(f"{param}: must be a list of strings, none empty", param)
        return {"lark_grammar": "start: " + " | ".join(map(quoted, items))}
    if not isinstance(value, str) or not value:
        raise invalid(f"{param}: must be a string that is not empty", param)
    if kind == "regex":
        return regex_part(value)
    if kind == "ebnf":
        return ebnf_part(value, param)
    return {"lark_grammar": value}


def _response_format(value: dict[str, Any], bounds: Bounds) -> Constraint | None:
    param = "response_format"
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(schema_part({"type": "object"}, param, bounds), param)
    if kind != "json_schema":
        raise invalid(f"{param}.type: must be text, json_object or json_schema", f"{param}.type")
    fields = mapping(value.get("json_schema"))
    schema = fields.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"{param}.json_schema.schema: must be an object", f"{param}.json_schema")
    lenient, told = fields.get("strict") is not True, list[str]()
    return Constraint(schema_part(schema, param, bounds, lenient=lenient, told=told), param, told)


def constraint_of(body: GenerationBody, bounds: Bounds) -> Constraint | None:
    """What the output must follow, if anything; an ApiError if that is malformed or twofold."""
    constraints: list[Constraint] = []
    if body.response_format is not None:
        formed = _response_format(body.response_format, bounds)
        constraints += [] if formed is None else [formed]
    asked = body.structured_outputs or {}
    wishes = [(kind, f"guided_{kind}", getattr(body, f"guided_{kind}")) for kind in FIELDS]
    wishes += [(kind, f"structured_outputs.{kind}", asked.get(kind)) for kind in FIELDS]
    wishes += [(kind, name, getattr(body, name)) for kind, name in SGLANG]
    if asked.get("json_object"):
        wishes.append(("json", "structured_outputs.json_object", {"type": "object"}))
    for kind, param, value in wishes:
        if value is not None:
            constraints.append(Constraint(_part(kind, value, param, bounds), param))
    if asked.get(NOT_BUILT) is not None:
        param = f"structured_outputs.{NOT_BUILT}"
        raise unsupported(f"{param} is not supported yet", param)
    if len(constraints) > 1:
        first, second = (constraint.param for constraint in constraints[:2])
        raise invalid(f"{second} contradicts {first}: only one constraint is allowed", second)
    return constraints[0] if constraints else None
