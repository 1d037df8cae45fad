"""The kernels of attention, compiled for an H200 without one."""

from typing import Any

import torch

from tests.support.interpreted import asm_of, ptx_of
from worker.attention.base import AttentionShape
from worker.attention.paged_tiles import Chip, choose
from worker.forward.batch import Bounds
from worker.ops.jit import power_of_two


def attend_asm(
    shape: AttentionShape, num_reqs: int, width: int, *, eight_bits: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """Its stages and its constants, for `num_reqs` requests of `width` tokens of queries, over
    bf16 or eight bits in pages of 64."""
    from worker.attention import paged_triton as paged

    kept, dtype = ("*fp8e4nv", torch.float8_e4m3fn) if eight_bits else ("*bf16", torch.bfloat16)
    bounds, heads = Bounds(num_reqs, num_reqs * width, width, 4096), shape.num_heads
    wide = power_of_two(shape.head_dim)
    tiles = choose(bounds, (heads, shape.num_kv_heads), wide, 2, Chip(132))
    types = {"q": "*bf16", "out": "*bf16", "k_cache": kept, "v_cache": kept}
    types |= dict.fromkeys(("page_table", "items", "counts", "arrivals"), "*i32")
    types |= {"partial": "*fp32", "stats": "*fp32", "num_tokens": "i32", "scale": "fp32"}
    types |= {"sinks": "*bf16" if shape.sinks else "constexpr"}
    types |= dict.fromkeys(("stride_q", "stride_page", "stride_head", "stride_table"), "i32")
    constants = paged.constants_of(tiles, shape, 64, dtype) | {"PDL": True}
    options = paged.options_of(tiles, shape, constants)
    return asm_of(paged._attend_kernel, types, constants, **options), constants


def prompt_ptx(shape: AttentionShape) -> str:
    """Of the kernel of long chunks, over bf16."""
    from worker.attention import prompt_triton as prompt

    wide = power_of_two(shape.head_dim)
    types = dict.fromkeys(("q", "out"), "*bf16")
    block = f"tensordesc<bf16[{prompt.BLOCKS_N[wide]}, {wide}]>"
    types |= dict.fromkeys(("keys", "values"), block)
    types |= dict.fromkeys(("items", "counts", "first_rows"), "*i32")
    types |= dict.fromkeys(("num_tokens", "num_rows", "stride_q"), "i32") | {"scale": "fp32"}
    types |= {"sinks": "*bf16" if shape.sinks else "constexpr"}
    options = {"num_warps": prompt.NUM_WARPS, "num_stages": prompt.NUM_STAGES[wide]}
    return ptx_of(prompt._prompt_kernel, types, prompt.prompt_constants(shape), **options)
