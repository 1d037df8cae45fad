"""State files and directories that outlive nobody."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.serve import lifetime
from cluster.serve.lifetime import RayDirectory, Running, StateFile, find_running
from worker.errors import UserError


def running(address: str) -> Running:
    return Running(1, address, True, "disabled", ("http://127.0.0.1:8000",))


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
