"""Lines of a start, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from cluster.process import Stage
from cluster.screen import Screen, Stages

START = {"decode-0": Stage(), "router-0": Stage()}
LOADING = {"decode-0": Stage("load", 0.5)}
CAPTURING = {"decode-0": Stage("capture", 0.25)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def texts(out: io.StringIO) -> list[str]:
    """The lines that stay, without their times."""
    lines = out.getvalue().split("\n")[:-1]
    return [line.rpartition("\x1b[K")[2].partition("] ")[2] for line in lines]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_each_stage_has_one_line(kind: type[io.StringIO]) -> None:
    out = kind()
    stages = Stages(Screen(out))
    stages.show({}, "")
    for starting in (START, START, LOADING, LOADING, CAPTURING, CAPTURING, {}):
        stages.show(starting, "")
    assert texts(out) == ["loading decode-0, router-0", "capturing graphs of decode-0"]


def test_a_terminal_shows_how_far_the_stage_is() -> None:
    out = Terminal()
    stages = Stages(Screen(out))
    for starting, part in ((START, "0%"), (LOADING, "75%"), (CAPTURING, "62%")):
        stages.show(starting, "")
        assert f"░ {part:>4} (0 s)" in out.getvalue().rpartition("\x1b[K")[2]


def test_what_placement_waits_for_is_shown() -> None:
    out = Terminal()
    Stages(Screen(out)).show({}, "waiting for room for decode-0")
    assert "waiting for room for decode-0" in out.getvalue()
