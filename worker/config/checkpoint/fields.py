"""Typed access to a model directory's JSON files; every complaint names the file and the field.

A field that may stand in several places is read by all their names: "outer.field" lies in the
object `outer`. Values that differ are refused. A field that is null counts as absent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from worker.errors import Unsupported, UserError

CORRECT = "set it right, or take the file as published"
POINTER = b"version https://git-lfs.github.com/spec/"  # so begins what Git LFS has not fetched
AGAIN = "take it anew: hf download NAME --local-dir DIR fetches what is not whole"


class Fields:
    """One JSON object of a file."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], prefix: str = "", remedy: str = ""
    ) -> None:
        self.path = path
        self.values = values
        self.prefix = prefix  # of its fields in complaints: "outer." for an object within the file
        self.remedy = remedy  # what to take or set instead of a file that asks for too much

    def error(self, field: str, problem: str, remedy: str = CORRECT) -> UserError:
        """The field has a value that cannot be; remedy: what to do about it."""
        where = f"{self.path}: {self.prefix}{field}"
        return UserError(f"{where}: {problem}; {remedy}", self.prefix + field)

    def unsupported(self, field: str, problem: str, remedy: str | None = None) -> Unsupported:
        """The field asks for something that we cannot compute.

        remedy: what to take or set instead; None: the file's own.
        """
        told = "; ".join(filter(None, (problem, self.remedy if remedy is None else remedy)))
        where = f"{self.path}: {self.prefix}{field}"
        return Unsupported(f"{where}: {told}", self.prefix + field)

    def get(self, *places: str) -> Any:
        """The value of the first place that has one, whatever its type; None if none has."""
        held = self._held(places)
        return held[0][2] if held else None

    def integer(self, *places: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; without a default it must be there."""
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        return self._read(places, default, wanted, lambda value: _is_integer(value, least))

    def number(self, *places: str, default: float | None = None) -> float:
        """A positive number; without a default it must be there."""

        def is_positive(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

        return float(self._read(places, default, "a positive number", is_positive))

    def flag(self, *places: str, default: bool | None = False) -> bool:
        """A boolean, `default` if absent; None: it must be there."""
        return self._read(places, default, "true or false", lambda value: isinstance(value, bool))

    def integers(self, *places: str) -> list[int]:
        """A list of integers of zero and more, empty if absent."""

        def are_integers(value: Any) -> bool:
            return is_list(value) and all(map(_is_integer, value))

        return self._read(places, [], "a list of integers from 0 on", are_integers)

    def inner(self, field: str) -> "Fields":
        """The object that the field holds, without fields if it is absent."""
        value = self._read([field], {}, "an object", lambda value: isinstance(value, dict))
        return Fields(self.path, value, f"{self.prefix}{field}.", self.remedy)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same, with a value for each of these that is absent; null stays null."""
        return Fields(self.path, {**defaults, **self.values}, self.prefix, self.remedy)

    def choice(self, field: str, supported: tuple[Any, ...], remedy: str | None = None) -> None:
        """Refuse a field that is none of `supported`, with a remedy; it may be absent."""
        if (value := self.get(field)) is not None and value not in supported:
            names = ", ".join(map(str, supported))
            raise self.unsupported(field, f"{value!r}; supported: {names}", remedy)

    def place(self, *places: str) -> "tuple[Fields, str]":
        """(object, field) of the first of `places` that has a value; of the last if none has.

        Raises UserError if two of them differ.
        """
        held = self._held(places)
        for where, field, value in held[1:]:
            first, name, other = held[0]
            # As JSON has it, where true is not 1.
            if value != other or isinstance(value, bool) != isinstance(other, bool):
                raise where.error(field, f"{value!r}, but {first.prefix}{name} {other!r}")
        return held[0][:2] if held else self._at(places[-1])

    def _at(self, place: str) -> "tuple[Fields, str]":
        outer, _, field = place.rpartition(".")
        return (self.inner(outer) if outer else self), field

    def _held(self, places: Sequence[str]) -> "list[tuple[Fields, str, Any]]":
        """(object, field, value) of those places that have a value."""
        at = map(self._at, places)
        return [(o, f, v) for o, f in at if (v := o.values.get(f)) is not None]

    def _read(
        self, places: Sequence[str], default: Any, wanted: str, is_valid: Callable[[Any], bool]
    ) -> Any:
        for where, field, value in self._held(places):
            if not is_valid(value):
                raise where.error(field, f"must be {wanted}, not {value!r}")
        where, field = self.place(*places)
        value = where.values.get(field)
        value = default if value is None else value
        if value is None:
            raise where.error(field, "missing")
        return value


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a field holds a list, of whatever."""
    return isinstance(value, list)


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a field holds an object, of whatever fields."""
    return isinstance(value, dict)


def _is_integer(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_fields(path: Path, remedy: str = "") -> "Fields":
    """The JSON object in the file `path`; UserError if there is none. remedy: see Fields."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        problem = "no such file" if isinstance(e, FileNotFoundError) else e.strerror
        whole = "take a directory with a whole model, as from_pretrained of transformers reads it"
        raise UserError(f"{path}: {problem}; {whole}") from e
    except ValueError as e:
        raise UserError(f"{path}: {unreadable(path, f'not valid JSON: {e}')}") from e
    if not isinstance(values, dict):
        problem = f"must hold a JSON object, not a {type(values).__name__}"
        raise UserError(f"{path}: {problem}; {AGAIN}")
    return Fields(path, cast("dict[str, Any]", values), remedy=remedy)


def unreadable(path: Path, problem: str) -> str:
    """What is wrong with a file that has such a problem, and what to do about it."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            return "a pointer of Git LFS, not the file; take that: git lfs pull, or hf download"
    return f"{problem}; {AGAIN}"
