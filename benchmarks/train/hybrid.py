"""The recurrent layers of `tiny-hybrid` while it is trained."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' torch_chunk_gated_delta_rule, the blocks' systems solved at once, in f32.

    query, key: [batch, length, key heads, key_dim]; value: [batch, length, heads, value_dim];
    g, beta: [batch, length, heads]. Returns outputs as `value`, and the last state if asked.
    """
    with torch.autocast(value.device.type, enabled=False):
        ratio, length = value.shape[2] // query.shape[2], value.shape[1]
        q, k = (x.float() for x in (query, key))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(ratio, 2) for x in (q * q.shape[-1] ** -0.5, k))
        q, k, v, total, b = (
            _blocks(x) for x in (q, k, value.float(), g.float()[..., None], beta.float()[..., None])
        )
        total = total.cumsum(-2)
        later = (total - total.mT).tril()
        decay = later.exp().tril()
        system = torch.eye(BLOCK, device=v.device) + (b * (k @ k.mT) * decay).tril(-1)
        both = torch.cat((b * v, b * total.exp() * k), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        seen, last = (q @ k.mT) * decay, total[..., -1:, :]
        q, k = q * total.exp(), k * (last - total).exp()
        state = initial_state
        if state is None:
            state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        outputs = []
        for n in range(v.shape[2]):
            new = u[:, :, n] - w[:, :, n] @ state
            outputs.append(q[:, :, n] @ state + seen[:, :, n] @ new)
            state = state * last[:, :, n].exp() + k[:, :, n].mT @ new
        out = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return out.to(value.dtype), state if output_final_state else None


def _blocks(x: Tensor) -> Tensor:
    """[batch, length, heads, size] -> [batch, heads, blocks, BLOCK, size], zeros behind the end."""
    x = x.transpose(1, 2)
    return F.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
