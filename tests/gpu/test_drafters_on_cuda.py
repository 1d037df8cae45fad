"""Drafters on a GPU: kernels, graphs and pulls leave what plain torch on the CPU says."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.gpu.sync import check_no_wait
from tests.support.chain_reference import ChainReference
from tests.support.dflash_reference import DFlashReference
from tests.support.drafter_audit import audit, trace_is_right
from tests.support.laws import ended
from tests.support.lockstep import DECODE, Ask, Lockstep, Window
from tests.support.prompts import TINY, problem_ids
from worker.api import Sampling

pytestmark = pytest.mark.gpu(1)
REFERENCES = {"chain": ChainReference, "dflash": DFlashReference}
DRAFTERS = tuple(REFERENCES)
NUM, WIDTHS = 8, [1, 2, 5, 8]
NEAR = 2e-3  # of a row's length: float32 on a GPU against a CPU, over some layers


def requests() -> list[Ask]:
    greedy = Sampling(60, temperature=0.0, ignore_eos=True)
    drawn = msgspec.structs.replace(greedy, temperature=0.8, top_p=0.9, top_k=50)
    return [
        Ask(prompt, msgspec.structs.replace(drawn if i % 2 else greedy, seed=50 + i), i)
        for i, prompt in enumerate(problem_ids(NUM))
    ]


def workers(
    drafter: str, dtype: str, graph: str, widths: Sequence[int] = (), *, num_prefill: int = 0,
    head_dtype: str = "model",
) -> Lockstep:  # fmt: skip
    """widths: none, no speculation."""
    spec: dict[str, object] = {}
    if widths:
        spec = {"drafter": drafter, "widths": list(widths), "head_dtype": head_dtype}
    sections: dict[str, dict[str, object]] = {
        "model": {"dtype": dtype},
        "kv": {"page_size": 16, "num_groups": 2},
        "engine": {
            "device": "cuda", "graph": graph, "num_pages": 400, "max_num_reqs": NUM,
            "max_prefill_tokens": 256, "strict": True,
        },
        "spec": spec,
        "transport": {"name": "mooncake", "kind": "tcp"},
        "disaggregation": {"mode": "always" if num_prefill else "never"},
    }  # fmt: skip
    return Lockstep(sections, num_prefill=num_prefill)


def served(made: Lockstep) -> tuple[list[list[int]], list[list[Window]]]:
    answers = made.serve(requests())
    return [each.tokens for each in answers], [made.windows[i] for i in range(NUM)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_graph_equals_eager_with_a_drafter(drafter: str, dtype: str) -> None:
    """Bit for bit, as engine.strict demands: drafts, draft rows and tails are compared too."""
    made = workers(drafter, dtype, "auto", WIDTHS, num_prefill=1)
    for engine in made.engines.values():
        assert engine.checks
        assert all(check.equal for check in engine.checks)
    made.close()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("graph", ["eager", "auto"])
def test_traces_and_pages_are_the_reference_s(drafter: str, graph: str, num_prefill: int) -> None:
    plain = workers("none", "float32", "eager")
    wanted, _ = served(plain)
    plain.close()
    made = workers(drafter, "float32", graph, [5], num_prefill=num_prefill)
    texts, traces = served(made)
    assert texts == wanted
    reference = REFERENCES[drafter](TINY, TINY.with_name(f"tiny-{drafter}"))
    num_compared = 0
    for ask, text, trace in zip(requests(), texts, traces, strict=True):
        whole, max_len = [*ask.prompt, *text], len(ask.prompt) + ask.sampling.max_tokens
        num_compared += trace_is_right(trace, whole, reference, ask.sampling, max_len)
    assert num_compared > 300
    for engine in made.engines.values():
        assert audit(engine, reference, NEAR) > 0
    assert max(window.num for trace in traces for window in trace) == 5
    made.close()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_head_in_eight_bits_changes_no_answer(drafter: str) -> None:
    found: list[tuple[list[list[int]], int]] = []
    for head_dtype in ("model", "float8_e4m3fn"):
        made = workers(drafter, "float32", "auto", [5], head_dtype=head_dtype)
        assert all(check.equal for check in made.engines[DECODE].checks)
        drafter_model = made.engines[DECODE].weights.drafter
        assert drafter_model is not None
        assert (drafter_model.head_copy is not None) == (head_dtype != "model")
        texts, traces = served(made)
        found.append((texts, sum(window.num - 1 for trace in traces for window in trace)))
        made.close()
    (plain, num_plain), (eight, num_eight) = found
    assert eight == plain
    assert num_eight > 0.95 * num_plain


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_step_that_drafts_never_waits_for_the_device(drafter: str) -> None:
    config: dict[str, Any] = {
        "kv": {"page_size": 16},
        "engine": {"device": "cuda", "num_pages": 400, "max_num_reqs": NUM},
        "spec": {"drafter": drafter, "widths": [1, 4]},
        "disaggregation": {"mode": "never"},
    }
    prompts, sampling = problem_ids(NUM), Sampling(40, temperature=0.7, seed=3)
    check_no_wait(config, lambda cluster: ended(cluster.client.generate(prompts, sampling)))
