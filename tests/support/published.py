"""Published configurations by name, and what the checks before a start say of each.

`python -m tests.support.published > tests/support/published.txt` writes the table. The facts are in
published.json, in which `like` names another entry that has the same fields but for those given.
Sources: where "source" is "aiconfigurator", ai-dynamo/aiconfigurator's `model_configs` on GitHub;
else the file of that name on the hub, written down without network, so not compared anew.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.start.check import check_directories

HERE = Path(__file__)
TABLE = HERE.with_suffix(".txt")
HEAD = "name | architecture | what the checks before Ray say of it"


@cache
def published() -> Mapping[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> (config.json, other files)."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for entry in json.loads(HERE.with_suffix(".json").read_text()):
        base = found[entry["like"]][0] if "like" in entry else {}
        found[entry["name"]] = base | entry.get("config", {}), entry.get("files", {})
    return found


def write(name: str, directory: Path) -> Path:
    """The directory of this model, without weights and tokenizer."""
    path = directory / name.rpartition("/")[2]
    path.mkdir()
    config, files = published()[name]
    for file, values in {"config.json": config, **files}.items():
        (path / file).write_text(json.dumps(values))
    return path


class Verdict(NamedTuple):
    """What is said of a model, and how long it took."""

    text: str
    seconds: float

    @property
    def is_served(self) -> bool:
        """Whether nothing is refused."""
        return self.text.startswith("served")


def verdict(name: str, directory: Path) -> Verdict:
    """What a start of this model would say before Ray starts, on a CPU."""
    path = write(name, directory)
    began = time.perf_counter()
    try:
        model = ModelConfig(path=str(path), load_format="dummy")
        check_directories(model, SpecConfig(), {"decode.tp": (1, "auto")})
        kept = read_model_shape(path).quantization
        text = f"served, in {kept.format if kept else 'the stored dtype'}"
    except UserError as error:
        told = str(error).replace(f"model.path: {path}", "").strip(" /")
        text = f"refused: {told.replace(', '.join(sorted(FAMILIES)), 'one of the README')}"
    return Verdict(text, time.perf_counter() - began)


def rows(directory: Path) -> Mapping[str, tuple[str, float]]:
    """Name -> (its row of the table, seconds of the check)."""
    found = {}
    for name, (config, _) in published().items():
        said = verdict(name, directory)
        found[name] = f"{name} | {config['architectures'][0]} | {said.text}", said.seconds
    return found


def main() -> None:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        made = rows(Path(directory))
    seconds = [took for _, took in made.values()]
    print(
        f"{len(made)} configurations; slowest check {max(seconds):.3f} s, all {sum(seconds):.2f} s"
    )
    print(f"and {began:.2f} s of a CPU until the checks are imported, once")
    print(HEAD, *(row for row, _ in made.values()), sep="\n")
    assert "torch" not in sys.modules, "it takes seconds"


if __name__ == "__main__":
    main()
