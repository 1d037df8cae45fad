"""The same request gives the same ids, whatever serves it: of a model with recurrent layers.

The oracle is one request at a time, prefilled and decoded in one process by steps of width 1;
test_models.py compares its logits with `transformers`. All in float32, where the laws are exact.
"""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.support.engines import Running, running, value
from tests.support.hybrids import hybrid, poison
from tests.support.laws import ids
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.pairwise import in_whole, more, whole
from tests.support.patience import until
from tests.support.recorded import RecordedMemory, RecordedSteps, as_one_op, replay
from worker.api import Sampling
from worker.errors import UserError
from worker.model import delta_net
from worker.plan import Plan, RowStart

MTP = {"drafter": "mtp", "widths": [1, 4]}
NUM_TOKENS = 40 if whole else 12
LENGTHS = (1, 2, 63, 64, 65, 128, 200, 17)  # of prompts; around the borders of blocks
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def asked() -> tuple[list[tuple[int, ...]], list[Sampling]]:
    rng = random.Random(7)
    prompts = [tuple(rng.randrange(2, 199) for _ in range(length)) for length in LENGTHS]
    seeded = [Sampling(max_tokens=NUM_TOKENS, seed=rng.getrandbits(60), top_p=0.9) for _ in prompts]
    return prompts * 2, [GREEDY] * len(prompts) + seeded


def sections(mode: str, **engine: object) -> dict[str, dict[str, object]]:
    return {
        "model": {"path": str(hybrid()), "dtype": "float32", "load_format": "dummy"},
        "kv": {"page_size": 16},
        "engine": {"threads": 1, "max_num_reqs": 16, "strict": True, **engine},
        "disaggregation": {"mode": mode},
    }


def of_model(config: dict[str, Any], *, sparse: bool) -> dict[str, Any]:
    """The same; sparse: of a model with experts."""
    return config | {"model": config["model"] | {"path": str(hybrid(sparse=sparse))}}


@cache
def expected(*, sparse: bool = False) -> list[list[int]]:
    with running(of_model(sections("never"), sparse=sparse), num_prefill=0) as cluster:
        return [ids(cluster.client.generate([p], s))[0] for p, s in zip(*asked(), strict=True)]


@pytest.mark.product(
    place=("always", *more("never")),
    first_token=("prefill", *more("decode")),
    max_prefill_tokens=(None, *more(64, 150)),
    widths=((2,), *more((1, 4), (1,), (8,))),
    drafter=("ngram", *more("mtp")),
    overlap=(True, *more(False)),
    pages=("few", *more("enough")),
    num_groups=(2, *more(1)),
    ranks=((1, 2), *more((4, 2), (2, 1), (1, 1), (2, 2), (1, 4))),
    experts=(True, *more(False)),
)
def test_whatever_serves_a_request_changes_nothing(
    place,
    first_token,
    max_prefill_tokens,
    widths,
    drafter,
    overlap,
    pages,
    num_groups,
    ranks,
    experts,
) -> None:
    """ranks: of the prefill worker, of the decode worker. mtp: the model's own layer.

    experts: whether there are some, in the drafter too. Ranks have whole ones where prefill draws,
    parts elsewhere.
    """
    chunks = {} if max_prefill_tokens is None else {"max_prefill_tokens": max_prefill_tokens}
    wanted, config = expected(sparse=experts), of_model(sections(place, **chunks), sparse=experts)
    config["disaggregation"]["first_token"] = first_token
    config["engine"]["experts"] = "expert" if first_token == "prefill" else "tensor"
    config["kv"]["num_groups"] = num_groups
    config["spec"] = {"overlap": overlap}
    if widths != (1,):
        config["spec"] |= {"drafter": drafter, "widths": list(widths)}
    few = {"num_pages": 48, "growth_tokens": 1} if pages == "few" else {}
    prefill_tp, decode_tp = ranks
    with running(
        config, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_sections={"engine": few}
    ) as cluster:
        decode = cluster.workers["decode-0"].engine
        for count in range(20):  # rows run beside one another as the machine has it
            assert ids(cluster.client.generate(*asked())) == wanted
            if count and (pages != "few" or value(decode.metrics.preemptions)):
                break
        check_slots(cluster)
        if 1 not in widths and drafter == "mtp":  # else a step's time may speak for no drafts
            assert value(decode.metrics.spec_accepted) > 0, "nothing was ever folded from the ring"
        if pages == "few":
            assert value(decode.metrics.preemptions) > 0, "the pool was not small enough"
        if place == "always":
            moved = value(decode.metrics.pulled_bytes("shm/shm"))
            assert moved >= 2 * (len(wanted) - 2) * decode.layout.state.slot_bytes


@pytest.mark.parametrize(
    ("place", "chunks", "spec", "ranks"),
    [
        ("always", 64, {"drafter": "ngram", "widths": [3]}, (1, 2)),
        *in_whole(("never", 150, MTP, (1, 1)), ("always", None, {}, (2, 1))),
    ],
)
def test_neither_does_it_with_states_in_sixteen_bits(place, chunks, spec, ranks) -> None:
    """One at a time, and again by what is kept: sums of a batch differ in what is rounded then."""
    one, (prompts, sampling) = sections("never"), (each[3:7] for each in asked())
    one["kv"]["state_dtype"] = "bfloat16"
    with running(one, num_prefill=0) as cluster:
        wanted = [
            ids(cluster.client.generate([p], s))[0] for p, s in zip(prompts, sampling, strict=True)
        ]
        slot_bytes = cluster.workers["decode-0"].engine.layout.state.slot_bytes
    config = sections(place, **({"max_prefill_tokens": chunks} if chunks else {}))
    config |= {"kv": one["kv"], "spec": spec}
    prefill_tp, decode_tp = ranks
    with running(config, prefill_tp=prefill_tp, decode_tp=decode_tp) as cluster:
        for _ in range(2):
            found = [
                ids(cluster.client.generate([p], s))[0]
                for p, s in zip(prompts, sampling, strict=True)
            ]
            assert found == wanted
        decode = cluster.workers["decode-0"].engine
        check_slots(cluster)
        layout = decode.model_layout.state
        assert slot_bytes == layout.slot_bytes < replace(layout, state_dtype="float32").slot_bytes
        if place == "always":
            moved = value(decode.metrics.pulled_bytes("shm/shm"))
            assert moved >= 2 * len(wanted) * decode.layout.state.slot_bytes


@pytest.mark.parametrize(
    ("section", "message"),
    [({"max_prefill_tokens": 63}, "at least 64"), ({"graph": {"prefill": "compiled"}}, "trace")],
)
def test_settings_that_recurrent_layers_cannot_have_are_refused(section, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused, running(sections("never", **section)):
        pass
    assert refused.value.param is not None
    assert refused.value.param.startswith("engine.")


@pytest.mark.parametrize(
    ("spec", "chunks", "sparse"),
    [
        (MTP | {"widths": [4]}, "pieces", True),
        *in_whole((MTP, "pieces", False), (MTP, "whole", True), (MTP, "whole", False)),
        *in_whole(({}, "whole", False), ({}, "pieces", False), ({}, "pieces", True)),
    ],
)
def test_replays_change_nothing(
    chunks: str, spec: dict[str, object], sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/gpu/test_recurrent_on_cuda.py has the law for real graphs."""
    # The kernel is one launch, whatever the batch; its definition reads the batch on the host.
    monkeypatch.setattr(delta_net, "delta_chunk", as_one_op(delta_net.delta_chunk))
    config = sections("always", max_prefill_tokens=128, max_num_reqs=6)
    config = of_model(config, sparse=sparse)
    config["spec"] = {"overlap": chunks == "pieces", **spec}
    few = {"num_pages": 20, "growth_tokens": 1}
    made = Lockstep(config, decode_sections={"engine": few})
    try:
        replay(made, steps=True, chunks=chunks)
        for engine in made.engines.values():
            poison(engine)
        asks = [Ask(p, s, at=i // 2) for i, (p, s) in enumerate(zip(*asked(), strict=True))]
        preempted = made.engines[DECODE].metrics.preemptions
        for count in range(20):  # measured times, by which steps are chosen, are the machine's
            assert [answer.tokens for answer in made.serve(asks)] == expected(sparse=sparse)
            if count >= whole and value(preempted):
                break
        assert value(preempted) > 0, "the pool was not small enough"
    finally:
        made.close()


@pytest.mark.parametrize("num_live", [3, *more(0)])
def test_captures_leave_every_state_alone(num_live: int) -> None:
    """Those of rows that are live, too; the start-up check compares, and leaves zeros."""
    made = Lockstep(sections("never", max_num_reqs=4), num_prefill=0)
    try:
        loaded = made.engines[DECODE].runner.loaded
        starts = [
            RowStart(row, GREEDY, 99, 0, active=True, seq_len=7, last_token=5, state_slot=row)
            for row in range(1, num_live + 1)
        ]
        loaded.state.apply(Plan(0, starts=tuple(starts)))
        parts = [part for state in loaded.model.states for part in state]
        for part in parts:
            part.fill_(0.5)
        replay(made, steps=True, chunks="pieces")
        assert all((part[1:] == 0.5).all() for part in parts)
        graphs = RecordedSteps(loaded, RecordedMemory())
        assert len(graphs.capture()) == len(graphs.buckets)  # strict: it fails if one differs
        assert not any(part[1:5].any() for part in parts)
    finally:
        made.close()


def check_slots(cluster: Running) -> None:
    """Every slot comes back, once the step has settled that ran when its request ended."""
    cluster.wait_idle()
    for worker in cluster.workers.values():
        slots = worker.engine.metrics.slots
        until(lambda slots=slots: not value(slots("used")), "a slot is lost")
        assert value(slots("free")) == worker.engine.pool.num_slots - 1
