"""The README's lines, run as they stand: each that this machine can run does what it says.

Lines that install are run by `.ci/run` and tests/deploy/newcomer.py; those of NOT_HERE need what
no machine of CI has. tests/deploy/test_integrity.py reads them at least.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import INSIDE, REPOSITORY, Serve
from tests.e2e.shared import Clusters, Ray
from tests.support.patience import HANG_S

BIN = Path(sys.executable).parent
TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SHELL = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
LINES = [line.partition(" #")[0].strip() for line in SHELL.splitlines() if line.strip()]
(SNIPPET,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(CURL,) = (line for line in LINES if line.startswith("curl"))
ANSWER = "#### 70"
MACHINE = ".venv/bin/kvlane doctor"  # it would find our own port taken

NOT_HERE = {  # what a line has, and why it cannot run
    "/models/": "a model of gigabytes",
    "Qwen/": "the hub",
    "helm ": "Kubernetes", "kubectl ": "Kubernetes",
    "pip install": "run by .ci/run, tests/deploy/newcomer.py and, of smollm2, test_smollm2.py",
}  # fmt: skip
# Commands against what the line of two workers a role serves, in the README's order, with what
# they print; `serve` lines are for themselves.
SAYS = {
    "status": "decode-1",
    "top": "tokens/s",
    "restart": "",
    "scale": "",
    "role": "",
    "drain": "",
    "doctor --ports": "mooncake",
    "chat": "Hello",
    "cache": "decode-0",
    "bench": "requests    64 of 64 served",
    "config": "page_size",
}


def runnable() -> list[str]:
    return [line for line in LINES if not any(part in line for part in NOT_HERE)]


def of(command: str) -> list[str]:
    return [line for line in runnable() if re.match(rf"\.venv/bin/kvlane {command}\b", line)]


def test_every_line_is_run_here_or_said_why_not() -> None:
    ours = {line for command in ("serve", "down", *SAYS) for line in of(command)} | {MACHINE}
    job = {line for line in runnable() if line.startswith("ray job submit")}
    assert len(job) == 1
    assert set(runnable()) == ours | job | {CURL}


class Terminal(Serve):
    """The lines of one user, who started `serve` by one of them."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PATH": f"{BIN}:{os.environ['PATH']}"}

    def line(self, text: str, *, given: str = "", code: int = 0) -> str:
        """What a line prints, on both streams."""
        done = subprocess.run(
            ["bash", "-c", here(text)], cwd=REPOSITORY, env=self.environment(), input=given,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == code, f"{text}\n{done.stdout}\n{self.output}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, text: str, stop: signal.Signals | None = signal.SIGINT) -> Iterator[None]:
        """While the line serves; `stop`: what ends it; None: it ends by itself."""
        environment = self.environment()
        with (self.root / "output").open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {here(text)}"], cwd=REPOSITORY, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            self.wait_ready()
            assert json.loads(self.line(f"{CURL} --silent"))["choices"][0]["message"][
                "content"
            ].endswith(ANSWER)
            yield
            if stop is not None:
                self.process.send_signal(stop)
            assert self.process.wait(HANG_S) == 0, self.output
        finally:
            self.end()


def here(line: str) -> str:
    """The line with the programs of this Python, where the clone has no .venv."""
    return line if (REPOSITORY / ".venv").exists() else line.replace(".venv/bin/", f"{BIN}/")


@pytest.fixture
def terminal(clusters: Clusters) -> Iterator[Terminal]:
    clusters.end_all()
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp") as root:  # short, for Ray's sockets
        yield Terminal(Path(root))


@pytest.mark.whole
@pytest.mark.parametrize("line", of("serve"))
def test_a_line_that_serves_answers_the_readme_s_question(terminal: Terminal, line: str) -> None:
    if "tiny-hybrid" in line:  # another name than the question's
        line += " --set model.served_name=tiny"
    with terminal.serving(line):
        if line == of("serve")[0]:
            assert terminal.line(f"python -c '{SNIPPET}'")


@pytest.mark.whole
def test_the_commands_beside_it_do_what_they_say(terminal: Terminal) -> None:
    (serve,) = (line for line in of("serve") if "--decode 2" in line)
    with terminal.serving(serve, stop=None):
        for command, says in SAYS.items():
            (line,) = of(command)
            printed = terminal.line(line, given="hello\n")
            assert says in printed, f"{line}\n{printed}"
            assert json.loads(terminal.line(f"{CURL} --silent"))["choices"]
        terminal.line(of("down")[0])
    terminal.line(of("down")[0])  # nothing to do is no error
    assert terminal.line(MACHINE).endswith(" ok\n")


@pytest.mark.whole
def test_ray_job_submit_serves_on_a_ray_that_runs(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.environ.get(INSIDE):
        pytest.skip("needs a network namespace: others could reach it")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")  # the node has the dependencies
    ray = Ray(whole=True)
    try:
        terminal.ray = ray.address
        environment = terminal.environment() | {"RAY_AUTH_MODE": "disabled"}
        environment.pop("RAY_AUTH_TOKEN")
        (line,) = (each for each in LINES if each.startswith("ray job submit"))
        output = terminal.root / "output"
        with output.open("wb") as file:
            job = terminal.process = subprocess.Popen(
                ["bash", "-c", line], cwd=REPOSITORY, env=environment, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        terminal.wait_ready()
        answer = json.loads(terminal.line(f"{CURL} --silent"))
        assert answer["choices"][0]["message"]["content"].endswith(ANSWER)
        environment["RAY_ADDRESS"] = ray.address
        down = ["bash", "-c", here(of("down")[0])]
        subprocess.run(down, cwd=REPOSITORY, env=environment, check=True, timeout=HANG_S)
        assert job.wait(HANG_S) == 0, terminal.output
    finally:
        ray.end()
