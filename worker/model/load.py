"""Build one rank of a model and fill it."""

from pathlib import Path

from worker.config.checkpoint.shape import ModelShape
from worker.config.progress import Progress, no_progress
from worker.model.decoder import Decoder
from worker.model.layers import Placement
from worker.weights.loader import LoadFormat, fill_with_noise, read_weights


def load_model(
    path: Path,
    shape: ModelShape,
    placement: Placement,
    *,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    progress: Progress = no_progress,
) -> Decoder:
    """This rank's part of the model in directory `path`, in eval mode.

    "dummy" reads no file: weights follow from `seed` and their names, so any number of ranks makes
    the same model (on one type of device). Raises UserError as `read_weights`.
    """
    model = Decoder(shape, placement)
    if load_format == "dummy":
        fill_with_noise(model.shards(), seed, progress)
    else:
        read_weights(model, path, progress)
    return model.eval()
