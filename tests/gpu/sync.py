"""Steps under torch's own detector of host syncs."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.engines import Running, running


@contextmanager
def no_sync() -> Iterator[None]:
    """What waits for the device here fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fail_on_sync(runner: Any) -> None:
    """From now on a plan without masks fails where it waits for the device, as it is enqueued."""
    run = runner.run

    def strict(*work: Any) -> Any:
        try:
            with no_sync():
                return run(*work)
        except BaseException:
            traceback.print_exc()  # the engine ends the process next
            raise

    runner.run = strict


def check_no_wait(sections: dict[str, dict[str, object]], ask: Callable[[Running], object]) -> None:
    """A decode worker that has been asked before waits for the device in no step."""
    with running(sections, num_prefill=0) as cluster:
        ask(cluster)  # warm: allocator, kernels
        fail_on_sync(cluster.workers["decode-0"].engine.runner)
        ask(cluster)
