"""Decode steps as CUDA graphs: everything from the rows to the drawn tokens in one replay.

A bucket is a padded number of rows. By width of windows, a bucket has these graphs:

    what is in it            width 1                      wider
    forward, draws           greedy, random, filtered     greedy
    forward                  one                          one
    draws behind a forward   with logprobs, without       with logprobs, without

The draws behind a forward can filter, penalise and mask. A row that needs none of that draws the
same token there. Two replays, forward and draws, serve steps with grammars, penalties or logprobs,
and tails without a graph of their own. A graph's inputs are row numbers and masks. Padding is row
0, the sink, which writes to page 0 and draws nothing.
"""

import logging
import time
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from worker.api import MAX_LOGPROBS
from worker.config.progress import Progress, no_progress
from worker.draw.sampler import Draws, Result
from worker.errors import Unsupported
from worker.forward.batch import WindowShape
from worker.forward.draws import Masks
from worker.plan import TAILS, Plan, Tail, max_rows
from worker.run.base import BucketCheck, Decoded, DecodeGraphs, LoadedModel
from worker.run.check import Launches, check_bucket
from worker.run.eager import EagerDecode, draw_and_propose, draw_eagerly
from worker.run.segments import Capture, GraphMemory

log = logging.getLogger("kvlane.graph")


class FullDecode(DecodeGraphs):
    """DecodeGraphs that replays whole steps, on a CUDA device.

    Raises Unsupported if the attention backend plans on the host, which a replay cannot repeat.
    """

    def __init__(self, loaded: LoadedModel, memory: GraphMemory) -> None:
        if not loaded.attention.decode.static_plan:
            raise Unsupported(
                "engine.graph.decode=full needs an attention backend with a static plan; "
                "set engine.graph.decode=eager or engine.attention.decode=triton",
                "engine.graph",
            )
        self.buckets = tuple(decode_buckets(int(loaded.config.max_num_reqs)))
        self._loaded, self._memory = loaded, memory
        self._eager = EagerDecode(loaded)
        device = loaded.state.device
        self._rows = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        # (bucket, width), most tokens first, so that smaller captures reuse the memory of larger.
        shapes = [(b, w) for w in loaded.widths for b in buckets_of(self.buckets, w)]
        self._shapes = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True)
        most = self._shapes[0][0] * self._shapes[0][1]
        shape = most + 1, -(-loaded.model.shape.vocab_size // 32)
        self._masks = Masks(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(most, dtype=torch.int64, device=device),
        )
        # Graphs without breaks: steps by (bucket, width, tail); the draws behind a forward by
        # (bucket, width, with logprobs).
        self._captured: dict[tuple[int, int, Tail], Capture[Decoded]] = {}
        self._tails: dict[tuple[int, int, bool], Capture[Result]] = {}

    @torch.inference_mode()
    def run_buckets(self) -> None:
        for bucket, width in self._shapes:
            forwarded = self._eager_step(self._rows[:bucket], "none", width)
            for tail in _tails(width)[1:]:
                draw_and_propose(self._loaded, forwarded, Draws(tail))
            for num_logprobs in (-1, MAX_LOGPROBS):
                self._draw_all(forwarded, num_logprobs)

    @torch.inference_mode()
    def capture_largest(self) -> None:
        self._capture_shape(*self._shapes[0])

    @torch.inference_mode()
    def capture(self, progress: Progress = no_progress) -> Sequence[BucketCheck]:
        began = time.monotonic()
        for i, shape in enumerate(self._shapes):
            progress("capture", i, len(self._shapes))
            self._capture_shape(*shape)
        num, took_s = len(self._captured) + len(self._tails), time.monotonic() - began
        log.info("%d decode graphs in %.1f s", num, took_s)
        eager = Launches(self._eager_step, partial(draw_eagerly, self._loaded))
        graph, shapes = Launches(self._replay, self.draw), reversed(self._shapes)
        checks = (check_bucket(self._loaded, *shape, eager, graph) for shape in shapes)
        return [check for check in checks if check is not None]

    def launch(self, plan: Plan, tail: Tail) -> Decoded:
        num, bucket = len(plan.decode), self._bucket(len(plan.decode), plan.width)
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[:num] = torch.tensor(plan.decode, dtype=torch.int64)
        replayed = self._replay(self._loaded.state.pinned(padded), tail, plan.width)
        hidden, sampled, result, path, num_tokens, _ = replayed
        sampled, result = sampled and sampled.first(num), result and result.first(num, -1)
        return Decoded(hidden[: num * plan.width], sampled, result, path, num_tokens)

    def draw(self, forwarded: Decoded, plan: Plan, masks: Masks | None) -> Result:
        num_rows, with_logprobs = len(forwarded.hidden) // plan.width, plan.num_logprobs >= 0
        bucket = self._bucket(num_rows, plan.width)
        result = self._replay_tail(bucket, plan.width, masks, with_logprobs=with_logprobs)
        return result.first(num_rows, plan.num_logprobs)

    def close(self) -> None:
        self._captured.clear()
        self._tails.clear()

    def _bucket(self, num_rows: int, width: int) -> int:
        return next(bucket for bucket in buckets_of(self.buckets, width) if bucket >= num_rows)

    def _eager_step(self, rows: Tensor, tail: Tail, width: int) -> Decoded:
        return self._eager.step(rows, WindowShape(width, self._loaded.max_len + width - 1), tail)

    def _replay(self, rows: Tensor, tail: Tail, width: int) -> Decoded:
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        captured = self._captured.get((len(rows), width, tail))
        if captured is not None:
            captured.replay()
            return captured.made
        forward = self._captured[len(rows), width, "none"]
        forward.replay()
        result = self._replay_tail(len(rows), width, with_logprobs=False)
        return forward.made._replace(sampled=None, result=result)

    def _replay_tail(
        self, bucket: int, width: int, masks: Masks | None = None, *, with_logprobs: bool
    ) -> Result:
        words, line = self._masks
        line[: bucket * width].zero_()
        if masks is not None:
            pinned = self._loaded.state.pinned
            sent = pinned(masks.words[1:])  # line 0 is there
            words[1 : 1 + len(sent)].copy_(sent, non_blocking=True)
            line[: len(masks.line)].copy_(pinned(masks.line), non_blocking=True)
        captured = self._tails[bucket, width, with_logprobs]
        captured.replay()
        return captured.made

    def _capture_shape(self, bucket: int, width: int) -> None:
        rows = self._rows[:bucket]
        for tail in _tails(width):
            step = self._captured[bucket, width, tail] = Capture[Decoded](self._memory)
            decoded = step.record(lambda _, tail=tail: self._eager_step(rows, tail, width))
            if tail != "none":  # nobody reads its hidden states but the start-up check, at once
                decoded = decoded._replace(hidden=self._memory.alias(decoded.hidden))
            step.made = decoded._replace(path="graph")
        forward = self._captured[bucket, width, "none"]
        forward.replay()  # the tail's warm-ups read what it leaves
        for with_logprobs in (False, True):
            draws = self._tails[bucket, width, with_logprobs] = Capture[Result](self._memory)
            num = MAX_LOGPROBS if with_logprobs else -1
            draws.record(lambda _, num=num: self._draw_all(forward.made, num))

    def _draw_all(self, forwarded: Decoded, num_logprobs: int) -> Result:
        """The tail that serves every step."""
        masks = Masks(self._masks.words, self._masks.line[: len(forwarded.hidden)])
        draws = Draws(TAILS[-1], True, num_logprobs, masks)
        return draw_and_propose(self._loaded, forwarded, draws)


def _tails(width: int) -> tuple[Tail, ...]:
    """Tails that have one graph with the forward; first "none", which is the forward alone."""
    return TAILS if width == 1 else ("none", "greedy")


@cache
def buckets_of(buckets: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Buckets with graphs for windows of `width`: beyond 64 rows multiples of 32 or the last."""
    if width == 1:
        return buckets
    most = max_rows(width, buckets[-1])
    coarse = [bucket for bucket in buckets if bucket <= 64 or bucket % 32 == 0]
    return (*(bucket for bucket in coarse if bucket < most), most)


def decode_buckets(max_num_reqs: int) -> list[int]:
    """Numbers of rows that get graphs of their own, ascending; the last is `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs + 1, 32)]
    return [size for size in sizes if size < max_num_reqs] + [max_num_reqs]
