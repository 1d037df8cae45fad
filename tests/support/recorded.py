"""CUDA graphs for the CPU: a segment is the list of its torch ops, done again at each replay.

As with a real graph, a replay runs no Python of the forward: it sees the tensors of the capture and
nothing else. Ops do run during the capture here, so what breaks leave unfilled is poisoned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from tests.support.lockstep import DECODE, Lockstep
from worker.draw.logprobs import Scores
from worker.draw.sampler import Result
from worker.forward.draws import Masks
from worker.plan import Plan, Tail
from worker.run import segments
from worker.run.base import Decoded, LoadedModel
from worker.run.full import FullDecode
from worker.run.piecewise import Bucket, PiecewiseChunks
from worker.run.segments import GraphMemory


class RecordedGraph(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op goes through Dynamo, which takes a second to import

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Do it now, and once more at each replay."""
        out = func(*args, **kwargs)
        self._ops.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._ops:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def as_one_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a single op of the segment that is open: it is compiled, and no op of torch."""

    def call(*args: Any) -> Any:
        graph = _get_current_dispatch_mode()
        if not isinstance(graph, RecordedGraph):
            return function(*args)
        graph.__exit__(None, None, None)
        try:
            return graph.run(function, args, {})
        finally:
            graph.__enter__()

    return call


def noted_by(ran: set[Any], *calls: Callable[[], object]) -> set[Any]:
    """What these calls put into `ran`, which is emptied before."""
    ran.clear()
    for call in calls:
        call()
    return ran.copy()


@contextmanager
def without_warmups() -> Iterator[None]:
    """No library here allocates or chooses kernels in its first calls."""
    before, segments.NUM_WARMUPS = segments.NUM_WARMUPS, 0
    try:
        yield
    finally:
        segments.NUM_WARMUPS = before


class RecordedMemory(GraphMemory):
    def __init__(self) -> None:
        pass

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def release_cache(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def begin(self) -> Any:
        return RecordedGraph().__enter__()

    def end(self, graph: Any) -> None:
        graph.__exit__(None, None, None)

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


class RecordedSteps(FullDecode):
    """Whole decode steps so recorded. As the runner does on a GPU, results are copied before the
    next step begins."""

    @torch.inference_mode()
    @without_warmups()
    def record(self) -> None:
        """Capture without warm-ups and start-up check: what is served tells more for less."""
        for shape in self._shapes:
            self._capture_shape(*shape)

    def launch(self, plan: Plan, tail: Tail) -> Decoded:
        decoded = super().launch(plan, tail)
        return decoded._replace(result=decoded.result and copy_of(decoded.result))

    def draw(self, forwarded: Decoded, plan: Plan, masks: Masks | None) -> Result:
        return copy_of(super().draw(forwarded, plan, masks))


class RecordedChunks(PiecewiseChunks):
    """Chunks of prompts so recorded, in pieces, or whole where a batch has no layer hook.

    Graphs are used whether they are faster or not.
    """

    def __init__(self, loaded: LoadedModel, *, whole: bool) -> None:
        super().__init__(loaded, RecordedMemory())
        most = self.buckets[-1].num_tokens
        self.buckets = [Bucket(n) for n in (16, 48) if n < most] + [Bucket(most)]
        self._whole = whole

    @torch.inference_mode()
    @without_warmups()
    def record(self) -> None:
        for bucket in self.buckets:
            self.capture_bucket(bucket)
            kinds = (most for num, most in self.captured if num == bucket.num_tokens and most)
            bucket.full_ms = dict.fromkeys(kinds if self._whole else (), 0.0)


def replay(made: Lockstep, *, steps: bool, chunks: str) -> None:
    """From now on the decode worker replays its steps, and each worker chunks of prompts.

    chunks: "eager", in "pieces" or "whole".
    """
    for peer, engine in made.engines.items():
        runner, of = engine.runner, dict[str, Any]()
        if chunks != "eager":
            of["chunks"] = RecordedChunks(runner.loaded, whole=chunks == "whole")
        if steps and peer == DECODE:
            of["decode"] = RecordedSteps(runner.loaded, RecordedMemory())
        for each in of.values():
            each.record()
        runner.graphs = replace(runner.graphs, **of)


def copy_of(result: Result) -> Result:
    scores = None if result.scores is None else Scores(*(x.clone() for x in result.scores))
    return Result(result.drawn.clone(), scores)
