"""What may be asked of an engine at all, whoever asks: numbers that the device's tensors can hold.

A worker's peers check more before they ask. But one of them may have gone bad, and a number that
does not fit raises in the engine's thread, which ends the process with everybody's requests.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from worker.api import MAX_STOP_IDS, Prefill, Sampling
from worker.errors import UserError

MAX_COUNT = 2**30  # so that a prompt's length can be added


class PromptLimits(NamedTuple):
    """Which prompts a prefill worker can compute, and in which chunks."""

    max_len: int  # tokens of a prompt that a row's page table can hold
    vocab_size: int = 2**31
    num_eos_ids: int = 0  # of the model, beside which a request has stop ids
    grain: int = 1  # chunks that are not a prompt's last end at multiples of it


def fits(sampling: Sampling) -> bool:
    """Whether the device's tensors can hold it; the router's limits are narrower."""
    numbers = [value for value in msgspec.structs.astuple(sampling) if isinstance(value, float)]
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


def check_prefill(asked: Prefill, limits: PromptLimits) -> None:
    """Raise a UserError if a prompt, or the draw of what follows it, cannot be computed."""
    if not known(asked.tokens, limits.vocab_size):
        raise UserError(f"token ids must be below {limits.vocab_size}")
    if len(asked.tokens) > limits.max_len:
        raise UserError(f"{len(asked.tokens)} tokens of prompt; the limit here is {limits.max_len}")
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
    if len(stops) > MAX_STOP_IDS - limits.num_eos_ids or not known(stops, limits.vocab_size):
        raise UserError("stop ids that are none, or too many")
