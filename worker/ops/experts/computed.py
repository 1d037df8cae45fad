"""Which experts are computed, by the definitions on a CPU and by the kernels on a GPU."""

from collections.abc import Collection, Mapping

import torch

from worker.config.checkpoint.experts import ExpertShape
from worker.errors import Unsupported
from worker.ops.experts.route import SCORINGS

# Field of ExpertShape -> its values; None: any.
IN_KERNELS: Mapping[str, Collection[object] | None] = {
    "scoring": ("softmax",),
    "is_biased": (False,),
    "num_groups": (1,),
    "factor": (1.0,),
    "activation": ("silu",),
    "limit": (0.0,),
}
DEFINED: Mapping[str, Collection[object] | None] = {
    **IN_KERNELS,
    "scoring": SCORINGS,
    "is_biased": None,
    "factor": None,
}


def refuse_others(shape: ExpertShape, device: torch.device) -> None:
    """Raise Unsupported, with field and value, for experts that the device would not compute."""
    for field, values in (DEFINED if device.type == "cpu" else IN_KERNELS).items():
        if values is not None and (value := getattr(shape, field)) not in values:
            known = ", ".join(map(str, values))
            raise Unsupported(f"experts: {field} {value!r} on {device.type}; computed: {known}")
