"""A real Prometheus that scrapes a cluster as deploy/compose/prometheus.yml says."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from helm.generate import COMPOSE, alerts

ADDRESS = "127.0.0.1:9090"
SCRAPE_S = 1  # of a run of minutes; Compose's is for days
READY_S = 30.0


@dataclass(frozen=True)
class Series:
    """One line of an answer; gaps and NaN are left out."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The process.

    Args:
        root: for its files.
        targets: further addresses to scrape, as the same job.
        filled: of the alerts, other than Compose's.
    """

    def __init__(self, root: Path, targets: list[str], **filled: object) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            raise SystemExit("no prometheus: apt-get install --no-install-recommends prometheus")
        config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
        (job,) = config["scrape_configs"]
        for each in job["http_sd_configs"]:
            each["refresh_interval"] = "1s"
        job["static_configs"] = [{"targets": targets}]
        (root / "prometheus.yml").write_text(yaml.safe_dump(config))
        rules = re.sub(r"( for: )\d+m", rf"\g<1>{2 * SCRAPE_S}s", alerts(**filled))
        (root / config["rule_files"][0]).write_text(rules)
        with (root / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary, f"--config.file={root}/prometheus.yml",
                 f"--storage.tsdb.path={root}/data", f"--web.listen-address={ADDRESS}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._client = httpx.Client(base_url=f"http://{ADDRESS}", timeout=30, trust_env=False)
        self._log = root / "prometheus.log"
        self._wait_ready()

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

    def range(self, query: str, start: float, end: float, step_s: float) -> list[Series]:
        """What a graph of the query would show.

        Raises:
            ValueError: Prometheus refuses it.
        """
        asked = {"query": query, "start": start, "end": end, "step": step_s}
        answer = self._client.post("/api/v1/query_range", data=asked).json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return [_series(each) for each in answer["data"]["result"]]

    def values(self, label: str, matcher: str) -> list[str]:
        """Values of a label, as a variable of Grafana asks for them."""
        answer = self._client.get(f"/api/v1/label/{label}/values", params={"match[]": matcher})
        return answer.raise_for_status().json()["data"]

    def end(self) -> None:
        """With the process."""
        self._client.close()
        self._process.terminate()
        self._process.wait(30)


def _series(given: dict[str, Any]) -> Series:
    points = ((float(at), float(value)) for at, value in given["values"])
    finite = tuple((at, value) for at, value in points if value - value == 0)
    return Series(given["metric"], finite)
