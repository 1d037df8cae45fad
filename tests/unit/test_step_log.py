"""A worker's log of steps: what each line says."""

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.engines import running
from tests.support.laws import sections
from tests.support.prompts import problem_ids
from tests.support.reference import sampling_of
from worker.errors import UserError
from worker.observe.step_log import StepLine, StepLog

NUM, MAX_TOKENS = 6, 12


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a decode worker that has served NUM requests by itself."""
    place = tmp_path_factory.mktemp("steps")
    config = sections("never", step_log=str(place))
    with running(config, num_prefill=0) as cluster:
        found = cluster.client.generate(
            problem_ids(NUM), [sampling_of(0, MAX_TOKENS) for _ in range(NUM)]
        )
        assert not [each.error for each in found if each.error]
        cluster.wait_idle()
    (path,) = place.iterdir()
    return path


def test_each_step_has_a_line_that_adds_up(log: Path) -> None:
    lines = [msgspec.json.decode(text, type=StepLine) for text in log.read_bytes().splitlines()]
    assert [line.step for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line.tokens for line in lines) == sum(map(len, problem_ids(NUM)))
    for line in lines:
        assert bool(line.rows) != bool(line.tokens)
        assert line.longest <= line.num_keys <= max(line.rows, 1 + NUM) * line.longest
        assert line.launch_us > 0
        assert line.wait_us >= 0
    assert not lines[0].joined
    assert any(line.joined for line in lines)
    assert [line.at for line in lines] == sorted(line.at for line in lines)


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"engine\.step_log: .*/file/decode-0.jsonl: "):
        StepLog(str(tmp_path / "file"), "decode-0", torch.device("cpu"))
