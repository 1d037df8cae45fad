"""A decode step of a delta net: fold the tokens that the last step accepted, compute a window.

Speculation by replay: rejected drafts are never folded, so nothing is restored. A step reads the
state of the first `folded` tokens, folds the `pending` ones, whose raw inputs the last window has
left in the ring, stores the state, and computes its own window without storing. A window of one
token is always accepted and folded at once.
"""

import torch
from torch import Tensor

from worker.attention.recurrent.delta_net import (
    TAPS,
    DeltaState,
    DeltaWeights,
    Inputs,
    by_channel,
    by_head,
    convolved,
    delta_step,
    gated_norm,
    inputs,
    read_states,
    write_states,
)
from worker.forward.batch import StateWindows
from worker.ops.op import op


def delta_window_ref(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, rows: StateWindows
) -> Tensor:
    """Returns [n · width, value_width] of the dtype of `packed`: the heads' normed, gated outputs.

    packed: [n · width, packed_width]. Slots and ring are written.
    """
    shape, width, n = state.shape, rows.width, len(rows.live)
    channels, ring = shape.channels, state.ring[rows.live]
    num_lines = ring.shape[1]
    active, slots = rows.live > 0, rows.state_slot[rows.live]
    folded = rows.folded[rows.live]
    pending = (rows.seq_len[rows.live] - folded) * active
    started = (active & (folded > 0)).view(n, 1, 1)
    qkv, z, ba = packed.split([channels, shape.value_width, 2 * shape.value_heads], dim=-1)
    new = torch.cat((qkv, ba), dim=-1).view(n, width, -1)
    conv = by_channel(state.conv[slots], shape)
    known = torch.cat((ring, new), dim=1)
    raw = torch.cat((torch.where(started, conv, 0), known[..., :channels]), dim=1)
    # Behind a row's pending tokens come its window's: `at` is the tokens' lines of `known`.
    token = torch.arange(num_lines + width)
    at = token + (token >= pending[:, None]) * (num_lines - pending[:, None])
    at = at.clamp(max=num_lines + width - 1)
    early = torch.arange(TAPS - 1).expand(n, -1)
    raw = _lines(raw, torch.cat((early, at + TAPS - 1), dim=1))
    ba = _lines(known[..., channels:], at)
    x = inputs(convolved(raw, weights.conv), ba, weights, shape)
    held = read_states(state, slots)
    s = torch.where(started.unsqueeze(-1), held, 0)
    kept = pending + (width == 1)  # tokens that are folded now
    after, outputs = held, list[Tensor]()
    for i in range(num_lines + width):
        s, o = delta_step(s, Inputs(*(part[:, i] for part in x)))
        after = torch.where((i < kept).view(n, 1, 1, 1), s, after)
        outputs.append(o)
    window = pending[:, None] + torch.arange(width)
    o = torch.stack(outputs, dim=1)[torch.arange(n)[:, None], window].flatten(0, 1)
    # A row that is not there has slot 0 and row 0 of the ring, which nobody reads.
    write_states(state, slots, after)
    last = _lines(raw, kept[:, None] + torch.arange(TAPS - 1))
    state.conv[slots] = by_head(torch.where((kept > 0).view(n, 1, 1), last, conv), shape)
    if width > 1:
        state.ring[rows.live, :width] = new
    out = gated_norm(o, z, weights, shape)
    return torch.where(active.repeat_interleave(width)[:, None], out, 0)


def _lines(x: Tensor, at: Tensor) -> Tensor:
    """x[i, at[i, j]] as [n, j, ..]; x: [n, lines, width]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


delta_window = op(delta_window_ref)
