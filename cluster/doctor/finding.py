"""One finding, and how all of them are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it works, and not as well as it could
    FAILURE = "failure"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and what was found. An ok one has nothing to say beyond `what`."""

    subject: str
    level: Level
    what: str
    why: str = ""  # it matters
    remedy: str = ""
    where: str = ""  # worker or node; "": this machine
    figures: dict[str, float] | None = field(default=None, hash=False)  # that `what` rounds

    def at(self, where: str) -> Finding:
        """The same finding at another place."""
        return replace(self, where=where)

    @property
    def lines(self) -> list[str]:
        """For people."""
        place = f"{self.where}: " if self.where else ""
        first = f"{self.level:<8} {self.subject:<10} {place}{self.what}"
        return [first, *(f"{'':19} {text}" for text in (self.why, self.remedy) if text)]


def ok(subject: str, what: str) -> Finding:
    """Nothing is wrong."""
    return Finding(subject, Level.OK, what)


def warning(subject: str, what: str, why: str, remedy: str) -> Finding:
    """It works, and not as well as it could."""
    return Finding(subject, Level.WARNING, what, why, remedy)


def failure(subject: str, what: str, why: str, remedy: str) -> Finding:
    """Something that was asked for does not work."""
    return Finding(subject, Level.FAILURE, what, why, remedy)


def shown(findings: Sequence[Finding], *, as_json: bool) -> str:
    """All of them."""
    if as_json:
        return json.dumps([asdict(each) for each in findings], indent=2)
    count = Counter(each.level for each in findings)
    total = ", ".join(
        f"{count[level]} {level}{'s' * (level is not Level.OK and count[level] > 1)}"
        for level in reversed(Level)
        if count[level]
    )
    return "\n".join([*(line for each in findings for line in each.lines), total])


def has_failure(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a failure."""
    return any(each.level is Level.FAILURE for each in findings)
