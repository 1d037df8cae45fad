"""Custom ops that Dynamo puts into its traces in place of our kernels.

When such an op runs, it calls the kernel's public function, so a traced forward gives the same
bits. For the norms, which Inductor shall fuse, `TWINS` gives the plain-torch definition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from worker.model.layers import attend
from worker.ops.norms import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from worker.ops.product import gated_product, product

_OPS: list[tuple[Callable[..., Any], Any]] = []  # our function, the op in its place


def _opaque(
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register `function` as a custom op, which `substitute` puts in its place.

    fake: the op's fake (meta) implementation: output shapes and dtypes only.
    """
    name = f"kvlane::{function.__name__}"
    torch.library.custom_op(name, function, mutates_args=mutates, schema=schema).register_fake(fake)
    op = getattr(torch.ops.kvlane, function.__name__).default
    _OPS.append((function, op))
    return op


@cache
def substitute() -> None:
    """Let Dynamo put the ops into its traces. It is imported here, which takes a second."""
    for function, op in _OPS:
        put = torch.compiler.substitute_in_graph(function, skip_signature_check=True)
        put(lambda *args, op=op: op(*args))


PRODUCT = _opaque(
    product,
    "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor",
    lambda x, w, bias=None: x.new_empty(x.shape[0], w.shape[0]),
)
GATED_PRODUCT = _opaque(
    gated_product,
    "(Tensor x, Tensor w) -> Tensor",
    lambda x, w: x.new_empty(x.shape[0], w.shape[0] // 2),
)
RMS_NORM = _opaque(
    rms_norm,
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, weight, eps: torch.empty_like(x),
)
ADD_RMS_NORM = _opaque(
    add_rms_norm,
    # `total` is None: compiled graphs have no taps.
    "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? total=None) -> (Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
# The KV pool that `attend` writes comes from the forward context and is not an argument. Mutating
# `out` is what keeps the op in the trace, and in order.
ATTEND = _opaque(
    attend,
    "(Tensor qkv, Tensor positions, Tensor table, Tensor? q_weight, Tensor? k_weight, float eps, "
    "int layer_id, Tensor(a!) out) -> ()",
    lambda *_: None,
    mutates=("out",),
)

TWINS: dict[Any, Callable[..., Any]] = {
    RMS_NORM: rms_norm_ref,
    ADD_RMS_NORM: add_rms_norm_ref,
}
