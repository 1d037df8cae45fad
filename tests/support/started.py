"""A process that was started for a test, with its output in a file."""

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path


class Started(ABC):
    """One that stands for a container; `process` is its first one, or ends with that."""

    def __init__(self, name: str, words: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ended(self) -> str:
        """Its output if it has ended, else ""."""
        return f"{self.name} ended\n{self.output}" if self.process.poll() is not None else ""

    @abstractmethod
    def words(self, *command: str) -> list[str]:
        """The words that run a command in it."""

    @abstractmethod
    def terminate(self) -> None:
        """SIGTERM to its first process."""

    def run(self, *command: str) -> str:
        """What a command prints in it; it has to succeed."""
        done = subprocess.run(
            self.words(*command), timeout=120, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {command}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def end(self, timeout_s: float) -> int:
        self.terminate()
        return self.process.wait(timeout_s)
