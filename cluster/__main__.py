"""The command: `kvlane …` or `python -m cluster …`"""

import signal
import sys


def main() -> int:
    """Run one command; the exit code."""
    # Imports may swallow KeyboardInterrupt, and nothing has begun: SIGINT just ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.search_path import forget_directory

    forget_directory()
    from cluster import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
