"""How answers are drawn where a request says nothing: the model's `generation_config.json`."""

from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worker.errors import UserError

SETTING = "router.generation_config"
MAX_TEMPERATURE = 100.0

Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(ge=0, le=1)]  # 0 = greedy
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]  # 1 = greedy
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]


def given(value: Any) -> Any:
    """A JSON object without the fields that are null; anything else as it is."""
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return {name: item for name, item in fields.items() if item is not None}


class Defaults(BaseModel):
    """Sampling parameters of requests that do not name them; read as vLLM reads the model's file.

    There null is as good as nothing, and `do_sample` = false makes answers greedy.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: Temperature = 1.0  # 0 = greedy
    top_p: TopP = 1.0
    top_k: TopK = 0  # 0 and -1 = off
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        fields = given(value)
        match value:
            case {"do_sample": False}:
                return fields | {"temperature": 0.0}
            case _:
                return fields


def defaults_of(directory: Path) -> Defaults:
    """What the model's own file says; raises a UserError for a value that no request could have."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return Defaults()
    try:
        return Defaults.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        problem = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            problem = ": ".join([*map(str, first["loc"]), first["msg"]])
        message = f"{path}: {problem}; {SETTING} = ignore serves without it"
        raise UserError(message, SETTING) from error
