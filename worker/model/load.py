"""Build one rank of a model and fill it."""

from pathlib import Path

from worker.config.checkpoint.shape import ModelShape
from worker.config.progress import Progress, no_progress
from worker.model.decoder import Decoder
from worker.model.placement import Placement
from worker.weights.loader import fill_with_noise, read_weights, settle


def load_model(
    path: Path,
    shape: ModelShape,
    placement: Placement,
    *,
    noise: int | None = None,
    progress: Progress = no_progress,
) -> Decoder:
    """This rank's part of the model in directory `path`, in eval mode.

    noise: a seed; no file is read, and weights follow from it and their names, so that any number
    of ranks makes the same model (on one type of device). Raises UserError as `read_weights`.
    """
    model = Decoder(shape, placement)
    if noise is None:
        read_weights(model, path, progress)
    else:
        fill_with_noise(model.shards(), noise, progress)
    settle(model)
    return model.eval()
