"""`sample` against the exact distribution, with every filter alone and all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch
from scipy import stats
from torch import Tensor

from worker import sampler
from worker.api import MAX_STOP_IDS, Sampling
from worker.kernels.philox import gumbel_ref
from worker.plan import TAILS, Plan, RowStart, Tail
from worker.sampler import SamplingRows, sample
from worker.state import StepState

VOCAB = 24
DRAWS = 40_000
CPU = torch.device("cpu")
REJECT = 1e-6  # p-value below which the sampler is wrong; all seeds are fixed


@dataclass(frozen=True)
class Case:
    """Parameters of one row; `position` is drawn anew for each row of a check."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stops: tuple[int, ...] = ()
    masked: bool = False  # all positions are below min_len


CASES = {
    "plain": Case(),
    "cold": Case(temperature=0.4),
    "hot": Case(temperature=1.9),
    "top_k": Case(top_k=5),
    "top_k beyond the vocabulary": Case(top_k=500),
    "top_p": Case(top_p=0.7),
    "top_p near one": Case(top_p=0.99),
    "min_p": Case(min_p=0.15),
    "stops allowed": Case(stops=(0, 3, 5)),
    "stops masked": Case(stops=(0, 3, 5), masked=True),
    "top_k and top_p": Case(top_k=8, top_p=0.8),
    "all": Case(1.5, 10, 0.9, 0.05, (2, 7), masked=True),
}


def logits_of(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def rows_of(cases: list[Case], seed: Tensor, position: Tensor) -> SamplingRows:
    """One row for each case."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(case, name) for case in cases], dtype=dtype)

    stops = [[*case.stops, *[-1] * (MAX_STOP_IDS - len(case.stops))] for case in cases]
    masked = torch.tensor([case.masked for case in cases])
    return SamplingRows(
        position=position,
        seed=seed,
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        min_len=torch.where(masked, position + 1, position),
        stop_ids=torch.tensor(stops),
    )


def exact(logits: Tensor, case: Case) -> Tensor:
    """The distribution, one token at a time and in float64."""
    values = logits.double().clone()
    if case.masked:
        values[list(case.stops)] = float("-inf")
    p = (values / case.temperature).softmax(-1)
    kept = [i for i in range(len(p)) if p[i] >= case.min_p * p.max() and p[i] > 0]
    kept.sort(key=lambda i: -p[i])
    if case.top_k:
        kept = kept[: case.top_k]
    total, mass, nucleus = sum(float(p[i]) for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += float(p[i]) / total
        if mass >= case.top_p:
            break
    out = torch.zeros_like(p)
    out[nucleus] = p[nucleus]
    return out / out.sum()


def p_value(logits: Tensor, case: Case, tail: Tail = "filtered") -> float:
    """Chi-square of DRAWS tokens over many seeds and positions; 0 if an impossible one came."""
    number = torch.arange(DRAWS)
    seed, position = number // 200 * 7919 + 11, number % 200 + 5
    rows = rows_of([case], seed, position)
    rows = replace(
        rows,
        **{
            each.name: getattr(rows, each.name).expand(DRAWS, *getattr(rows, each.name).shape[1:])
            for each in fields(rows)
            if getattr(rows, each.name).shape[0] == 1
        },
    )
    tokens = sample(logits.repeat(DRAWS, 1), rows, tail)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = exact(logits, case) * DRAWS
    if counts[expected == 0].sum() > 0:
        return 0.0
    order = expected.argsort(descending=True)
    big = [int(i) for i in order if expected[i] >= 5]
    rest = [int(i) for i in order if 0 < expected[i] < 5]
    seen = [*counts[big].tolist(), float(counts[rest].sum())]
    wanted = [*expected[big].tolist(), float(expected[rest].sum())]
    if not rest:
        seen, wanted = seen[:-1], wanted[:-1]
    if len(seen) == 1:
        return 1.0
    return float(stats.chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_exact_distribution(name: str) -> None:
    value = p_value(logits_of(1), CASES[name])
    print(name, value)
    assert value > REJECT


@pytest.mark.parametrize("name", ["plain", "cold", "hot", "stops masked"])
def test_the_random_tail_follows_it_too(name: str) -> None:
    assert p_value(logits_of(2), CASES[name], "random") > REJECT


def halves_share_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    return gumbel_ref(seed, position, vocab_size // 2).repeat(1, 2)


def noise_without_position(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    return gumbel_ref(torch.zeros_like(seed), position, vocab_size)


def too_small_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    return gumbel_ref(seed, position, vocab_size) * 0.9


def changed(**change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, SamplingRows], Tensor]:
    """keep_likely with other parameters than those of the row."""
    original = sampler.keep_likely

    def keep(scaled: Tensor, rows: SamplingRows) -> Tensor:
        values = {name: f(getattr(rows, name)) for name, f in change.items()}
        return original(scaled, replace(rows, **values))

    return keep


BROKEN = {
    "halves of the vocabulary share noise": ("plain", "gumbel_ref", halves_share_noise),
    "one seed for all": ("plain", "gumbel_ref", noise_without_position),
    "noise too small": ("plain", "gumbel_ref", too_small_noise),
    "top_k one too many": ("top_k", "keep_likely", changed(top_k=lambda k: k + 1)),
    "top_k one too few": ("top_k", "keep_likely", changed(top_k=lambda k: k - 1)),
    "top_p off": ("top_p", "keep_likely", changed(top_p=torch.ones_like)),
    "top_p too low": ("top_p", "keep_likely", changed(top_p=lambda p: p * 0.9)),
    "min_p off": ("min_p", "keep_likely", changed(min_p=torch.zeros_like)),
    "min_p squared": ("min_p", "keep_likely", changed(min_p=lambda p: p * p)),
    "stops not masked": ("stops masked", "adjust", lambda logits, rows: logits),
}


@contextmanager
def broken(name: str) -> Iterator[str]:
    case, attribute, replacement = BROKEN[name]
    with mock.patch.object(sampler, attribute, replacement):
        yield case


@pytest.mark.parametrize("name", BROKEN)
def test_the_same_check_fails_a_broken_sampler(name: str) -> None:
    with broken(name) as case:
        assert p_value(logits_of(1), CASES[case]) < REJECT


def mixed_batch() -> tuple[Tensor, SamplingRows, list[Case]]:
    greedy = [Case(temperature=0.0), Case(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)]
    cases = [*CASES.values(), *greedy] * 40
    logits = torch.stack([logits_of(i, 96) for i in range(len(cases))])
    number = torch.arange(len(cases))
    return logits, rows_of(cases, number * 31, number * 7 + 3), cases


def pick(rows: SamplingRows, index: list[int]) -> SamplingRows:
    return replace(rows, **{each.name: getattr(rows, each.name)[index] for each in fields(rows)})


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, rows, _ = mixed_batch()
    together = sample(logits.clone(), rows, "filtered")
    shuffled = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0)).tolist()
    again = sample(logits[shuffled].clone(), pick(rows, shuffled), "filtered")
    assert torch.equal(again, together[shuffled])
    for index in range(0, len(logits), 5):
        alone = sample(logits[[index]].clone(), pick(rows, [index]), "filtered")
        assert alone.item() == together[index]


def test_every_tail_that_serves_a_row_draws_the_same() -> None:
    logits, rows, cases = mixed_batch()
    together = sample(logits.clone(), rows, "filtered")
    for index, case in enumerate(cases):
        filters = case.top_k > 0 or case.top_p < 1 or case.min_p > 0
        least = 1 if case.temperature == 0 else 3 if filters else 2
        for tail in TAILS[least:]:
            token = sample(logits[[index]].clone(), pick(rows, [index]), tail)
            assert token.item() == together[index], (case, tail)


def test_a_greedy_row_takes_the_likeliest_beside_sampled_ones() -> None:
    logits, rows, cases = mixed_batch()
    tokens = sample(logits.clone(), rows, "filtered")
    greedy = [i for i, case in enumerate(cases) if case.temperature == 0]
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    assert not torch.equal(tokens, logits.argmax(-1))


def test_a_greedy_row_draws_no_stop_token_too_early() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5], logits[0, 6] = 9.0, 8.0
    case = Case(temperature=0.0, stops=(5,), masked=True)
    at = torch.tensor([4])
    for tail in TAILS[1:]:
        assert sample(logits.clone(), rows_of([case], at, at), tail).item() == 6
        allowed = replace(case, masked=False)
        assert sample(logits.clone(), rows_of([allowed], at, at), tail).item() == 5


@pytest.mark.parametrize("case", [Case(top_k=1), Case(top_p=1e-9), Case(min_p=0.999999)])
def test_a_filter_that_leaves_one_token_leaves_the_likeliest(case: Case) -> None:
    logits = torch.stack([logits_of(i) for i in range(200)])
    number = torch.arange(200)
    tokens = sample(logits.clone(), rows_of([case] * 200, number, number), "filtered")
    assert torch.equal(tokens, logits.argmax(-1))


def test_equal_logits_survive_top_k_as_exactly_k_tokens() -> None:
    number = torch.arange(2_000)
    rows = rows_of([Case(top_k=3)] * 2_000, number, number)
    assert len(sample(torch.zeros(2_000, 10), rows, "filtered").unique()) == 3


def test_the_position_changes_the_draw_and_a_replay_does_not() -> None:
    case = [Case()] * 400
    logits = logits_of(3).repeat(400, 1)
    seed, position = torch.full((400,), 5), torch.arange(400)
    first = sample(logits.clone(), rows_of(case, seed, position), "random")
    again = sample(logits.clone(), rows_of(case, seed, position), "random")
    assert torch.equal(first, again)
    assert len(first.unique()) > 5


def test_gather_reads_the_rows_parameters_from_the_step_state() -> None:
    state = StepState(4, 2, [7], CPU)
    sampling = Sampling(9, 0.5, 0.25, 6, 0.125, 99, stop_ids=(3,))
    plan = Plan(1, starts=(RowStart(2, sampling, 30, 12),))
    state.apply(plan)
    rows = SamplingRows.gather(state, torch.tensor([2, 0]), torch.tensor([20, 1]))
    assert rows.position.tolist() == [20, 1]
    assert rows.seed.tolist() == [99, 0]
    assert rows.temperature.tolist() == [0.5, 0.0]
    assert rows.top_k.tolist() == [6, 0]
    assert rows.top_p.tolist() == [0.25, 1.0]
    assert rows.min_p.tolist() == [0.125, 0.0]
    assert rows.min_len.tolist() == [12, 0]
    assert rows.stop_ids[0].tolist() == [3, 7, *[-1] * (MAX_STOP_IDS - 2)]
    assert set(rows.stop_ids[1].tolist()) == {-1}
