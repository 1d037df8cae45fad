"""KV in eight bits: e4m3 numbers, and a power of two for each token, head and part, in the page.

The rows of a head in a page are followed by their exponents, one byte a row: a number is worth
e4m3 · 2^(byte - 127). The power is the smallest by which no number of its row passes 448. So
nothing is calibrated, a page that is moved takes its scales along, and bf16 holds every value: a
kernel may scale keys, scores or a copy, with the same result.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def exponents_of(cache: Tensor) -> Tensor:
    """[num_pages, num_kv_heads, rows] u8 behind the rows of a layer's [.., rows, head_dim] view."""
    rows, head_dim = cache.shape[-2:]
    at = cache.storage_offset() + rows * head_dim
    return cache.view(torch.uint8).as_strided(cache.shape[:-1], (*cache.stride()[:-2], 1), at)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [.., head_dim] of any float as e4m3, and their exponents [..] u8."""
    wide = x.float()
    bits = wide.abs().amax(-1).view(torch.int32)
    # amax = 1.m · 2^(e - 127), and 448 = 1.75 · 2^8.
    exponents = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)
    exponents.clamp_(min=1)
    inverse = ((254 - exponents) << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(E4M3), exponents.to(torch.uint8)


def dequantized(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantized` has made, [.., head_dim] of `dtype`, which is bf16 or f32."""
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return values.to(dtype).mul_(scales.to(dtype).unsqueeze(-1))  # exact in either


def fill_noise(view: Tensor, generator: torch.Generator | None = None) -> None:
    """Normal numbers into one of a pool's `caches` or states, of any dtype; into exponents a few
    powers around one."""
    if view.dtype == torch.uint8:
        view.random_(124, 130, generator=generator)
    elif view.dtype == E4M3:
        view.copy_(torch.empty(view.shape, device=view.device).normal_(generator=generator))
    else:
        view.normal_(generator=generator)
