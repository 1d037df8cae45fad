"""Where the time of one choice went."""

from operator import attrgetter
from typing import Literal

from msgspec import Struct

from worker.api import PeerId, Stages


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
# Those that a worker tells.
TOLD = tuple({*Stages.__struct_fields__} & {*StageTimes.__struct_fields__} - {"prefilled_by"})
STAGES = tuple(field.removesuffix("_s") for field in FIELDS)
_seconds = attrgetter(*FIELDS)


def stage_times(
    at: Stages, decoded_by: PeerId, queued_s: float, first_token_s: float, decode_s: float
) -> StageTimes:
    """Of a choice that was `at` workers so long.

    queued_s: here, before its first token; first_token_s: from its arrival; decode_s: from then on.
    """
    after_s = at.transfer_s + at.decode_queue_s + at.first_step_s
    before_s = queued_s + at.prefill_queue_s + at.prefill_s + (0.0 if at.late else after_s)
    messages_s, decode_s = first_token_s - before_s, decode_s - (after_s if at.late else 0.0)
    if decode_s < 0:  # the first token came late, maybe with others
        messages_s, decode_s = messages_s + decode_s, 0.0
    return StageTimes(
        router_queue_s=queued_s,
        messages_s=max(0.0, messages_s),
        decode_s=decode_s,
        first_token_s=first_token_s,
        first_token_after="prefill" if at.late else "first_step",
        prefilled_by=at.prefilled_by.partition("/")[0] or None,
        decoded_by=decoded_by.partition("/")[0],
        **{name: getattr(at, name) for name in TOLD},
    )


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
