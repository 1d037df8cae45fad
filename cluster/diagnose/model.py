"""Whether the model and its drafter are there, whole, and of a kind that can be served."""

from pathlib import Path

import msgspec

from cluster.config import Config
from cluster.resolve import ROLES
from router.openai.defaults import defaults_of
from worker.errors import UserError
from worker.start.check import check_directories


def check_model(config: Config, *, with_weights: bool = True) -> None:
    """Check the directories of the model and, `with_weights`, of its drafter.

    Raises:
        UserError: names file and field.
    """
    ranks = {f"{role}.tp": part.tp for role in ROLES if (part := config.role(role)).replicas}
    check_directories(config.model, config.spec, ranks, with_weights=with_weights)
    _check_tokenizer(config.model.directory / "tokenizer.json")
    if config.router.generation_config == "auto":
        defaults_of(config.model.directory)


def _check_tokenizer(path: Path) -> None:
    """It is JSON to the end; the router says what else may be wrong with it."""
    try:
        msgspec.json.decode(path.read_bytes())
        return
    except FileNotFoundError:
        reason = (
            "no such file; a slow (sentencepiece) tokenizer has to be converted with transformers "
            "first"
        )
    except OSError as error:
        reason = str(error.strerror)
    except msgspec.DecodeError as error:
        reason = f"cut short or not JSON: {error}"
    raise UserError(f"model.path: {path}: {reason}", "model.path")
