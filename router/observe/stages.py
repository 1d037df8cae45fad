"""Where the time of one choice went."""

from operator import attrgetter
from typing import Literal

from msgspec import Struct


class StageTimes(Struct, kw_only=True):
    """Where the time of one choice went, in seconds; each stage begins where the one before ends.

    Those before the first token are together shorter than first_token_s; the difference is the time
    that messages took between router and worker. A prefill worker's token comes before the
    transfer, so that a client has it sooner.
    """

    router_queue_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    first_step_s: float
    decode_s: float
    first_token_s: float
    first_token_after: Literal["prefill", "first_step"]
    prefilled_by: str | None
    decoded_by: str


FIELDS = StageTimes.__struct_fields__[:7]
STAGES = tuple(field.removesuffix("_s") for field in FIELDS)  # in the order of their passing
_seconds = attrgetter(*FIELDS)


def by_stage(times: StageTimes) -> dict[str, float]:
    """Seconds by name of the stage."""
    return dict(zip(STAGES, _seconds(times), strict=True))


def vllm_times(times: StageTimes) -> tuple[float, float, float]:
    """Seconds in vLLM's stages: queues; prefill with transfer and first step; decode."""
    queue_s = times.router_queue_s + times.prefill_queue_s
    between_s = times.transfer_s + times.first_step_s
    if times.first_token_after == "prefill":
        return queue_s, times.prefill_s, between_s + times.decode_queue_s + times.decode_s
    return queue_s + times.decode_queue_s, times.prefill_s + between_s, times.decode_s
