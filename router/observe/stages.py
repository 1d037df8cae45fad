"""Where the time of one choice went."""

from operator import attrgetter
from typing import Literal

from msgspec import Struct


class StageTimes(Struct, kw_only=True):
    """Where the time of one choice went, in seconds; each stage begins where the one before ends.

    Together they are the time from the choice's arrival to its last token. A prefill worker's token
    comes before transfer, decode_queue and first_step, so that a client has it sooner; else these
    are before the first token. KV is pulled while later parts of the prompt are still computed:
    pull_s lies beside prefill and transfer, and is no further stage.
    """

    router_queue_s: float
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float  # for which decode waited for KV, once the prefill was over
    decode_queue_s: float
    first_step_s: float
    messages_s: float  # of the time to the first token: between router and worker
    decode_s: float
    first_token_s: float
    first_token_after: Literal["prefill", "first_step"]
    prefilled_by: str | None
    decoded_by: str
    pull_s: float  # in which KV came from the prefill worker
    pull_span_s: float  # from the begin of the first pull to the end of the last one
    pulled_bytes: int


FIELDS = StageTimes.__struct_fields__[:8]
STAGES = tuple(field.removesuffix("_s") for field in FIELDS)
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
