"""Weights in four bits as their own libraries write them, number by number.

Packing follows, for AWQ, AutoAWQ's awq/modules/linear/gemm.py (from_linear); for GPTQ, AutoGPTQ's
and GPTQModel's `pack` (qweight along the input, zeros less 1 in the first version); for the rest,
compressed-tensors' compressors, which test_four_bits.py asks itself with --whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.train.model import apart
from tests.equivalence.test_models import edit

Written = tuple[
    dict[str, Tensor], Tensor
]  # tensors by the ends of their names, what they are worth
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7


def words(q: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """i32 [n, ceil(k / 8)] of numbers [n, k] below 16: number order[i] of eight at bit 4 i."""
    padded = torch.nn.functional.pad(q.long(), (0, -q.shape[1] % 8))
    made: Any = sum(padded[:, j::8] << (4 * i) for i, j in enumerate(order))
    return (made & 0xFFFFFFFF).to(torch.uint32).contiguous().view(torch.int32)


def rounded(w: Tensor, group: int, dtype: torch.dtype, *, zeros: bool) -> tuple[Tensor, ...]:
    """(q, scales, zero points, worth): [n, k] and [n, groups], numbers below 16."""
    blocks = w.unflatten(1, (-1, group or w.shape[1]))
    low, high = blocks.amin(-1), blocks.amax(-1)
    if zeros:
        scales = ((high - low) / 15).to(dtype).float()
        zero = (-low / scales).round().clamp(0, 15)
    else:
        scales = (blocks.abs().amax(-1) / 7).to(dtype).float()
        zero = torch.full_like(scales, 8)
    q = ((blocks / scales[..., None]).round() + zero[..., None]).clamp(0, 15)
    value = (q - zero[..., None]) * scales[..., None]
    return q.flatten(1), scales.to(dtype), zero, value.flatten(1)


def awq(w: Tensor, group: int) -> Written:
    q, scales, zero, value = rounded(w, group, torch.float16, zeros=True)
    return {
        "qweight": words(q.t(), AWQ_ORDER),
        "qzeros": words(zero.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }, value


def gptq(w: Tensor, group: int, *, sym: bool, less: int) -> Written:
    q, scales, zero, value = rounded(w, group, torch.float16, zeros=not sym)
    k = w.shape[1]
    return {
        "qweight": words(q).t().contiguous(),
        "qzeros": words((zero.t() - less).long() & 15),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(k, dtype=torch.int32) // (group or k),
    }, value


def int4(w: Tensor, group: int, *, sym: bool) -> Written:
    q, scales, zero, value = rounded(w, group, w.dtype, zeros=not sym)
    made = {"weight_packed": words(q), "weight_scale": scales}
    made["weight_shape"] = torch.tensor(w.shape)
    if not sym:
        made["weight_zero_point"] = words(zero.t()).t().contiguous()
    return made, value


def coded(blocks: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """(two codes a byte [n, k / 2], codes [n, groups, group]) of the nearest numbers."""
    codes = torch.tensor(CODES)
    number = (blocks / steps[..., None])[..., None].sub(codes).abs().argmin(-1)
    flat = number.flatten(1).to(torch.uint8)
    return flat[:, ::2] | flat[:, 1::2] << 4, codes[number]


def mxfp4(w: Tensor, group: int) -> Written:
    blocks = w.unflatten(1, (-1, group))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    packed, codes = coded(blocks, exponents.exp2())
    scale = (exponents + 127).to(torch.uint8)
    return {
        "weight_packed": packed, "weight_scale": scale,
    }, (codes * exponents.exp2()[..., None]).flatten(1)  # fmt: skip


def nvfp4(w: Tensor, group: int, *, modelopt: bool) -> Written:
    blocks, whole = w.unflatten(1, (-1, group)), w.abs().max() / (6 * 448)
    scale = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    packed, codes = coded(blocks, scale.float() * whole)
    value = (codes * scale.float()[..., None]).flatten(1) * whole
    if modelopt:
        held = {"weight": packed, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
    else:
        held = {"weight_packed": packed, "weight_global_scale": (1 / whole).view(1)}
        held["input_global_scale"] = torch.ones(1)
    return held | {"weight_scale": scale}, value


def compressed(form: str, group: int, **more: Any) -> dict[str, Any]:
    is_int = form == "pack-quantized"
    weights = {"num_bits": 4, "type": "int" if is_int else "float", "symmetric": True, **more}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    groups = {"group_0": {"weights": weights, "input_activations": None, "targets": ["Linear"]}}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": groups,
    }  # fmt: skip


def config_of_gptq(group: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "lm_head": False, **more,
    }  # fmt: skip


class Form(NamedTuple):
    """A format as it is declared, and what writes a matrix in it."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]


AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"],
}  # fmt: skip
FORMS: dict[str, Form] = {
    "awq": Form(AWQ, lambda w: awq(w, 32)),
    "gptq": Form(config_of_gptq(32), lambda w: gptq(w, 32, sym=True, less=1)),
    "gptq-zeros": Form(
        config_of_gptq(32, sym=False), lambda w: gptq(w, 32, sym=False, less=1)
    ),
    "gptq-row": Form(config_of_gptq(-1), lambda w: gptq(w, 0, sym=True, less=0)),
    "gptq-v2": Form(
        config_of_gptq(32, sym=False, checkpoint_format="gptq_v2"),
        lambda w: gptq(w, 32, sym=False, less=0),
    ),
    "int4": Form(compressed("pack-quantized", 32), lambda w: int4(w, 32, sym=True)),
    "int4-zeros": Form(
        compressed("pack-quantized", 32, symmetric=False), lambda w: int4(w, 32, sym=False)
    ),
    "int4-row": Form(compressed("pack-quantized", 0), lambda w: int4(w, 0, sym=True)),
    "int4-row-zeros": Form(
        compressed("pack-quantized", 0, symmetric=False), lambda w: int4(w, 0, sym=False)
    ),
    "mxfp4": Form(compressed("mxfp4-pack-quantized", 32), lambda w: mxfp4(w, 32)),
    "nvfp4": Form(compressed("nvfp4-pack-quantized", 16), lambda w: nvfp4(w, 16, modelopt=False)),
    "modelopt": Form(MODELOPT, lambda w: nvfp4(w, 16, modelopt=True)),
}  # fmt: skip


def publish(
    path: Path,
    form: str,
    reference: torch.nn.Module | None = None,
    left: Callable[[str], bool] = lambda name: False,
    write: Callable[[Tensor], Written] | None = None,
) -> None:
    """Rewrite a saved model in such a form, and give the reference what that is worth.

    left: of a tensor's name, whether it stays as it is; write: instead of the form's own.
    """
    config, own = FORMS[form]
    write = write or own
    edit(path, quantization_config=config)
    held = apart(load_file(path / "model.safetensors"))
    kept = {} if reference is None else dict(reference.named_parameters())
    for name in [name for name in held if name.endswith("proj.weight") and not left(name)]:
        w = held.pop(name)
        w[0].abs_()  # whose zero points are 0, which the first version of GPTQ stores as 15
        made, value = write(w)
        stem = name.removesuffix("weight")
        held |= {stem + end: tensor for end, tensor in made.items()}
        if name in kept:
            kept[name].data.copy_(value)
        elif kept:
            _give_stack(kept, name, value)
    last = sorted(held)[-1]  # it may lie anywhere
    save_file({last: held.pop(last)}, path / "other.safetensors")
    save_file(held, path / "model.safetensors")


def _give_stack(kept: dict[str, Any], name: str, value: Tensor) -> None:
    """Of an expert, whose matrix lies in transformers' stacks."""
    stem, _, rest = name.partition(".experts.")
    number, which, _ = rest.split(".")
    stack = kept[f"{stem}.experts.{'down_proj' if which == 'down_proj' else 'gate_up_proj'}"].data
    rows = slice(len(value), None) if which == "up_proj" else slice(0, len(value))
    stack[int(number), rows] = value
