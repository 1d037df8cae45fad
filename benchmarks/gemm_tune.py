"""The best algorithm of cuBLASLt for each product and number of rows: `benchmarks.gemm --tune`.

The library's own proposals come first. From the best of them on, algorithms differ from a good one
in one or two attributes; the library says which of them it can run. Each is timed over weights that
are not in the L2. Only those count whose result is close to torch's and the same in every run. The
best few are timed again in a graph of all layers; the table takes the winner if it beats torch.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from ctypes import (
    Array,
    byref,
    c_int,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gemm_step import Product, Step, error, times_ms
from worker.ops.lt_gemm import (
    COMPUTE_F32,
    REAL_BF16,
    REAL_F32,
    AlgorithmWords,
    CublasLt,
    HeuristicResult,
    LtError,
    LtMatmul,
    Table,
    Words,
    set_attribute,
)

BOUND = 2e-3  # relative difference to torch's result
GAIN = 0.99  # of torch's time: more is not worth a row of the table
PARENTS, FINALISTS, COARSE = 6, 8, 12
MAX_WORKSPACE, REDUCTION_MASK = 1, 3  # attributes of a preference
# Attributes of an algorithm's configuration, and of its capabilities: cublasLt.h of version 13.
ID, TILE, SPLIT, REDUCTION, SWIZZLE, CUSTOM, STAGES, CLUSTER = 0, 1, 2, 3, 4, 5, 6, 8
CAN_SPLIT, REDUCTIONS, CAN_SWIZZLE, TILES, MAX_CUSTOM, ALL_STAGES = 0, 1, 2, 6, 7, 13
CLUSTERS = (0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
SPLITS = (2, 3, 4, 5, 6, 8)


def proposals(lt: CublasLt, matmul: LtMatmul) -> list[Words]:
    """The library's guesses, the best first, then those without a reduction; none needs scratch."""
    found: dict[Words, None] = {}
    for reductions in (7, 0):
        preference, count = c_void_p(), c_int()
        results = (HeuristicResult * 64)()
        lt.call("cublasLtMatmulPreferenceCreate", byref(preference))
        kind = "cublasLtMatmulPreference"
        set_attribute(lt, kind, preference, MAX_WORKSPACE, c_uint64(0))
        set_attribute(lt, kind, preference, REDUCTION_MASK, c_uint32(reductions))
        status = lt.library.cublasLtMatmulAlgoGetHeuristic(
            lt.handle, matmul.operation, matmul.w, matmul.x, matmul.out, matmul.out,
            preference, len(results), results, byref(count),
        )  # fmt: skip
        lt.call("cublasLtMatmulPreferenceDestroy", preference)
        if status == 0:
            here = results[: count.value]
            found |= {tuple(each.words): None for each in here if each.state == 0}
    return list(found)


def initial(lt: CublasLt, words: Words) -> Words:
    """The algorithm of the same id with nothing set."""
    algorithm, number, size = AlgorithmWords(*words), c_int(), c_size_t()
    get = "cublasLtMatmulAlgoConfigGetAttribute"
    lt.call(get, byref(algorithm), ID, byref(number), c_size_t(sizeof(number)), byref(size))
    types = (COMPUTE_F32, REAL_F32, *[REAL_BF16] * 4)
    lt.call("cublasLtMatmulAlgoInit", lt.handle, *types, number, byref(algorithm))
    return tuple(algorithm)


def capability(lt: CublasLt, words: Words, attribute: int) -> list[int]:
    """Values of one attribute of what an algorithm can do."""
    algorithm, needed = AlgorithmWords(*words), c_size_t()
    call, at = lt.library.cublasLtMatmulAlgoCapGetAttribute, c_int(attribute)
    if call(byref(algorithm), at, None, c_size_t(0), byref(needed)) or not needed.value:
        return []
    values = (c_uint32 * (needed.value // 4))()
    size = c_size_t(sizeof(values))
    return [] if call(byref(algorithm), at, values, size, byref(needed)) else list(values)


def changed(lt: CublasLt, words: Words, to: dict[int, int]) -> Words | None:
    """The algorithm with these attributes; None: the library refuses one."""
    algorithm = AlgorithmWords(*words)
    for attribute, value in to.items():
        field = (c_uint16 if attribute == CLUSTER else c_uint32)(value)
        size = c_size_t(sizeof(field))
        if lt.library.cublasLtMatmulAlgoConfigSetAttribute(
            byref(algorithm), c_int(attribute), byref(field), size
        ):
            return None
    return tuple(algorithm)


@dataclass(slots=True)
class Candidate:
    """An algorithm that gave the right result, and us of a launch."""

    words: Words
    us: float


class Tuner:
    """The search for one product of m rows.

    Args:
        lt: the library.
        step: the weights.
        each: the product.
        m: rows.
    """

    def __init__(self, lt: CublasLt, step: Step, each: Product, m: int) -> None:
        self.lt, self.step, self.each = lt, step, each
        self.matmul = LtMatmul(lt, (m, each.n, each.k), each.k)
        self.x = torch.randn(m, each.k, device=step.device).to(step.dtype)
        self.weights = step.weights[each.name]
        self.expected = F.linear(self.x, self.weights[0])
        self.out = torch.empty_like(self.expected)
        self.random = random.Random(0)
        self.seen: set[Words] = set()
        self.refused = Counter[str]()  # by reason, those that are neither good nor slow
        self.good: list[Candidate] = []
        self.abilities: dict[Words, list[dict[int, int]]] = {}

    def search(self, seconds: float, known: Iterable[Words] = ()) -> None:
        """Fill `good`, the best first; `known` were good for other numbers of rows."""
        until = time.monotonic() + seconds
        for words in (*proposals(self.lt, self.matmul), *known):
            self._offer(words)
        while self.good and time.monotonic() < until:
            parent = self.random.choice(self.good[:PARENTS]).words
            if parent not in self.abilities:
                self.abilities[parent] = self._changes(parent)
            if not self.abilities[parent]:
                continue
            picked = self.random.choices(self.abilities[parent], k=self.random.randint(1, 2))
            words = changed(self.lt, parent, {k: v for each in picked for k, v in each.items()})
            if words is not None:
                self._offer(words)

    def _changes(self, words: Words) -> list[dict[int, int]]:
        """What may be altered. Each kind of change comes up about equally often."""
        try:
            bare = initial(self.lt, words)
        except LtError:
            return []

        def able(attribute: int) -> list[int]:
            return capability(self.lt, bare, attribute)

        mask = sum(able(REDUCTIONS)[:1])
        reductions = [each for each in (1, 2) if mask & each] if any(able(CAN_SPLIT)) else []
        options = range(1 + min(sum(able(MAX_CUSTOM)[:1]), 64))
        kinds = [
            [{TILE: tile} for tile in able(TILES)],
            [{STAGES: stages} for stages in able(ALL_STAGES)],
            [{SPLIT: 1, REDUCTION: 0}]
            + [{SPLIT: split, REDUCTION: how} for split in SPLITS for how in reductions],
            [{SWIZZLE: on} for on in (0, 1)] if any(able(CAN_SWIZZLE)) else [],
            [{CUSTOM: option} for option in options],
            [{CLUSTER: shape} for shape in CLUSTERS],
        ]
        most = max(len(kind) for kind in kinds)
        return [one for kind in kinds if kind for one in self.random.choices(kind, k=most)]

    def _offer(self, words: Words) -> None:
        if words in self.seen:
            return
        self.seen.add(words)
        if (refusal := self.matmul.refusal(words)) is not None:
            self.refused[refusal] += 1
            return
        try:
            if self._coarse_us(words, 2) > 2 * self.best_us:
                return
            us = self._coarse_us(words, COARSE)
        except LtError as error:
            self.refused[str(error)] += 1
            return
        if us >= 1.2 * self.best_us:
            return
        if not self._is_right(words):
            self.refused["wrong or not always the same"] += 1
            return
        self.good.append(Candidate(words, us))
        self.good.sort(key=lambda one: one.us)

    @property
    def best_us(self) -> float:
        """Of what was found so far."""
        return self.good[0].us if self.good else math.inf

    def _run(self, words: Array[c_uint64], weight: Tensor) -> None:
        self.matmul.run(self.x, weight, self.out, words)

    def _coarse_us(self, words: Words, launches: int) -> float:
        """Of one launch among these, one after the other."""
        algorithm = AlgorithmWords(*words)
        self._run(algorithm, self.weights[0])
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(launches * 20_000)  # cycles: all of them are queued meanwhile
        began.record()
        for i in range(launches):
            self._run(algorithm, self.weights[i % len(self.weights)])
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / launches * 1e3

    def _is_right(self, words: Words, runs: int = 3) -> bool:
        """Close to torch's, and the same bits in every run."""
        algorithm, results = AlgorithmWords(*words), []
        for _ in range(runs):
            self._run(algorithm, self.weights[-1])
            self.out.fill_(float("nan"))
            self._run(algorithm, self.weights[0])
            results.append(self.out.clone())
        same = all(torch.equal(each, results[0]) for each in results)
        return same and error(results[0], self.expected) < BOUND

    def decide(self, replays: int) -> tuple[float, Candidate | None]:
        """us of torch's product and the best candidate, both over all layers in a graph."""

        def us(multiply: Callable[[Tensor], object]) -> float:
            def layers() -> None:
                for weight in self.weights:
                    multiply(weight)

            took = times_ms(layers, self.step.device, replays)
            return statistics.median(took) / len(self.weights) * 1e3

        finalists = [one for one in self.good[:FINALISTS] if self._is_right(one.words, 20)]
        for one in finalists:
            algorithm = AlgorithmWords(*one.words)
            one.us = us(lambda weight, algorithm=algorithm: self._run(algorithm, weight))
        torch_us = us(lambda weight: F.linear(self.x, weight))
        return torch_us, min(finalists, key=lambda one: one.us, default=None)


def tune(
    step: Step, ms: Sequence[int], names: Sequence[str], seconds: float, replays: int, path: Path
) -> None:
    """Write the table with a search of `seconds` for each product of `names` and each of `ms`.

    Rows that `path` has of other shapes stay if they are for this device and library.
    RuntimeError: torch has loaded no cuBLASLt.
    """
    device = step.slab.device
    library = CublasLt.loaded()
    if library is None:
        raise RuntimeError("torch has loaded no cuBLASLt")
    lt = CublasLt(library, device)
    table = Table(torch.cuda.get_device_name(device), lt.version, {})
    if path.exists():
        before = Table.parse(path.read_text())
        if (before.device, before.version) == (table.device, table.version):
            table.algorithms.update(before.algorithms)
    for m in ms:
        for each in step.products:
            if each.name not in names:
                continue
            tuner = Tuner(lt, step, each, m)
            others = [a for (_, n, k), a in table.algorithms.items() if (n, k) == (each.n, each.k)]
            tuner.search(seconds, others)
            torch_us, best = tuner.decide(replays)
            shape = m, each.n, each.k
            table.algorithms.pop(shape, None)
            found = "nothing" if best is None else f"{best.us:.2f} us"
            refused = ", ".join(f"{n} {why}" for why, n in tuner.refused.items())
            of = f"of {len(tuner.seen)} ({refused or 'none refused'})"
            print(f"m={m} {each.name}: torch {torch_us:.2f} us, {of}: {found}")
            if best is not None and best.us < GAIN * torch_us:
                table.algorithms[shape] = best.words
            path.write_text(table.dump())
