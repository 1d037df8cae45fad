"""What a chain drafter's layer begins with, in one pass: embedding, two norms, one row of both."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.norms import rms_norm_ref
from worker.ops.op import op


def pair_norm_ref(
    ids: Tensor | None,
    tokens: Tensor,
    hidden: Tensor,
    token_weight: Tensor | None,
    hidden_weight: Tensor | None,
    eps: float,
    hidden_first: bool,
) -> Tensor:
    """Each row's embedded token and hidden state, both normed, one behind the other.

    ids: [n] i64, rows of `tokens`; None: row i of `tokens` is row i's token.
    tokens: [vocab_size, size], an embedding; or [n, size].
    hidden: [n, size] of one dtype with `tokens`; each row contiguous.
    token_weight, hidden_weight: [size], of the norms; None, both: neither is normed.
    hidden_first: does the hidden state stand before the token? Returns [n, 2 · size], contiguous.
    """
    token = tokens if ids is None else F.embedding(ids, tokens)
    if token_weight is not None and hidden_weight is not None:
        token = rms_norm_ref(token, token_weight, eps)
        hidden = rms_norm_ref(hidden, hidden_weight, eps)
    return torch.cat((hidden, token) if hidden_first else (token, hidden), dim=-1)


pair_norm = op(pair_norm_ref)
