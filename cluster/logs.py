"""How every process of a cluster logs: lines for people, or a JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass
from typing import Any

from cluster.config import ClusterConfig

TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
# As all lines of a request name it; a client's id may have any sign but a space.
IDS = re.compile(r"(?:^|\s)(req_id|xfer_id)=(\S+?)(?=[:,;]?(?:\s|$))")


@dataclass(frozen=True, slots=True)
class Logs:
    """From which level on, and in which form."""

    level: str
    form: str  # "text" or "json"

    @classmethod
    def of(cls, config: ClusterConfig) -> Logs:
        """As configured."""
        return cls(config.log_level, config.log_format)

    def begin(self, process: str) -> None:
        """Let this process, named `process`, log so from now on, to stderr."""
        handler = logging.StreamHandler()
        text = logging.Formatter(TEXT, datefmt="%H:%M:%S")
        handler.setFormatter(JsonLines(process) if self.form == "json" else text)
        logging.basicConfig(level=self.level, handlers=[handler], force=True)
        logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """Each record as one JSON object; the ids that its message names are fields, too.

    Args:
        process: its name in the cluster.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        message = record.getMessage()
        fields = dict(reversed(IDS.findall(message)))  # the first of a name is the line's own
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        fields["logger"] = record.name
        return line(message, self._process, record.levelname, at=record.created, **fields)


def line(message: str, process: str, level: str = "INFO", *, at: float = 0.0, **fields: Any) -> str:
    """One JSON object.

    Args:
        message: for people.
        process: that says it.
        level: of `logging`.
        at: seconds since 1970; 0: now.
        fields: whatever else is known.
    """
    at = at or time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    head = {"time": f"{clock}.{int(at % 1 * 1000):03}Z", "level": level, "process": process}
    return json.dumps({**head, **fields, "message": message}, ensure_ascii=False, default=str)
