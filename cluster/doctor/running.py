"""Judges a running cluster: every worker's machine, what differs between them, the ways of KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.doctor.facts import MOONCAKE, Facts, read_facts
from cluster.doctor.finding import Finding, Level, failure, ok, warning
from cluster.doctor.machine import NO_KV, examine
from worker.api import PullPath, Role
from worker.config import TransportConfig

MAX_SKEW_S = 1.0
# Below it a kind carries no more than TCP would.
LEAST_BYTES_PER_S = {"nvlink": 10e9, "rdma": 3e9}
# A shorter pull, or one of shorter ranges, takes as long as its calls: between two H200s ranges of
# 64 KiB, those of the bundled model, came at 3.5 GB/s over NVLink, 19 us each.
MIN_JUDGED_BYTES, MIN_JUDGED_RANGE = 8 << 20, 1 << 20
SPEAK_TO_EACH_OTHER = ("kvlane", MOONCAKE)


@dataclass(frozen=True, slots=True)
class Examination:
    """What one worker's process has found."""

    began_at: float  # by its node's clock
    took_s: float
    facts: Facts
    paths: tuple[PullPath, ...]  # of a decode worker, from each prefill worker


@dataclass(frozen=True, slots=True)
class Patient:
    """One worker, as the controller has asked it."""

    name: str
    role: Role
    asked_at: float  # by the controller's clock
    answered_at: float
    told: Examination | None
    error: str = ""  # why it has told nothing


@dataclass(frozen=True, slots=True)
class Examined:
    """A whole cluster."""

    written: Config  # as the user wrote it
    decided: Config
    patients: tuple[Patient, ...]


def examined_here(measure: Callable[[], Sequence[PullPath]]) -> Examination:
    """The part of the calling worker. `measure`: of its paths."""
    began_at, since = time.time(), time.monotonic()
    facts, paths = read_facts(), tuple(measure())
    return Examination(began_at, time.monotonic() - since, facts, paths)


def of_cluster(wanted: TransportConfig, cluster: Examined) -> Iterator[Finding]:
    """All findings.

    Args:
        wanted: the transport that whoever asks expects; what is auto there is as `cluster` says.
        cluster: what its workers have told.
    """
    for each in cluster.patients:
        if each.told is None:
            yield failure(
                "worker",
                f"it tells nothing: {each.error}",
                "what is wrong with it stays unknown",
                "kvlane status, and the log of serve",
            ).at(each.name)
    told = {each.name: each.told for each in cluster.patients if each.told is not None}
    yield from _together(
        {name: list(examine(cluster.decided, each.facts)) for name, each in told.items()}
    )
    yield from _skew({name: each.facts.versions for name, each in told.items()})
    yield from _clocks(cluster.patients)
    yield from _paths(_name_and_kind(wanted, cluster.written.transport), told)


def _together(found: dict[str, list[Finding]]) -> Iterator[Finding]:
    """What is the same at several workers is said once."""
    names: dict[Finding, list[str]] = {}
    for name, findings in found.items():
        for each in findings:
            names.setdefault(each, []).append(name)
    for finding, where in names.items():
        yield finding.at(", ".join(where))


def _skew(versions: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """Packages that have different versions at different workers."""
    packages = sorted({package for each in versions.values() for package in each})
    differs = False
    for package in packages:
        by_version: dict[str, list[str]] = {}
        for name, found in versions.items():
            by_version.setdefault(found.get(package, "none"), []).append(name)
        if len(by_version) < 2:
            continue
        differs = True
        make = failure if package.startswith(SPEAK_TO_EACH_OTHER) else warning
        said = "; ".join(f"{version} at {', '.join(at)}" for version, at in by_version.items())
        yield make(
            "versions",
            f"{package}: {said}",
            "workers of one cluster speak to each other, and have to draw the same tokens",
            "give all nodes the same image or environment",
        )
    if not differs and versions:
        yield ok("versions", f"the same {len(packages)} at all {len(versions)} workers")


def _clocks(patients: Sequence[Patient]) -> Iterator[Finding]:
    """A worker's clock at its start lies between our question and our answer less its time."""
    largest = 0.0
    for each in patients:
        if each.told is None:
            continue
        latest = each.answered_at - each.told.took_s
        skew_s = max(each.asked_at - each.told.began_at, each.told.began_at - latest)
        largest = max(largest, skew_s)
        if skew_s > MAX_SKEW_S:
            yield warning(
                "clock",
                f"it differs by {skew_s:.1f} s from the controller's",
                "logs and traces of one request do not fit together; requests are not affected",
                "chrony or systemd-timesyncd on every node",
            ).at(each.name)
    if largest <= MAX_SKEW_S:
        yield ok("clock", f"all within {max(largest, 0.0):.1f} s")


def _name_and_kind(wanted: TransportConfig, written: TransportConfig) -> tuple[str, str]:
    """What was asked for: "auto" where nobody cares."""
    name = written.name if wanted.name == "auto" else wanted.name
    return name, written.kind if wanted.kind == "auto" else wanted.kind


def _paths(asked: tuple[str, str], told: dict[str, Examination]) -> Iterator[Finding]:
    num_paths = 0
    for name, each in told.items():
        for path in each.paths:
            num_paths += 1
            figures = {"bytes_per_s": path.bytes_per_s, "small_pull_s": path.small_pull_s}
            yield replace(
                _path(asked, path),
                where=f"{path.peer.partition('/')[0]} -> {name}",
                figures=None if path.error else figures,
            )
    if not num_paths:
        yield ok("path", "none: no prefill worker serves a decode worker")


def _path(asked: tuple[str, str], path: PullPath) -> Finding:
    said = (
        f"{path.transport}, {path.bytes_per_s / 1e9:.3g} GB/s in ranges of "
        f"{path.num_bytes / max(1, path.num_ranges) / 1024:.0f} KiB, "
        f"{path.small_pull_s * 1e6:.0f} us for a small pull"
    )
    kind = path.transport.partition("/")[2]
    if path.error:
        return failure(
            "path",
            f"nothing can be pulled by {path.transport}: {path.error}",
            NO_KV,
            "the reason is in what the worker says; --set transport.kind=tcp works anywhere",
        )
    for value, wanted, leaf in zip(path.transport.split("/"), asked, ("name", "kind"), strict=True):
        if wanted not in ("auto", value):
            return failure(
                "path",
                f"{said}; asked for is transport.{leaf}={wanted}",
                "KV moves in another way than was meant, and maybe much slower",
                f"serve with --set transport.{leaf}={wanted}",
            )
    is_long = path.num_bytes >= max(MIN_JUDGED_BYTES, MIN_JUDGED_RANGE * path.num_ranges)
    if path.bytes_per_s < LEAST_BYTES_PER_S.get(kind, 0.0) and is_long:
        return warning(
            "path",
            said,
            f"{kind} carries more than {LEAST_BYTES_PER_S[kind] / 1e9:g} GB/s where it works well",
            "measure again without load; then nvidia-smi topo -m, ibstat",
        )
    return Finding("path", Level.OK, said)
