"""What is counted of the sums among ranks is what they sum."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.equivalence.test_ranks import asked, sections
from tests.support.engines import running
from worker.observe.metrics import WorkerMetrics
from worker.peers.base import SingleCollective
from worker.peers.custom import NCCL, ONE_SHOT, TWO_SHOT, choose
from worker.peers.gloo import GlooCollective
from worker.plan import Chunk, Plan
from worker.run.runner import count_sums

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = {"model": "tiny", "role": "decode", "worker": "decode-0"}
TABLE = ((1 << 14, ONE_SHOT), (1 << 20, TWO_SHOT))


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvlane_{name}", metrics.bound | labels)


def test_every_step_counts_the_bytes_that_its_layers_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    all_reduce = GlooCollective.all_reduce

    def noted(collective: GlooCollective, x: Tensor) -> Tensor:
        if collective.rank == 0:
            summed.append(x.nbytes)
        return all_reduce(collective, x)

    monkeypatch.setattr(GlooCollective, "all_reduce", noted)
    with running(sections("none", "never"), num_prefill=0, decode_tp=2) as cluster:
        engine = cluster.workers["decode-0"].engine
        summed.clear()  # of the start
        asked(cluster)
        sums_of_step = 1 + 2 * engine.shape.num_layers  # of the embedding, and two of each layer
        counted = [
            [value(engine.metrics, f"all_reduce_bytes_{what}", kind=kind, algorithm="gloo") or 0
             for kind in ("prefill", "decode")]
            for what in ("count", "sum")
        ]  # fmt: skip
        assert all(min(each) > 0 for each in counted)
        assert [sums_of_step * sum(each) for each in counted] == [len(summed), sum(summed)]
        assert value(engine.metrics, "ranks") == 2


def test_one_rank_counts_none() -> None:
    with running(sections("none", "never"), num_prefill=0) as cluster:
        engine = cluster.workers["decode-0"].engine
        asked(cluster)
        assert (
            value(engine.metrics, "all_reduce_bytes_count", kind="decode", algorithm="gloo") is None
        )
        assert value(engine.metrics, "ranks") == 1


@pytest.mark.parametrize(
    ("num_tokens", "algorithm"), [(8, ONE_SHOT), (9, TWO_SHOT), (512, TWO_SHOT), (513, NCCL)]
)
def test_a_step_is_under_what_its_padded_size_is_summed_by(num_tokens: int, algorithm: str) -> None:
    class Chosen(SingleCollective):
        """As the custom one chooses."""

        def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
            assert dtype == torch.bfloat16
            return choose(TABLE, num_bytes)

    metrics = WorkerMetrics(**BOUND)
    model: Any = SimpleNamespace(
        shape=SimpleNamespace(hidden_size=1024),
        placement=SimpleNamespace(dtype=torch.bfloat16),
        collective=Chosen(),
    )
    for plan in (Plan(1, decode=(1,)), Plan(2, chunks=(Chunk(1, 0, (5, 6, 7)),))):
        count_sums(model, metrics, plan, num_tokens)
    for kind in ("decode", "prefill"):
        labels = {"kind": kind, "algorithm": algorithm}
        assert value(metrics, "all_reduce_bytes_count", **labels) == 1
        assert value(metrics, "all_reduce_bytes_sum", **labels) == 2048 * num_tokens
