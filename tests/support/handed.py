"""Run a script that was written for an earlier layout of the packages.

    python -m tests.support.handed SCRIPT [ITS ARGUMENTS]

Its imports find the modules where they are now. Of `checkpoints.py` two cases ask that four bits
are refused (K5 nvfp4, K6 w4a16): those are served now, and fail.
"""

import runpy
import sys
from importlib import import_module
from pathlib import Path

MOVED = {
    "worker.model.shape": "worker.config.checkpoint.shape",
    "worker.model.files": "worker.weights.files",
}


def main(arguments: list[str]) -> None:
    """arguments: the script's path, and its own."""
    script, *_ = sys.argv = arguments
    sys.path[0] = str(Path(script).parent)
    for name, now in MOVED.items():
        sys.modules[name] = import_module(now)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
