"""The formats of weights: what serves a declared one, and what reads the tensors of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.config.checkpoint.quantization import FORMATS, Quantization
from worker.registry import resolve
from worker.weights.base import Format
from worker.weights.plain import PLAIN


def format_of(declared: Quantization | None) -> Format:
    """What serves matrices that are declared so; None: those in the model's dtype."""
    return PLAIN if declared is None else _served_by(declared.format)(declared)


def _served_by(name: str) -> type[Format]:
    return resolve(
        "format of weights", name, {each: row.served_by for each, row in FORMATS.items()}
    )


class Readings:
    """The tensors of a model's weight files in any format that these, or config.json, name."""

    def __init__(self, files: Sequence[Path], declared: Quantization | None = None) -> None:
        kinds = dict.fromkeys(_served_by(name).reading for name in FORMATS)
        self._all = [kind(files, declared) for kind in kinds]
        self.made = set[str]()  # the model's names of tensors that are not as the files have them

    def tensor_of(self, name: str) -> str:
        """See Reading."""
        named = (each.tensor_of(name) for each in self._all)
        return next((tensor for tensor in named if tensor != name), name)

    def opened(self, name: str, stored: Any) -> Any:
        """What slices the tensor by its worth: of Reading.opened, or `stored` itself."""
        made = (each.opened(name, stored) for each in self._all)
        found = next((each for each in made if each is not None), stored)
        if found is not stored:
            self.made.add(self.tensor_of(name))
        return found

    def is_spent(self, name: str) -> bool:
        """See Reading."""
        return any(each.is_spent(name) for each in self._all)

    def owner_of(self, name: str) -> str:
        """See Reading."""
        owners = (each.owner_of(name) for each in self._all)
        return next((owner for owner in owners if owner != name), name)
