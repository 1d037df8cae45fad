"""The start-up check: compares every captured bucket with the same step launched op by op.

At the same padded shape, hidden states, tokens and sums of the KV's bits have to be equal, or
hidden states close where a compiler fuses ops. The times of both are measured: those of chunks
decide which graphs are kept, those of decode steps feed the width policy. The check runs on an idle
engine, and leaves the initial step state and zero pages.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.api import Sampling
from worker.cache.eight_bits import fill_noise
from worker.draw.sampler import Result
from worker.forward.batch import Batch
from worker.forward.draws import Masks
from worker.plan import TAILS, Chunk, Plan, RowPages, RowStart, Tail
from worker.run.base import BucketCheck, Decoded, Forward, LoadedModel

log = logging.getLogger("kvlane.graph")

NUM_ROUNDS, NUM_TIMED = 3, 2
MAX_CHECK_LEN = 256  # longest KV of a row in the check

TAILS_CHECKED: tuple[Tail, ...] = ("none", "greedy", "filtered")
NUM_PENALIZED = 2  # rows at most of a decode check: filling their tables takes a while
NUM_LOGPROBS = 3
LaunchChunks = Callable[[Batch], Forward]


class Launches(NamedTuple):
    """A way to launch decode steps."""

    step: Callable[[Tensor, Tail, int], Decoded]  # (rows, tail, width of windows)
    draw: Callable[[Decoded, Plan, Masks | None], Result]  # see DecodeGraphs.draw


def check_bucket(
    loaded: LoadedModel, bucket: int, width: int, eager: Launches, graph: Launches
) -> BucketCheck | None:
    """Run `bucket` rows with windows of `width` op by op and by replays, from the same state.

    In windows the first draft of a row is right, and so are some of the others by chance. State
    and pages of `loaded` must be unused, and are reset. None: the pool is too small.
    Raises AssertionError if the results differ, and engine.strict is set.
    """
    scene = DecodeScene(loaded, bucket, width)
    if scene.num_slots < width + 2:
        return None
    tails = TAILS_CHECKED if width == 1 else ("greedy",)
    plans, equal = [Plan(0, tail=tail, width=width) for tail in tails], True
    for num in (-1, NUM_LOGPROBS):  # draws behind a forward, with penalties and masks
        plans.append(Plan(0, tail=TAILS[-1], penalized=True, num_logprobs=num, width=width))
    if width > 1:
        scene.set()
        result = eager.step(scene.rows, "greedy", width).result
        assert result is not None
        scene.drafts = result.drawn[:, : width - 1].clone()
    name = f"{bucket} decode rows" + (f" of {width}" if width > 1 else "")
    for plan in plans:
        outcomes = (scene.outcome(launches, plan) for launches in (eager, graph))
        same = [torch.equal(a, b) for a, b in zip(*outcomes, strict=True)]
        if not all(same):
            equal = False
            log.error("%s, %s: equal hidden, KV, state, counts, tokens, …: %s", name, plan, same)
    scene.set()
    calls = [partial(kind.step, scene.rows, "greedy", width) for kind in (graph, eager)]
    graph_ms, eager_ms = scene.times_ms(calls, NUM_ROUNDS if width == 1 else 1)
    scene.reset()
    check = BucketCheck("decode", bucket, equal, graph_ms, eager_ms, width=width)
    return _reported(check, name, loaded)


def check_chunk_bucket(
    loaded: LoadedModel,
    num_tokens: int,
    ways: tuple[LaunchChunks, LaunchChunks],
    *,
    fixed_len: int,
    rounding: float = 0.0,
) -> BucketCheck | None:
    """As `check_bucket`, of a batch of chunks padded to `num_tokens`; `ways`: op by op, by replays.

    Compares sums of the KV's bits, and the forward's hidden states. With `rounding`, a row of
    hidden states may differ by this share of its norm, and KV is not compared: wrong KV shows in
    the hidden states that attend to it. fixed_len: see `BatchBuffers.chunks`.
    """
    scene = ChunkScene(loaded, num_tokens, fixed_len)
    name = f"{num_tokens} tokens, {f'unbroken to {fixed_len}' if fixed_len else 'piecewise'}"
    if not scene.fits:
        log.info("%s: not compared, the KV pool is too small", name)
        return None
    (by_eager, eager_kv), (by_graph, graph_kv) = map(scene.outcome, ways)
    if rounding:
        same = [_is_near(by_graph, by_eager, rounding)]
    else:
        same = [torch.equal(by_eager, by_graph), torch.equal(eager_kv, graph_kv)]
    if not all(same):
        log.error("%s: equal hidden, KV: %s", name, same)
    batch = scene.set()
    graph_ms, eager_ms = scene.times_ms([partial(launch, batch) for launch in ways[::-1]])
    scene.reset()
    check = BucketCheck("prefill", num_tokens, all(same), graph_ms, eager_ms, fixed_len=fixed_len)
    return _reported(check, name, loaded)


def _reported(check: BucketCheck, name: str, loaded: LoadedModel) -> BucketCheck:
    """Log `check` under `name`; fail if it differs and engine.strict is set."""
    log.info(
        "%s: graph %.3f ms, eager %.3f ms, %s",
        name, check.graph_ms, check.eager_ms, "equal" if check.equal else "DIFFERENT",
    )  # fmt: skip
    assert check.equal or not loaded.config.strict, f"the graph of {name} differs from eager"
    return check


class _Scene:
    """What one check uses of a loaded model: its first `num_pages` pages, with the sink, and the
    states of its first `num_rows` rows, in the slots of their numbers."""

    def __init__(self, loaded: LoadedModel, num_pages: int, num_rows: int) -> None:
        self._loaded = loaded
        self._caches = [cache[:num_pages] for cache in loaded.pool.caches()]
        for state in loaded.model.states:
            self._caches += [part[: num_rows + 1] for part in state if part.numel()]

    def fill(self) -> None:
        """Fill pages and states with the same random content every time."""
        generator = torch.Generator(self._caches[0].device).manual_seed(7)
        for cache in self._caches:
            fill_noise(cache, generator)

    def written(self) -> Tensor:
        """Sums of bits, as values may be NaN, of all but the sinks: [num caches] i64."""
        types = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        bits = [cache[1:].view(types[cache.element_size()]) for cache in self._caches]
        return torch.stack([words.sum(dtype=torch.int64) for words in bits])

    def times_ms(
        self, launches: Sequence[Callable[[], object]], num_rounds: int = NUM_ROUNDS
    ) -> list[float]:
        """Time the kinds of launch, from synchronize to synchronize, after one that warms up.

        A time is the best of a few rounds, because other work may disturb a round. The kinds
        alternate: a GPU at its power limit slows down by 10 % and more within a second, and the
        kind that comes last would look slower than it is.
        """
        on_gpu = self._loaded.state.device.type == "cuda"
        synchronize = torch.cuda.synchronize if on_gpu else torch.cpu.synchronize
        for launch in launches:
            launch()
        best = [float("inf")] * len(launches)
        for _ in range(num_rounds):
            for i, launch in enumerate(launches):
                synchronize()
                began = time.perf_counter()
                for _ in range(NUM_TIMED):
                    launch()
                synchronize()
                best[i] = min(best[i], time.perf_counter() - began)
        return [1e3 * seconds / NUM_TIMED for seconds in best]

    def reset(self) -> None:
        """Restore the initial step state, and zero pages and states."""
        self._loaded.state.reset()
        for cache in self._caches:
            cache.zero_()


class DecodeScene(_Scene):
    """Rows 1 to `bucket` with a history, as if they had been served for a while."""

    def __init__(self, loaded: LoadedModel, bucket: int, width: int = 1) -> None:
        self.drafts: Tensor | None = None  # [bucket, width - 1] i64: of the rows; None: none
        pool, page_size = loaded.pool, loaded.pool.layout.page_size
        most = min(MAX_CHECK_LEN, loaded.max_len - 1)
        num_pages = min(-(-most // page_size), (pool.num_pages - 1) // bucket)  # of a row
        self.num_slots = num_pages * page_size  # of a row
        if loaded.model.is_recurrent and bucket >= pool.num_slots:
            self.num_slots = 0  # there are fewer states than rows
        self._width = width
        self.rows = torch.arange(1, bucket + 1, device=loaded.state.device)
        # All steps to come have to fit behind the longest history.
        longest = max(1, self.num_slots - width * (2 * NUM_ROUNDS * NUM_TIMED + 3))
        starts = tuple(self._start(loaded, row, longest) for row in range(1, bucket + 1))
        self._plan = Plan(0, starts=starts, pages=_pages_of_rows(bucket, num_pages))
        every_second = torch.full((2, -(-loaded.model.shape.vocab_size // 32)), 0x55555555).int()
        every_second[0] = -1  # no mask
        self._masks = Masks(every_second, (torch.arange(bucket * width) % 3 == 0).long())
        super().__init__(loaded, bucket * num_pages + 1, bucket)

    @staticmethod
    def _start(loaded: LoadedModel, row: int, longest: int) -> RowStart:
        vocab_size, num_slots = (
            loaded.model.shape.vocab_size,
            len(loaded.state.penalties.counts) - 1,
        )
        slot = row if row <= min(num_slots, NUM_PENALIZED) else 0
        text, penalties = (), dict[str, Any](logit_bias=((row, 1.5),) if slot else ())
        if slot:
            text = tuple(range(min(100, vocab_size)))
            penalties |= dict(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25)
        sampling = Sampling(0, row % 2, 0.9, seed=row, ignore_eos=True, **penalties)
        return RowStart(
            row, sampling, loaded.max_len, min_len=0, active=True, seq_len=1 + row * 7 % longest,
            last_token=row % vocab_size, penalty_slot=slot, prompt=text, output=text[::2],
            state_slot=row,
        )  # fmt: skip

    def outcome(self, launches: Launches, plan: Plan) -> list[Tensor]:
        """One step from the scene's history: hidden states, KV, counts and the draws.

        A plan with penalties is drawn with masks, in a launch of its own.
        """
        self.set()
        tail: Tail = "none" if plan.penalized else plan.tail
        step = launches.step(self.rows, tail, plan.width)
        result = launches.draw(step, plan, self._masks) if plan.penalized else step.result
        drawn = [] if result is None else [result.drawn, *(result.scores or ())]
        columns, counts = self._loaded.state.columns, self._loaded.state.penalties.counts
        left = columns.active, columns.seq_len, columns.last_token, columns.folded, columns.drafts
        made = step.hidden, self.written(), *left, counts[1 : NUM_PENALIZED + 1], *drawn
        return [tensor.clone() for tensor in made if tensor is not None]

    def set(self) -> None:
        """Set rows, pages, KV and states to the same history, in which some tokens are pending."""
        self.reset()
        self._loaded.state.apply(self._plan)
        folded = self._loaded.state.columns.folded
        folded[self.rows] = (folded[self.rows] - self.rows % self._width).clamp(min=0)
        if self.drafts is not None:
            drafts = self._loaded.state.columns.drafts
            drafts[self.rows, : self.drafts.shape[1]] = self.drafts
        self.fill()


class ChunkScene(_Scene):
    """Chunks that fill 15/16 of a bucket; every second one continues a prefix that ends mid-page.

    There are three chunks: fewer if limits are lower, more if max_len is too short for three.
    """

    def __init__(self, loaded: LoadedModel, padded_tokens: int, fixed_len: int) -> None:
        page_size, max_len = loaded.pool.layout.page_size, loaded.max_len
        grain = loaded.model.shape.grain
        most = loaded.buffers.fixed_reqs if fixed_len else int(loaded.config.max_num_reqs)
        self.num_tokens = padded_tokens - padded_tokens // 16
        prefix = min(page_size + 1, max_len // 2)
        if grain > 1:  # chunks begin at multiples of it
            prefix = grain if grain <= max_len // 2 else 0
        num_reqs = max(min(3, most, self.num_tokens), -(-self.num_tokens // (max_len - prefix)))
        counts = [self.num_tokens // num_reqs] * num_reqs
        counts[0] += self.num_tokens - sum(counts)
        starts = [prefix * (i % 2) for i in range(num_reqs)]
        num_pages = -(-(max(counts) + prefix) // page_size)  # of a row
        self.fits = num_reqs <= most and num_reqs * num_pages < loaded.pool.num_pages
        if loaded.model.is_recurrent:
            self.fits = self.fits and num_reqs < loaded.pool.num_slots
        vocab_size = loaded.model.shape.vocab_size
        chunks = tuple(
            Chunk(
                1 + i, start, tuple(7 * token % vocab_size for token in range(i, i + count)),
                state_slot=1 + i,
            )
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        )  # fmt: skip
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        pages = _pages_of_rows(num_reqs, num_pages)
        self._plan = Plan(0, pages=pages, chunks=chunks, max_seq_len_ub=longest)
        self._padded_tokens, self._fixed_len = padded_tokens, fixed_len
        super().__init__(loaded, num_reqs * num_pages + 1, num_reqs)

    def set(self) -> Batch:
        """Fill the pages; returns the batch over them."""
        self.fill()
        buffers = self._loaded.buffers
        return buffers.chunks(self._plan, self._padded_tokens, fixed_len=self._fixed_len)

    def outcome(self, launch: LaunchChunks) -> tuple[Tensor, Tensor]:
        """The hidden states (a long step's: of last tokens), and `written`."""
        batch = self.set()
        return launch(batch).hidden[: self.num_tokens].clone(), self.written()


def _pages_of_rows(num_rows: int, num_pages: int) -> tuple[RowPages, ...]:
    """Give rows 1 to num_rows `num_pages` pages a row, from page 1 on."""
    firsts = range(1, 1 + num_rows * num_pages, num_pages) if num_pages else ()
    return tuple(
        RowPages(row, 0, tuple(range(first, first + num_pages)))
        for row, first in enumerate(firsts, 1)
    )


def _is_near(actual: Tensor, expected: Tensor, rounding: float) -> bool:
    """Whether no row differs by more than `rounding` of its norm; False if there is a NaN."""
    error = torch.linalg.vector_norm(actual.float() - expected.float(), dim=-1)
    return bool((error <= rounding * torch.linalg.vector_norm(expected.float(), dim=-1)).all())
