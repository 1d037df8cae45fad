"""What `serve` refuses before anything starts: so it needs no lane of clusters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


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
    ids=["unknown key", "too many ranks", "no such model"],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for name in ("tmp", "run"):
        (tmp_path / name).mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", *arguments],
        cwd=REPOSITORY, env={**os.environ, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == message if message.startswith("error") else message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "tmp").iterdir())
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
