"""Every `kvlane` line of the README is one that the program takes, with settings that exist."""

import re
import shlex

import pytest

from cluster.cli import load_config, parser_of_commands
from tests.support.commands import REPOSITORY

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
PROGRAM = re.compile(r"^(?:\.venv/bin/kvlane|ray job submit .* -- python -m cluster) (.+)$")
OWN_PARSER = ("bench",)  # `tests/benchmarks` tries its options


def lines() -> list[str]:
    blocks = BLOCK.findall((REPOSITORY / "README.md").read_text())
    found = [PROGRAM.match(line) for block in blocks for line in block.splitlines()]
    return [match[1] for match in found if match is not None]


def test_there_are_lines() -> None:
    assert len(lines()) > 15
    assert {"serve", "status", "restart", "doctor", "config"} <= {
        each.split()[0] for each in lines()
    }


@pytest.mark.parametrize("line", lines())
def test_a_line_is_taken(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] in OWN_PARSER:
        return
    args = parser_of_commands().parse_args(words)
    if words[0] in ("serve", "config", "restart"):
        load_config(args)


@pytest.mark.parametrize("line", ["serve --no-such-flag", "role decode-1 router", "fly"])
def test_what_is_no_line_is_refused(line: str) -> None:
    with pytest.raises(SystemExit):
        parser_of_commands().parse_args(line.split())
