"""Stored responses where one router is stopped and one killed: right, or 429, and then right."""

from pathlib import Path

import pytest

from tests.fault.stopped_routers import at_routers
from tests.support import pairwise


@pytest.mark.parametrize("num", pairwise.in_whole((2,), (4,)))
def test_others_say_what_is_right_or_when_to_ask_again(tmp_path: Path, num: int) -> None:
    seen = set[int]()
    for stage, answers, wrong in at_routers(tmp_path / "model", num):
        assert not wrong, (stage, wrong)
        seen |= {answer.status for answer in answers}
    assert seen == {200, 404, 429}
