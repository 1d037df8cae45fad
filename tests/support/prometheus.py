"""A real Prometheus that scrapes a cluster: apt-get install --no-install-recommends prometheus."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ADDRESS = "127.0.0.1:19090"
READY_S = 30.0


@dataclass(frozen=True)
class Series:
    """One line of an answer; gaps and NaN are left out."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The process, with its files and those of rules below `root`; a context, which ends it."""

    def __init__(
        self, root: Path, scrape: list[dict[str, Any]], interval_s: int, rules: tuple[str, ...] = ()
    ) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise SystemExit(f"no prometheus: {(__doc__ or '').partition(': ')[2]}")
        every = {"scrape_interval": f"{interval_s}s", "evaluation_interval": "1s"}
        config = {"global": every, "scrape_configs": scrape, "rule_files": list(rules)}
        (root / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
        self._log = root / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, f"--config.file={root}/prometheus.yml",
                 f"--storage.tsdb.path={root}/data", f"--web.listen-address={ADDRESS}",
                 "--enable-feature=exemplar-storage"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._client = httpx.Client(base_url=f"http://{ADDRESS}", timeout=30, trust_env=False)
        self._wait_ready()

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Prometheus does not start:\n{self._log.read_text()}")
            time.sleep(0.2)

    def ask(self, what: str, **asked: Any) -> Any:
        """An answer's data; ValueError if Prometheus refuses the question."""
        answer = self._client.get(f"/api/v1/{what}", params=asked).json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]

    def range(self, query: str, start: float, end: float, step_s: float) -> list[Series]:
        """What a graph of the query would show."""
        answer = self.ask("query_range", query=query, start=start, end=end, step=step_s)
        found = []
        for each in answer["result"]:
            points = ((float(at), float(value)) for at, value in each["values"])
            finite = tuple((at, value) for at, value in points if value - value == 0)
            found.append(Series(each["metric"], finite))
        return found

    def values(self, label: str, matcher: str) -> list[str]:
        """Values of a label, as a variable of Grafana asks for them."""
        return self.ask(f"label/{label}/values", **{"match[]": matcher})

    def end(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(30)
