"""Where the time of one choice went."""

from dataclasses import dataclass

from worker.api import PeerId, Stages


@dataclass(frozen=True, slots=True)
class Spent:
    """The stages of one choice; durations in seconds."""

    router_queue_s: float  # in the router's queue
    stages: Stages  # at the workers, until the first token
    decode_s: float  # from the first token to the last
    first_token_s: float  # from arrival to the first token, by the router's clock
    decoded_by: PeerId
