"""Steps under torch's own detector of host syncs."""

import traceback

import torch

from worker.draw.sampler import Result
from worker.run.runner import ModelRunner, Step


def fail_on_sync(runner: ModelRunner) -> None:
    """From now on a plan without masks fails where it waits for the device, as it is enqueued."""
    run = runner.run

    def strict(step: Step) -> Result | None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(step)
        except BaseException:
            traceback.print_exc()  # the engine ends the process next
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = strict
