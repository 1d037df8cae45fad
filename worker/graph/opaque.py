"""What Dynamo sees in place of our kernels: custom ops, which it does not look into.

Only a trace meets them. An op that runs calls the kernel's own function, which chooses by device
and shape as ever, so what was traced runs as it is with the same bits. Where a compiler is to fuse
the small ones, `TWINS` says in plain torch what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.kernels.gemm.product import gated_product, product
from worker.kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from worker.layers.attention import attend


def _opaque(
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> Any:
    """Make the op of `function`; whatever Dynamo traces calls the op from now on.

    fake: what comes out of tensors without content.
    """
    name = f"kvlane::{function.__name__}"
    torch.library.custom_op(name, function, mutates_args=mutates, schema=schema).register_fake(fake)
    op = getattr(torch.ops.kvlane, function.__name__).default
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(lambda *args: op(*args))
    return op


def _fake_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _fake_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _fake_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _fake_gated(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0] // 2)


PRODUCT = _opaque(product, "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", _fake_product)
RMS_NORM = _opaque(rms_norm, "(Tensor x, Tensor weight, float eps) -> Tensor", _fake_norm)
ADD_RMS_NORM = _opaque(
    add_rms_norm,
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _fake_add_norm,
)
GATED_PRODUCT = _opaque(gated_product, "(Tensor x, Tensor w) -> Tensor", _fake_gated)

# The pool that it writes to is no argument: it is the forward context's. What orders it is `out`.
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
