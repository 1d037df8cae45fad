"""What may be asked of an engine at all, whoever asks: numbers that the device's tensors can hold.

A worker's peers check more before they ask. But one of them may have gone bad, and a number that
does not fit raises in the engine's thread, which ends the process with everybody's requests.
"""

import math
from collections.abc import Sequence

import msgspec

from worker.api import MAX_STOP_IDS, Prefill, Sampling
from worker.errors import UserError

MAX_COUNT = 2**30  # so that a prompt's length can be added


def fits(sampling: Sampling) -> bool:
    """Whether the device's tensors can hold it; the router's limits are narrower."""
    numbers = [each for each in msgspec.structs.astuple(sampling) if isinstance(each, float)]
    numbers += [bias for _, bias in sampling.logit_bias]
    counts = sampling.top_k, sampling.min_tokens
    return (
        all(map(math.isfinite, numbers))
        and all(0 <= count < MAX_COUNT for count in counts)
        and 0 <= sampling.seed < 2**63
    )


def known(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all of these are tokens."""
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def check_prefill(asked: Prefill, vocab_size: int, num_eos_ids: int) -> None:
    """Raise a UserError if a prompt, or the draw of what follows it, cannot be computed."""
    if not known(asked.tokens, vocab_size):
        raise UserError(f"token ids must be below {vocab_size}")
    if not (math.isfinite(asked.link_bytes_per_s) and asked.link_bytes_per_s >= 0):
        raise UserError("a rate that is none")
    sampling = asked.sampling
    if sampling is None:
        return
    if not 1 <= asked.num_prompt_tokens <= len(asked.tokens):
        raise UserError("a prompt is a part of the tokens")
    if not (sampling.is_plain and fits(sampling)):
        raise UserError("a draw that is not plain, or out of range")
    stops = sampling.stop_ids
    if len(stops) > MAX_STOP_IDS - num_eos_ids or not known(stops, vocab_size):
        raise UserError("stop ids that are none, or too many")
