"""Typed access to a model directory's JSON files; every complaint names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from worker.errors import Unsupported, UserError


class Fields:
    """One JSON object of a file. A field that is null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix  # of its fields in complaints: "outer." for an object within the file

    def error(self, field: str, problem: str) -> UserError:
        """The field has a value that cannot be."""
        return UserError(f"{self.path}: {self.prefix}{field}: {problem}", self.prefix + field)

    def unsupported(self, field: str, problem: str) -> Unsupported:
        """The field asks for something that we cannot compute."""
        return Unsupported(f"{self.path}: {self.prefix}{field}: {problem}", self.prefix + field)

    def get(self, field: str) -> Any:
        """The value, None if it is absent or null."""
        return self.values.get(field)

    def integer(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.error(field, f"must be {wanted}, not {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(field, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, field: str, default: bool | None = False) -> bool:
        """A boolean, `default` if absent; None: it must be there."""
        value = self._value(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {value!r}")
        return value

    def integers(self, field: str) -> list[int]:
        """A list of integers of zero and more, empty if absent."""
        value = self._value(field, [])
        if not isinstance(value, list) or any(
            not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in value
        ):
            raise self.error(field, f"must be a list of integers from 0 on, not {value!r}")
        return value

    def inner(self, field: str) -> Fields:
        """The object that the field holds, without fields if it is absent."""
        value = self._value(field, {})
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, not {value!r}")
        return Fields(self.path, value, f"{self.prefix}{field}.")

    def only(self, known: Collection[str]) -> None:
        """Refuse the first field that is not among `known`."""
        for field, value in self.values.items():
            if field not in known and value is not None:
                raise self.unsupported(field, f"an unknown field, of value {value!r}")

    def choice(self, field: str, *supported: str) -> None:
        """Refuse a field that is none of `supported`; it may be absent."""
        if (value := self.values.get(field)) is not None and value not in supported:
            raise self.unsupported(field, f"{value!r}; supported: {', '.join(supported)}")

    def fixed(self, values: Mapping[str, Any]) -> None:
        """Refuse a field of another value than that of `values`."""
        for field, only in values.items():
            if (value := self.values.get(field)) is not None and value != only:
                raise self.unsupported(field, f"{value!r}; supported: {only!r}")

    def _value(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        value = default if value is None else value
        if value is None:
            raise self.error(field, "missing")
        return value


def read_fields(path: Path) -> Fields:
    """The JSON object in the file `path`.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such file; is this a Hugging Face model directory?") from e
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object, not a {type(values).__name__}")
    return Fields(path, values)
