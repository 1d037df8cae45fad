"""The command: `kvlane …` or `python -m cluster …`"""

import os
import signal
import sys


def main() -> int:
    """Run one command; the exit code."""
    # Imports may swallow KeyboardInterrupt, and nothing has begun: a signal just ends this process,
    # even as the first one of a container, to which the default action does nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    from cluster.search_path import forget_directory

    forget_directory()
    from cluster import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
