"""Chunks of prompts through a delta net: state in, state out, 64 tokens at a time.

Within a block the rule is a product of matrices (WY form: Yang et al., arXiv:2406.06484, section 3;
with decay arXiv:2412.06464, section 3.3). Blocks begin at multiples of 64 of the request, and
chunks that are not a prompt's last end there, so it does not matter how a prompt was cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.recurrent.delta_net import (
    TAPS,
    DeltaState,
    DeltaWeights,
    Inputs,
    by_channel,
    by_head,
    convolved,
    gated_norm,
    inputs,
    read_states,
    write_states,
)
from worker.config.checkpoint.delta_shape import DELTA_BLOCK
from worker.forward.batch import StateChunks
from worker.ops.op import op


def delta_chunk_ref(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, chunks: StateChunks, out: Tensor
) -> None:
    """Fill `out` and the requests' slots.

    packed: [num_tokens, packed_width]; out: [num_tokens, value_width] of that dtype; padding: 0.
    """
    shape = state.shape
    widths = [shape.channels, shape.value_width, 2 * shape.value_heads]
    qkv, z, ba = packed.split(widths, dim=-1)
    out.zero_()
    starts, lengths = chunks.query_start.tolist(), chunks.seq_lens.tolist()
    for i in range(len(lengths)):
        tokens = slice(starts[i], starts[i + 1])
        count = tokens.stop - tokens.start
        if not count:
            continue
        held = chunks.slots[i : i + 1]
        s, early = read_states(state, held)[0], by_channel(state.conv[held], shape)[0]
        if lengths[i] == count:  # nothing is read at position 0
            s, early = torch.zeros_like(s), torch.zeros_like(early)
        raw = torch.cat((early, qkv[tokens]))
        x = inputs(convolved(raw, weights.conv), ba[tokens], weights, shape)
        outputs = []
        for at in range(0, count, DELTA_BLOCK):
            s, o = delta_block(s, Inputs(*(part[at : at + DELTA_BLOCK] for part in x)))
            outputs.append(o)
        out[tokens] = gated_norm(torch.cat(outputs), z[tokens], weights, shape)
        write_states(state, held, s[None])
        state.conv[held] = by_head(raw[None, 1 - TAPS :], shape)


def delta_block(s: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """delta_step of up to 64 tokens at once: (state, outputs [tokens, value_heads, value_dim]).

    s: [value_heads, key_dim, value_dim] f32. A token's arithmetic depends on none that follow it.
    """
    count = len(x.g)
    q, k, v, g, beta = (part.transpose(0, 1) for part in x)
    q, k, v = (F.pad(part, (0, 0, 0, DELTA_BLOCK - count)) for part in (q, k, v))
    g, beta = (F.pad(part, (0, DELTA_BLOCK - count)) for part in (g, beta))
    total = g.cumsum(1)
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    mixed = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    both = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=-1)
    eye = torch.eye(DELTA_BLOCK, device=s.device)
    u, w = torch.linalg.solve_triangular(eye + mixed, both, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    new = u - w @ s
    o = (q * total.exp()[..., None]) @ s + (q @ k.mT * decay) @ new
    last = total[:, -1:]
    s = s * last[..., None].exp() + (k * (last - total).exp()[..., None]).mT @ new
    return s, o[:, :count].transpose(0, 1)


delta_chunk = op(delta_chunk_ref)
