"""Names to classes: one table of strings per seam, imported on first use."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from worker.errors import UserError


def resolve(kind: str, name: str, table: Mapping[str, str]) -> type[Any]:
    """The class that `table`, name -> "package.module:Class", has for the user's choice.

    Its module is imported now, not before. Raises UserError for another name; the message lists
    the names of that kind ("attention backend").
    """
    if name not in table:
        raise UserError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(table))}")
    return imported(table[name])


def imported(path: str) -> type[Any]:
    """The class at "package.module:Class"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
