"""The command: `kvlane …` or `python -m cluster …`"""

import os
import signal
import sys


def main() -> int:
    """Run one command; the exit code."""
    # Imports may swallow KeyboardInterrupt, and nothing has begun: SIGINT just ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.search_path import forget_directory

    forget_directory()
    from cluster import cli

    try:
        code = cli.main()
        sys.stdout.flush()
    except BrokenPipeError:  # `kvlane config | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
