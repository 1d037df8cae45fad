"""Lines of a start and of logs, for people and for machines."""

import io
import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest

from cluster.control.replicas import Event, State
from cluster.logs import JsonLines
from cluster.serve.progress import JsonScreen, Screen, Stages
from cluster.sites.process import Stage

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


def record(message: str, *args: object, failed: bool = False) -> dict[str, Any]:
    """What a machine reads of a line."""
    cause = sys.exc_info() if failed else None
    made = logging.LogRecord("kvlane.decode", logging.DEBUG, "", 0, message, args, cause)
    said = JsonLines("decode-0").format(made)
    assert "\n" not in said
    fields: dict[str, Any] = json.loads(said)
    at = datetime.fromisoformat(fields.pop("time")).timestamp()
    assert abs(at - made.created) < 2e-3
    return fields


def test_the_ids_of_a_line_are_fields() -> None:
    said = record("req_id=%s from %s admitted, %d tokens", "a-0", "router-0/1", 3)
    assert said == {
        "level": "DEBUG", "process": "decode-0", "logger": "kvlane.decode", "req_id": "a-0",
        "message": "req_id=a-0 from router-0/1 admitted, 3 tokens",
    }  # fmt: skip
    later = record("xfer_id=%s: its lease ended", "job:17,a-0:1:3")
    assert later["xfer_id"] == "job:17,a-0:1:3", "as clients and `Fetch.xfer_id` make them"
    assert record("req_id=a-0; the request ends: no req_id=b")["req_id"] == "a-0"
    assert "req_id" not in record("%d decode graphs", 3)


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        said = record("req_id=%s failed", 'a"b', failed=True)
    assert said["req_id"] == 'a"b'
    assert said["exception"].endswith("ValueError: two\nlines")


def test_what_serve_says_is_an_object_a_line() -> None:
    out = io.StringIO()
    screen = JsonScreen(out)
    Stages(screen).show(LOADING, "")
    screen.event(Event("decode-0", State.LOST, "it died"))
    screen.hint("Ctrl-C stops it.")
    lines = [json.loads(line) for line in out.getvalue().split("\n")[:-1]]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "loading decode-0"),
        ("WARNING", "it died"),
    ]
    assert [line["process"] for line in lines] == ["serve", "decode-0"]
    assert lines[1]["state"] == "lost"
