"""How every process of a cluster logs: lines for people, or a JSON object a line for machines."""

import json
import logging
import re
import time
from typing import Any

from cluster.config import ClusterConfig

TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
# As all lines of a request name it; a client's id may have any sign but a space.
IDS = re.compile(r"(?:^|\s)(req_id|xfer_id)=(\S+?)(?=[:,;]?(?:\s|$))")


def begin(process: str, config: ClusterConfig) -> None:
    """Let this process, named `process`, log to stderr from now on."""
    handler = logging.StreamHandler()
    text = logging.Formatter(TEXT, datefmt="%H:%M:%S")
    handler.setFormatter(JsonLines(process) if config.log_format == "json" else text)
    logging.basicConfig(level=config.log_level, handlers=[handler], force=True)
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """Each record as one JSON object; the ids that its message names are fields, too."""

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
    """One JSON object. `at`: seconds since 1970; 0: now."""
    at = at or time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    head = {"time": f"{clock}.{int(at % 1 * 1000):03}Z", "level": level, "process": process}
    return json.dumps({**head, **fields, "message": message}, ensure_ascii=False, default=str)
