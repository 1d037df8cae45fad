"""A decode worker's figures of the paths of KV to it."""

from worker.api import Message, PeerId


class PullPath(Message, frozen=True):
    """The path of KV from a prefill worker to a decode worker, which has measured it for `doctor`.

    Never on the wire: the control plane asks for it.
    """

    peer: PeerId  # the prefill worker
    transport: str  # name and kind, e.g. "mooncake/tcp"
    bytes_per_s: float = 0.0  # of a pull of `num_bytes` in `num_ranges` ranges
    num_bytes: int = 0
    num_ranges: int = 0
    small_pull_s: float = 0.0  # one pull of a few bytes
    pages_per_s: float = 0.0  # of the model's KV, in the same pull
    page_size: int = 0  # tokens
    error: str = ""  # why nothing can be pulled
