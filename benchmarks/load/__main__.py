"""`python -m benchmarks.load [run | report | selfcheck | stub]`; no word means run."""

import sys
from collections.abc import Sequence
from importlib import import_module

# What a command needs it imports itself: help is shown without any, and client processes, which
# are spawned, import this module, too.
COMMANDS = {"run": "options", "report": "report", "selfcheck": "selfcheck", "stub": "stub"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 something failed, 2 the user's mistake."""
    given = list(sys.argv[1:] if argv is None else argv)
    named = given[:1] if given and given[0] in COMMANDS else ["run"]
    rest = given[1:] if given[:1] == named else given
    try:
        return import_module(f"benchmarks.load.{COMMANDS[named[0]]}").main(rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ConnectionError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # Client processes are spawned: they import this module under another name.
    sys.exit(main())
