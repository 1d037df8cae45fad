"""State files and directories that outlive nobody; lines of a start and of logs."""

import io
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.control.replicas import Event, State
from cluster.logs import JsonLines
from cluster.serve import lifetime
from cluster.serve.lifetime import RayDirectory, Running, StateFile, find_running
from cluster.serve.progress import JsonScreen, Screen, Stages
from cluster.sites.process import Stage
from worker.errors import UserError


def running(address: str) -> Running:
    return Running(1, address, True, "token", "/run/token", ("http://127.0.0.1:8000",))


def test_one_running_serve_is_found_and_two_have_to_be_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no kvlane runs here"):
        find_running(tmp_path)
    first = StateFile(tmp_path)
    first.write(running("a:1"))
    assert find_running(tmp_path) == running("a:1")
    second = StateFile(tmp_path)
    second.write(running("b:2"))
    with pytest.raises(UserError, match="--address a:1"):
        find_running(tmp_path)
    assert find_running(tmp_path, "b:2").address == "b:2"
    second.remove()
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_state_file_of_a_dead_serve_is_removed(tmp_path: Path) -> None:
    (tmp_path / "serve-x.json").write_text('{"pid": 1}')
    with pytest.raises(UserError, match="no kvlane runs here"):
        find_running(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_a_dead_serve_is_removed_and_of_a_live_one_kept(tmp_path: Path) -> None:
    dead = RayDirectory(tmp_path)
    (dead.path / "session").mkdir()
    os.close(dead.lock)  # as the kernel does for a process that was killed
    theirs = tmp_path / f"{lifetime.PREFIX}-of-the-user"
    theirs.mkdir()
    live = RayDirectory(tmp_path)
    other = RayDirectory(tmp_path)
    assert not dead.path.exists()
    assert live.path.exists()
    live.remove()
    live.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == [theirs]


def test_a_directory_that_was_never_locked_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{lifetime.PREFIX}{'x' * lifetime.NUM_RANDOM}").mkdir()
    RayDirectory(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_starts_at_once_keep_their_directories(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:  # locks belong to open files, so threads hold several
        made = list(pool.map(lambda _: RayDirectory(tmp_path), range(200)))
    assert sorted(tmp_path.iterdir()) == sorted(each.path for each in made)
    for each in made:
        each.remove()
    assert list(tmp_path.iterdir()) == []


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
