"""Log-probabilities of the drawn and the likeliest tokens, without [rows, vocab] in f32.

One pass finds the largest logits and the sums of blocks of the vocabulary. Then one program a row
takes the likeliest block leader again and again, and reads that block once more for its next
leader. So only blocks with a reported token are read again.
"""

import torch
from torch import Tensor

from worker.ops.op import op


def logprobs_ref(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Values [n, 1 + num_top] f32 and ids i64: of the drawn token, then of the likeliest ones.

    logits: [n, vocab], unchanged; token: [n] i64. Of equally likely tokens lower ids come first.
    """
    x = logits.float() + 0.0  # no -0
    bits = x.view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ranked = (order << 32) + (0x7FFFFFFF - torch.arange(x.shape[1], device=x.device))
    top = 0x7FFFFFFF - (ranked.topk(num_top, dim=-1).values & 0xFFFFFFFF)
    ids = torch.cat((token[:, None], top), 1)
    return x.gather(1, ids) - x.logsumexp(-1, keepdim=True), ids


logprobs = op(logprobs_ref)
