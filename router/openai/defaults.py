"""How answers are drawn where a request says nothing: the model's `generation_config.json`."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker.errors import UserError

FILE = "generation_config.json"
SETTING = "router.generation_config"
MAX_TEMPERATURE = 100.0

Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, lt=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]


class Defaults(BaseModel):
    """Sampling parameters of requests that do not name them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: Temperature = 1.0  # 0 = greedy
    top_p: TopP = 1.0
    top_k: TopK = 0  # 0 and -1 = off
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


def defaults_of(directory: Path) -> Defaults:
    """What the model's own file says, as in vLLM; `do_sample` = false makes answers greedy.

    Raises a UserError for a value that no request could have.
    """
    path = directory / FILE
    if not path.is_file():
        return Defaults()
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unfit(path, f"not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _unfit(path, "not a JSON object")
    fields = cast("dict[str, Any]", content)
    given = {name: fields[name] for name in Defaults.model_fields if fields.get(name) is not None}
    if fields.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return Defaults.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _unfit(path, f"{first['loc'][0]}: {first['msg']}") from error


def _unfit(path: Path, problem: str) -> UserError:
    return UserError(f"{path}: {problem}; {SETTING} = ignore serves without it", SETTING)
