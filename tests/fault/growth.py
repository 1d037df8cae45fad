"""Whether the processes of a cluster grow under an even load, by what they are like all the while.

The first half fills pools, tiers and allocators. In the second one a series may rise, by its line
of regression, by so little that it would be within what a measurement varies.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

from tests.fault.chaos.faults import Cluster
from tests.support.disturbed import size_of
from tests.support.places import on_disk_bytes

SHARE, LEAST_MIB, FEW = 0.03, 6.0, 3.0  # that a size, or a number, may rise in the second half
NUM_SAMPLES = 120
MIB = 1 << 20


class Rise(NamedTuple):
    """Of one series, in the second half of a measurement."""

    mean: float
    by: float  # of its line from the half to the end
    is_growth: bool


def rises(samples: list[tuple[float, dict[str, float]]]) -> dict[str, Rise]:
    """Of every series of (seconds, values by name); one that ends or begins late is none."""
    half = [each for each in samples if each[0] >= samples[-1][0] / 2]
    found = dict[str, Rise]()
    for name in set[str].intersection(*(set(values) for _, values in half)):
        line = [values[name] for _, values in half]
        times = [at for at, _ in half]
        by, mean = linear_regression(times, line).slope * (times[-1] - times[0]), fmean(line)
        most = max(LEAST_MIB, SHARE * mean) if name.endswith("MiB") else FEW
        found[name] = Rise(mean, by, by > most)
    return found


def sizes_of(name: str, pid: int) -> dict[str, float]:
    """What may not grow of a process; nothing if it has ended."""
    if (size := size_of(pid, "")) is None:
        return {}
    mib = {"private": size.num_bytes / MIB, "mapped": size.num_mapped_bytes / MIB}
    counted = {f"{name} threads": size.num_threads, f"{name} files": size.num_files}
    return {f"{name} {kind} MiB": value for kind, value in mib.items()} | counted


class Watched:
    """Samples of a cluster's workers and routers, and of a directory, while `until` lasts."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []
        self.most_on_disk = 0
        self._cluster, self._directory = cluster, directory

    async def watch(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Take NUM_SAMPLES in so many seconds, until it has ended."""
        began_at = time.monotonic()
        while not ended():
            self.samples.append((time.monotonic() - began_at, await self._sample()))
            await asyncio.sleep(seconds / NUM_SAMPLES)

    async def _sample(self) -> dict[str, float]:
        pids = {row["name"]: row["pid"] for row in await self._cluster.workers()}
        pids |= await self._cluster.pids("router", every=True)
        on_disk = on_disk_bytes(self._directory)
        self.most_on_disk = max(self.most_on_disk, on_disk)
        values: dict[str, float] = {"directory MiB": on_disk / MIB}
        for name, pid in pids.items():
            values |= sizes_of(f"{name} ({pid})", pid)
        return values

    def told(self) -> tuple[dict[str, Any], bool]:
        """Figures by series, and whether one has grown or ended; prints them."""
        found = rises(self.samples)
        ended = sorted(set(self.samples[len(self.samples) // 2][1]) - set(found))
        for name, rise in sorted(found.items()):
            mark = " GROWS" if rise.is_growth else ""
            print(f"{name:40} {rise.mean:9.1f} {rise.by:+7.2f}{mark}")
        for name in ended:
            print(f"{name:40} has ended")
        grows = [name for name, rise in found.items() if rise.is_growth]
        return {name: rise._asdict() for name, rise in found.items()}, bool(ended or grows)
