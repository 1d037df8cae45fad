"""What is counted of the sums among ranks is what they sum."""

import pytest
from torch import Tensor

from tests.equivalence.test_ranks import asked, sections
from tests.support.engines import running
from worker.observe.metrics import WorkerMetrics
from worker.peers.gloo import GlooCollective

pytestmark = pytest.mark.usefixtures("one_thread")


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
