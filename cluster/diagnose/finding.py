"""One finding of a check, and how all of them are shown."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from worker.errors import UserError

REFUSED = "serve refuses to start with it"
# A message of ours most often ends with the remedy.
WITH_REMEDY = re.compile(r"(.+?)(?:; |\. |: (?=pip |--))(.+)", re.DOTALL)
FIELDS = ("subject", "level", "what", "why", "remedy", "where", "figures")  # of JSON
SUBJECTS = {"cluster": "ports", "model": "model"}  # section of a field -> what it is about


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # it works, and not as well as it could
    FAILURE = "failure"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and what is there. An ok one has nothing to say beyond `what`."""

    level: Level
    subject: str
    what: str
    why: str = ""  # it matters
    remedy: str = ""
    where: str = ""  # worker or node; "": this machine
    figures: dict[str, float] | None = field(default=None, hash=False)  # that `what` rounds
    error: UserError | None = field(default=None, compare=False)  # with which `serve` refuses it


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
failure = partial(Finding, Level.FAILURE)


def refused(error: UserError) -> Finding:
    """A failure with which `serve` does not start."""
    subject = SUBJECTS.get((error.param or "").split(".")[0], "config")
    parts = WITH_REMEDY.fullmatch(str(error))
    what, remedy = parts.groups() if parts else (str(error), f"change {error.param or 'it'}")
    return failure(subject, what, REFUSED, remedy, error=error)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise the errors among the findings as one: a line an error, with path and remedy."""
    errors = [finding.error for finding in findings if finding.error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserError("\n".join(map(str, errors)), errors[0].param)


def shown(findings: Sequence[Finding], *, as_json: bool) -> str:
    """All of them, as text or JSON."""
    if as_json:
        rows = [{name: getattr(finding, name) for name in FIELDS} for finding in findings]
        return json.dumps(rows, indent=2)
    lines: list[str] = []
    for f in findings:
        place = f"{f.where}: " if f.where else ""
        lines.append(f"{f.level:<8} {f.subject:<10} {place}{f.what}")
        lines += [f"{'':19} {text}" for text in (f.why, f.remedy) if text]
    count = Counter(finding.level for finding in findings)
    total = ", ".join(
        f"{count[level]} {level}{'s' * (level is not Level.OK and count[level] > 1)}"
        for level in reversed(Level)
        if count[level]
    )
    return "\n".join([*lines, total])


def has_failure(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a failure."""
    return any(finding.level is Level.FAILURE for finding in findings)
