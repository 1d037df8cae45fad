"""Whether the model and its drafter are there, whole, and of a kind that can be served."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.config import Config
from cluster.resolve import ROLES
from router.openai.defaults import defaults_of
from worker.config import check_length, drafter_directory
from worker.drafts.drafter_config import READERS, check_block
from worker.errors import UserError
from worker.model.files import check_weights
from worker.model.shape import LayerShape, ModelShape, read_model_shape
from worker.model.shard import split_even, split_heads


def check_model(config: Config, *, with_weights: bool = True) -> None:
    """Check the model's directory and, `with_weights`, the drafter's, whose tensor names say what
    the drafter is made of.

    Raises:
        UserError: names file and field.
    """
    model, directory = config.model, config.model.directory
    if not directory.is_dir():
        raise UserError(f"model.path: there is no directory {directory}", "model.path")
    try:
        spec = read_model_shape(directory)
        _check_tokenizer(directory / "tokenizer.json")
        if with_weights and model.load_format == "safetensors":
            check_weights(directory)
    except UserError as error:
        raise type(error)(f"model.path: {error}", "model.path") from error
    if config.router.generation_config == "auto":
        defaults_of(directory)
    if model.max_model_len != "auto":
        check_length(model.max_model_len, spec.max_position_embeddings)
    _check_ranks(config, spec)
    if with_weights and config.spec.has_weights:
        _check_drafter(config, spec)


def _check_ranks(config: Config, spec: LayerShape) -> None:
    """Whether a model, or a drafter, can be divided among the ranks of a worker."""
    for role in ROLES:
        part, path = config.role(role), f"{role}.tp"
        if not part.replicas:
            continue
        try:
            split_heads(spec.num_heads, spec.num_kv_heads, 0, part.tp)
            split_even("intermediate_size", spec.intermediate_size, 0, part.tp)
            split_even("vocab_size", spec.vocab_size, 0, part.tp)
        except UserError as error:
            raise type(error)(f"{path}: {error}", path) from error


def _check_drafter(config: Config, target: ModelShape) -> None:
    directory = drafter_directory(config.model, config.spec)
    if not directory.is_dir():
        raise UserError(f"spec.path: there is no directory {directory}", "spec.path")
    try:
        spec = READERS[config.spec.drafter](directory, target)
        if config.model.load_format == "safetensors":
            check_weights(directory)
    except UserError as error:
        unset = " (spec.path is not set, so this is the model's own directory)"
        reason = f"{error}{'' if config.spec.path else unset}"
        raise type(error)(f"spec.path: {reason}", "spec.path") from error
    check_block(config.spec, spec)
    try:
        _check_ranks(config, spec)
    except UserError as error:
        raise type(error)(f"{error}: of the drafter", error.param) from error


def _check_tokenizer(path: Path) -> None:
    """It is JSON to the end; the router says what else may be wrong with it."""
    try:
        msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a slow (sentencepiece) tokenizer has to be converted with "
            "transformers first"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: cut short or not JSON: {error}") from error
