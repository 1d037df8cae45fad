"""`python -m benchmarks.load [run | report | selfcheck | stub]`; no word means run."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 something failed, 2 the user's mistake."""
    given = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": _run, "report": _report, "selfcheck": _selfcheck, "stub": _stub}
    command = commands.get(given[0]) if given else None
    try:
        return _run(given) if command is None else command(given[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ConnectionError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# What a command needs it imports itself: help is shown without any, and client processes, which
# are spawned, import this module, too.


def _run(argv: Sequence[str]) -> int:
    from benchmarks.load import options

    asked = options.parse(argv)
    from benchmarks.load import measurement

    return measurement.run(asked)


def _report(argv: Sequence[str]) -> int:
    from benchmarks.load import report

    return report.main(argv)


def _selfcheck(argv: Sequence[str]) -> int:
    from benchmarks.load import selfcheck

    return selfcheck.main(argv)


def _stub(argv: Sequence[str]) -> int:
    """A server with known delays."""
    import msgspec

    from benchmarks.load.stub import StubOptions, serve

    parser = argparse.ArgumentParser(prog="kvlane bench stub", description=_stub.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which is printed")
    for field in msgspec.structs.fields(StubOptions):
        flag = "--" + field.name.removesuffix("_s").replace("_", "-")
        kind = float if field.type is not int else int
        parser.add_argument(flag, dest=field.name, type=kind, default=field.default)
    args: dict[str, Any] = vars(parser.parse_args(argv))
    from benchmarks.load.fleet import run_loop

    host, port = args.pop("host"), args.pop("port")
    run_loop(lambda: serve(StubOptions(**args), host, port))
    return 0


if __name__ == "__main__":
    # Client processes are spawned: they import this module under another name.
    sys.exit(main())
