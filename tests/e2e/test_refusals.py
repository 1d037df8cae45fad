"""What `serve` refuses before anything starts: so it needs no lane of clusters."""

import os
from pathlib import Path

import pytest

from tests.support.commands import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--set", "prefill.replica=2"),
            "error: prefill.replica: unknown key, did you mean prefill.replicas?\n",
        ),
        (
            ("--set", "decode.tp=3"),
            "error: decode.tp: 4 attention heads cannot be divided among 3 ranks\n",
        ),
        (("--model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = run(["serve", *arguments], env={**os.environ, **own})
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == message if message.startswith("error") else message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "tmp").iterdir())
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
