"""How bodies of requests are read: null means the default, and a mistake names its field."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from router.errors import ApiError, invalid
from router.openai.defaults import given

HALF = re.compile("[\ud800-\udfff]")
MAX_PARAM = 200  # characters of a field's path, which may hold names of the client's own
FORMS = ("list[", "dict[", "[key]")  # how pydantic's paths of errors name a union's alternatives

ItemT = TypeVar("ItemT")
# A list whose check stops at the first wrong item. Collecting the errors of all items took 15 s and
# 2.7 GB for a body of 4 MB.
Many = Annotated[list[ItemT], Field(fail_fast=True)]


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def contradiction(field: str, message: str) -> PydanticCustomError:
    """Two fields contradict one another; `field` is the one to change."""
    return PydanticCustomError("contradiction", "{message}", {"field": field, "message": message})


class RequestModel(BaseModel):
    """A model of a request: unknown fields are kept, null means the default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    _null_is_default = model_validator(mode="before")(given)


ModelT = TypeVar("ModelT", bound=RequestModel)


def read(model: type[ModelT], raw: bytes) -> ModelT:
    """The body of any request; raises an ApiError, 400, that names the field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        is_json = error.errors(include_url=False)[0]["type"] != "json_invalid"
        raise (not is_json and _half_pair(raw)) or refused(error) from None


def _half_pair(raw: bytes) -> ApiError | None:
    """The 400 for a body with half a surrogate pair, which pydantic's parser does not place."""
    try:
        inside: list[tuple[str, Any]] = [("", json.loads(raw))]
    except (ValueError, RecursionError):
        return None
    while inside:
        path, value = inside.pop()
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            inside += [(f"{path}.{name}", item) for name, item in fields.items()]
            value = "".join(fields)
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            inside += [(f"{path}.{i}", item) for i, item in enumerate(items)]
        half = HALF.search(value) if isinstance(value, str) else None
        if half is not None:
            param = path.strip(".")[:MAX_PARAM].encode(errors="replace").decode() or None
            code = f"\\u{ord(half[0]):04x}"
            message = f"has {code}, half a surrogate pair, which is no character"
            return invalid(f"{param or 'body'}: {message}", param)
    return None


def refused(error: ValidationError, prefix: str = "") -> ApiError:
    """The 400 for the first error; `prefix` is the path of the value that was checked."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg']}")
    field = first.get("ctx", {}).get("field")  # of a contradiction
    path = [field] if field else _path(first["loc"])
    param = ".".join([prefix, *path] if prefix else path)[:MAX_PARAM] or None
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{param or 'body'}: {message}", param)


def _path(loc: Sequence[int | str]) -> list[str]:
    """The path of the wrong field, up to where pydantic names an alternative of a union."""
    parts = [str(part) for part in loc]
    forms = [i for i, part in enumerate(parts) if i and (part == "str" or part.startswith(FORMS))]
    return parts[: forms[0]] if forms else parts
