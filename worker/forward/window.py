"""WindowShape: what a decode step's work depends on besides its rows."""

from typing import NamedTuple

from worker.forward.batch import HostLengths


class WindowShape(NamedTuple):
    """Of a step that verifies a window of tokens of each row."""

    width: int  # tokens of each window: the last drawn one and the drafts behind it
    max_seq_len_ub: int  # host bound of the KV lengths after the step, with whole windows
    host: HostLengths | None = None  # None: wider than 1, so nobody knows them; or captured
