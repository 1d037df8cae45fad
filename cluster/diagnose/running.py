"""Judges a running cluster: every worker's machine, what differs between them, the ways of KV."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.diagnose.facts import MOONCAKE, Facts, read_facts
from cluster.diagnose.finding import Finding, failure, ok, warning
from cluster.diagnose.machine import NO_KV, examine
from worker.config import TransportConfig
from worker.observe.paths import PullPath

MAX_SKEW_S = 1.0
# Below it a kind carries no more than TCP would.
LEAST_BYTES_PER_S = {"nvlink": 10e9, "rdma": 3e9}
# A shorter pull, or one of shorter ranges, takes as long as its calls: between two H200s ranges of
# 64 KiB, those of the bundled model, came at 3.5 GB/s over NVLink, 19 us each.
MIN_JUDGED_BYTES, MIN_JUDGED_RANGE = 8 << 20, 1 << 20
SPEAK_TO_EACH_OTHER = ("kvlane", MOONCAKE)


@dataclass(frozen=True, slots=True)
class Examination:
    """What one worker's process says of itself."""

    began_at: float  # by its node's clock
    took_s: float
    facts: Facts
    paths: tuple[PullPath, ...]  # of a decode worker, from all prefill workers


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """One worker, as the controller has asked it."""

    name: str
    asked_at: float  # by the controller's clock
    answered_at: float
    examination: Examination | None
    error: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class ClusterExamination:
    """The configuration of a cluster, as it was written and as it was decided, and its workers."""

    written: Config
    decided: Config
    answers: tuple[WorkerAnswer, ...]


def examined_here(measure: Callable[[], Sequence[PullPath]]) -> Examination:
    """Examine the calling worker's process; `measure` measures its paths."""
    began_at, since = time.time(), time.monotonic()
    facts, paths = read_facts(), tuple(measure())
    return Examination(began_at, time.monotonic() - since, facts, paths)


def of_cluster(wanted: TransportConfig, cluster: ClusterExamination) -> Iterator[Finding]:
    """All findings.

    wanted: the transport that the caller expects; where it is "auto", `cluster.written` counts.
    """
    workers = {a.name: a.examination for a in cluster.answers if a.examination is not None}
    for answer in cluster.answers:
        if answer.examination is None:
            lack, why = f"it tells nothing: {answer.error}", "what is wrong with it stays unknown"
            yield failure("worker", lack, why, "kvlane status, and the log of serve", answer.name)
    yield from _machines(cluster.decided, workers)
    yield from _skew({name: worker.facts.versions for name, worker in workers.items()})
    yield from _clocks(cluster.answers)
    written = cluster.written.transport
    name = written.name if wanted.name == "auto" else wanted.name
    kind = written.kind if wanted.kind == "auto" else wanted.kind
    if name == "mixed":  # the road depends on the pair
        name = kind = "auto"
    yield from _paths({"name": name, "kind": kind}, workers)


def of_command(own: str, cluster: ClusterExamination) -> Finding:
    """Whether the command that asks, `facts.build` of it, is of the workers' kvlane."""
    told = (a.examination.facts.versions["kvlane"] for a in cluster.answers if a.examination)
    if others := sorted({*told} - {own}):
        return warning(
            "kvlane",
            f"this command is {own}, workers are {'; '.join(others)}",
            "they may not understand each other",
            "give commands the installation of the cluster",
        )
    return ok("kvlane", own)


def _machines(decided: Config, workers: dict[str, Examination]) -> Iterator[Finding]:
    """What is the same at several workers is said once."""
    names: dict[Finding, list[str]] = {}
    for name, worker in workers.items():
        for finding in examine(decided, worker.facts):
            names.setdefault(finding, []).append(name)
    for finding, where in names.items():
        yield replace(finding, where=", ".join(where))


def _skew(workers: dict[str, dict[str, str]]) -> Iterator[Finding]:
    packages = sorted({package for versions in workers.values() for package in versions})
    num_same = 0
    for package in packages:
        by_version: dict[str, list[str]] = {}
        for name, versions in workers.items():
            by_version.setdefault(versions.get(package, "none"), []).append(name)
        if len(by_version) < 2:
            num_same += 1
            continue
        make = failure if package.startswith(SPEAK_TO_EACH_OTHER) else warning
        said = "; ".join(f"{version} at {', '.join(at)}" for version, at in by_version.items())
        yield make(
            "versions",
            f"{package}: {said}",
            "workers of one cluster speak to each other, and have to draw the same tokens",
            "give all nodes the same image or environment",
        )
    if num_same == len(packages) and workers:
        yield ok("versions", f"the same {len(packages)} at all {len(workers)} workers")


def _clocks(answers: Sequence[WorkerAnswer]) -> Iterator[Finding]:
    """Clock skew: `began_at` has to lie between `asked_at` and `answered_at - took_s`."""
    largest = 0.0
    for answer in answers:
        if (own := answer.examination) is None:
            continue
        latest = answer.answered_at - own.took_s
        skew_s = max(answer.asked_at - own.began_at, own.began_at - latest)
        largest = max(largest, skew_s)
        if skew_s > MAX_SKEW_S:
            yield warning(
                "clock",
                f"it differs by {skew_s:.1f} s from the controller's",
                "logs and traces of one request do not fit together; requests are not affected",
                "chrony or systemd-timesyncd on every node",
                answer.name,
            )
    if largest <= MAX_SKEW_S:
        yield ok("clock", f"all within {largest:.1f} s")


def _paths(asked: dict[str, str], workers: dict[str, Examination]) -> Iterator[Finding]:
    num_paths = 0
    for name, worker in workers.items():
        for path in worker.paths:
            num_paths += 1
            figures = {"bytes_per_s": path.bytes_per_s, "small_pull_s": path.small_pull_s}
            yield replace(
                _path(asked, path),
                where=f"{path.peer.partition('/')[0]} -> {name}",
                figures=None if path.error else figures,
            )
    if not num_paths:
        yield ok("path", "none: no prefill worker serves a decode worker")


def _path(asked: dict[str, str], path: PullPath) -> Finding:
    """asked: name and kind of the transport; "auto" where nobody cares."""
    if path.error:
        return failure(
            "path",
            f"nothing can be pulled by {path.transport}: {path.error}",
            NO_KV,
            "the reason is in what the worker says; --set transport.kind=tcp works anywhere",
        )
    said = (
        f"{path.transport}, {path.bytes_per_s / 1e9:.3g} GB/s in ranges of "
        f"{path.num_bytes / max(1, path.num_ranges) / 1024:.0f} KiB, "
        f"{path.small_pull_s * 1e6:.0f} us for a small pull, "
        f"{path.pages_per_s * path.page_size:,.0f} tokens/s of this model"
    )
    for value, (leaf, wanted) in zip(path.transport.split("/"), asked.items(), strict=True):
        if wanted not in ("auto", value):
            return failure(
                "path",
                f"{said}; asked for is transport.{leaf}={wanted}",
                "KV moves in another way than was meant, and maybe much slower",
                f"serve with --set transport.{leaf}={wanted}",
            )
    kind = path.transport.partition("/")[2]
    is_long = path.num_bytes >= max(MIN_JUDGED_BYTES, MIN_JUDGED_RANGE * path.num_ranges)
    if path.bytes_per_s < LEAST_BYTES_PER_S.get(kind, 0.0) and is_long:
        return warning(
            "path",
            said,
            f"{kind} carries more than {LEAST_BYTES_PER_S[kind] / 1e9:g} GB/s where it works well",
            "measure again without load; then nvidia-smi topo -m, ibstat",
        )
    return ok("path", said)
