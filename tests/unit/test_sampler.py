"""`sample` against the exact distribution, with every filter and penalty alone and all together."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.pairwise import one_in
from tests.support.stepped_rows import pick
from worker.api import MAX_STOP_IDS, Sampling
from worker.draw import changes, sampler
from worker.draw.changes import penalize, unpack
from worker.draw.logprobs import logprobs
from worker.draw.sampler import SamplingRows, sample
from worker.forward.draws import Changes, Masks
from worker.ops.philox import gumbel_ref
from worker.plan import TAILS, Plan, RowStart, Tail
from worker.step.state import PenaltyTables, StateShape, StepState

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
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    allowed: Collection[int] = ()  # by the grammar; () = there is none

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence or self.frequency or self.repetition != 1 or self.bias)

    def start(self, slot: int) -> RowStart:
        """What tells the device of its history and biases."""
        sampling = Sampling(max_tokens=1, logit_bias=self.bias)
        return RowStart(
            1, sampling, 9, 0, penalty_slot=slot, prompt=self.prompt, output=self.output
        )


PROMPT, OUTPUT = (1, 4, 4, 9, 13, 20), (4, 6, 6, 6, 13, 2)
TEXT = {"prompt": PROMPT, "output": OUTPUT}
BIAS = ((4, 1.5), (9, -2.5), (13, 2.0), (17, 3.0), (0, -100.0))

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
    "presence": Case(presence=1.2, **TEXT),
    "frequency": Case(frequency=0.6, **TEXT),
    "negative presence and frequency": Case(presence=-0.7, frequency=-0.4, **TEXT),
    "repetition": Case(repetition=1.8, **TEXT),
    "repetition below one": Case(repetition=0.7, **TEXT),
    "bias": Case(bias=BIAS),
    "bias and repetition": Case(bias=BIAS, repetition=1.6, **TEXT),
    "penalties, cold": Case(0.6, presence=0.5, frequency=0.5, repetition=1.3, **TEXT),
    "grammar": Case(allowed=(0, 3, 5, 8, 11, 23)),
    "grammar and stops masked": Case(stops=(3, 5), masked=True, allowed=(0, 3, 5, 8, 11, 23)),
    "everything": Case(
        1.6, 9, 0.92, 0.03, (2, 7), masked=True, presence=0.4, frequency=0.3, repetition=1.4,
        bias=BIAS, allowed=tuple(i for i in range(24) if i % 5), **TEXT,
    ),
}  # fmt: skip


def logits_of(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def rows_of(cases: list[Case], seed: Tensor, position: Tensor) -> SamplingRows:
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
        presence_penalty=column("presence", torch.float32),
        frequency_penalty=column("frequency", torch.float32),
        repetition_penalty=column("repetition", torch.float32),
        penalty_slot=torch.tensor(
            [i + 1 if case.has_penalties else 0 for i, case in enumerate(cases)]
        ),
    )


def penalties_of(cases: list[Case], vocab: int = VOCAB) -> PenaltyTables:
    """Tables of `rows_of(cases)`; the neutral entry has been written to by others."""
    penalties = PenaltyTables(len(cases), vocab, CPU)
    penalties.counts[0] = torch.arange(vocab)
    for index, case in enumerate(cases):
        if case.has_penalties:
            penalties.fill(case.start(index + 1), lambda v, dtype: torch.tensor(v, dtype=dtype))
    return penalties


def masks_of(cases: list[Case], vocab: int = VOCAB) -> Masks:
    """Bit masks as `Grammars.masks` makes them."""
    bits = np.zeros((1 + len(cases), -(-vocab // 32) * 32), bool)
    for line, case in enumerate(cases, 1):
        bits[line, list(case.allowed)] = True
    bits[0] = True
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    return Masks(words, torch.tensor([i * bool(case.allowed) for i, case in enumerate(cases, 1)]))


def changes_of(cases: list[Case], vocab: int = VOCAB) -> Changes:
    """Penalties and masks of `rows_of(cases)`."""
    return penalties_of(cases, vocab).changes(masks_of(cases, vocab))


def change(values: np.ndarray, case: Case) -> np.ndarray:
    """float64 logits after bias, penalties, the ban of stop tokens and the grammar."""
    values = values.copy()
    for token, bias in case.bias:
        values[token] += bias
    for token in {*case.prompt, *case.output}:
        by = case.repetition
        values[token] = values[token] / by if values[token] > 0 else values[token] * by
    for token in case.output:  # once for each time that it was drawn
        values[token] -= case.frequency
    for token in set(case.output):
        values[token] -= case.presence
    if case.masked:
        values[list(case.stops)] = -np.inf
    if case.allowed:
        values[[i for i in range(len(values)) if i not in case.allowed]] = -np.inf
    return values


def exact(logits: Tensor, case: Case) -> np.ndarray:
    """The distribution, one token at a time and in float64."""
    values = change(logits.numpy().astype(np.float64), case) / case.temperature
    p = np.exp(values - values.max())
    p /= p.sum()
    kept = [i for i in range(len(p)) if p[i] >= case.min_p * p.max() and p[i] > 0]
    kept.sort(key=lambda i: -p[i])
    if case.top_k:
        kept = kept[: case.top_k]
    total, mass, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += p[i] / total
        if mass >= case.top_p:
            break
    out = np.zeros_like(p)
    out[nucleus] = p[nucleus]
    return out / out.sum()


def p_value(logits: Tensor, case: Case, tail: Tail = "filtered") -> float:
    """Chi-square of DRAWS tokens over many seeds and positions; 0 if an impossible one came."""
    number = torch.arange(DRAWS)
    seed, position = number // 200 * 7919 + 11, number % 200 + 5
    rows = rows_of([case], seed, position)
    columns = {each.name: getattr(rows, each.name) for each in fields(rows)}
    wide = {k: v.expand(DRAWS, *v.shape[1:]) for k, v in columns.items() if len(v) == 1}
    rows = replace(rows, **wide)
    changes = changes_of([case])
    changes = replace(changes, masks=Masks(changes.masks.words, changes.masks.line.expand(DRAWS)))
    any_change = case.has_penalties or case.allowed
    tokens = sample(logits.repeat(DRAWS, 1), rows, tail, changes if any_change else None)
    counts = np.bincount(tokens.numpy(), minlength=len(logits)).astype(float)
    return p_of(counts[None], exact(logits, case)[None] * DRAWS)


def p_of(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of tables of counts [tables, vocab] together; 0 if an impossible one came.

    What is expected fewer than five times in a table counts there as one.
    """
    from scipy.special import chdtrc  # stats takes a second more

    if counts[expected == 0].sum() > 0:
        return 0.0
    total, freedom = 0.0, 0
    for seen, wanted in zip(counts, expected, strict=True):
        big = wanted >= 5
        pairs = list(zip(seen[big], wanted[big], strict=True))
        if wanted[~big].sum() > 0:
            pairs.append((seen[~big].sum(), wanted[~big].sum()))
        total += sum((one - other) ** 2 / other for one, other in pairs)
        freedom += max(0, len(pairs) - 1)
    return float(chdtrc(freedom, total)) if freedom else 1.0


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_exact_distribution(name: str) -> None:
    assert p_value(logits_of(1), CASES[name]) > REJECT


@pytest.mark.parametrize(
    "name", ["plain", "cold", "hot", "stops masked", "penalties, cold", "grammar"]
)
def test_the_random_tail_follows_it_too(name: str) -> None:
    assert p_value(logits_of(2), CASES[name], "random") > REJECT


def changed(attribute: str, **change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """`sampler.attribute(values, rows, ...)` with other parameters than those of the row."""
    original = getattr(sampler, attribute)

    def call(values: Tensor, rows: SamplingRows, *more: object) -> Tensor:
        new = {name: f(getattr(rows, name)) for name, f in change.items()}
        return original(values, replace(rows, **new), *more)

    return call


def with_tables(change: Callable[[Changes], None]) -> Callable[..., Tensor]:
    """`penalize` with other tables than those of the rows."""

    def call(logits: Tensor, rows: SamplingRows, changes: Changes) -> Tensor:
        change(changes)
        return penalize(logits, rows, changes)

    return call


def bias_last(logits: Tensor, rows: SamplingRows, penalties: Changes) -> Tensor:
    bias = penalties.bias.clone()
    penalties.bias.zero_()
    return penalize(logits, rows, penalties) + bias[rows.penalty_slot]


def divides_all(logits: Tensor, rows: SamplingRows, penalties: Changes) -> Tensor:
    seen = penalties.in_prompt[rows.penalty_slot] | (penalties.counts[rows.penalty_slot] > 0)
    return torch.where(seen, logits / rows.repetition_penalty[:, None], logits)


COUNTS_PROMPT = with_tables(lambda changes: changes.counts.add_(changes.in_prompt))
BROKEN = {
    "halves of the vocabulary share noise": ("plain", "gumbel_ref",
        lambda seed, position, size, first: gumbel_ref(seed, position, size // 2).repeat(1, 2)),
    "one seed for all": ("plain", "gumbel_ref",
        lambda seed, *rest: gumbel_ref(torch.zeros_like(seed), *rest)),
    "noise too small": ("plain", "gumbel_ref", lambda *args: gumbel_ref(*args) * 0.9),
    "top_k one too many": ("top_k", "keep_likely", changed("keep_likely", top_k=lambda k: k + 1)),
    "top_k one too few": ("top_k", "keep_likely", changed("keep_likely", top_k=lambda k: k - 1)),
    "top_p off": ("top_p", "keep_likely", changed("keep_likely", top_p=torch.ones_like)),
    "top_p too low": ("top_p", "keep_likely", changed("keep_likely", top_p=lambda p: p * 0.9)),
    "min_p off": ("min_p", "keep_likely", changed("keep_likely", min_p=torch.zeros_like)),
    "min_p squared": ("min_p", "keep_likely", changed("keep_likely", min_p=lambda p: p * p)),
    "stops not masked": ("stops masked", "ban_early_stops", lambda logits, *_: logits),
    "presence for the prompt too": ("presence", "penalize", COUNTS_PROMPT),
    "presence off": ("presence", "penalize", changed("penalize", presence_penalty=lambda p: p * 0)),
    "frequency once": ("frequency", "penalize", with_tables(lambda c: c.counts.clamp_(max=1))),
    "frequency for the prompt too": ("frequency", "penalize", COUNTS_PROMPT),
    "repetition over output alone": (
        "repetition", "penalize", with_tables(lambda c: c.in_prompt.zero_()),
    ),
    "repetition divides negative logits": ("repetition", "penalize", divides_all),
    "bias after repetition": ("bias and repetition", "penalize", bias_last),
    "bias off": ("bias", "penalize", with_tables(lambda c: c.bias.zero_())),
    "everything but the frequency": (
        "everything", "penalize", changed("penalize", frequency_penalty=lambda p: p * 0),
    ),
    "grammar of the neighbour": ("grammar", "unpack", lambda *args: unpack(*args).roll(1, 1)),
    "half a grammar": ("grammar", "unpack",
        lambda mask, size: unpack(mask, size) | (torch.arange(size) >= size // 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(4, BROKEN))
def test_the_same_check_fails_a_broken_sampler(name: str) -> None:
    case, attribute, replacement = BROKEN[name]
    owner = changes if attribute == "unpack" else sampler
    with mock.patch.object(owner, attribute, replacement):
        assert p_value(logits_of(1), CASES[case]) < REJECT


def batch_of(cases: list[Case], vocab: int) -> tuple[Tensor, SamplingRows]:
    """Logits, seeds and positions of their own for each."""
    logits = torch.stack([logits_of(i, vocab) for i in range(len(cases))])
    number = torch.arange(len(cases))
    return logits, rows_of(cases, number * 31, number * 7 + 3)


def test_every_tail_that_serves_a_row_draws_the_same() -> None:
    plain = [case for case in CASES.values() if not case.has_penalties and not case.allowed]
    greedy = [Case(temperature=0.0), Case(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)]
    cases = [*plain, *greedy] * 40
    logits, rows = batch_of(cases, 96)
    together = sample(logits.clone(), rows, "filtered")
    for index, case in enumerate(cases):
        filters = case.top_k > 0 or case.top_p < 1 or case.min_p > 0
        least = 1 if case.temperature == 0 else 3 if filters else 2
        for tail in TAILS[least:]:
            token = sample(logits[[index]].clone(), pick(rows, [index]), tail)
            assert token.item() == together[index], (case, tail)


def changed_batch() -> tuple[Tensor, SamplingRows, list[Case], Changes]:
    """Neutral rows beside penalised and masked ones, greedy ones among both."""
    greedy = [replace(CASES[name], temperature=0.0) for name in ("plain", "everything", "grammar")]
    cases = [*CASES.values(), *greedy] * 12
    return *batch_of(cases, 70), cases, changes_of(cases, 70)


def test_rows_beside_penalised_and_masked_ones_keep_every_bit() -> None:
    logits, rows, cases, changes = changed_batch()
    tokens = sample(logits.clone(), rows, "filtered", changes)
    neutral = [i for i, case in enumerate(cases) if not case.has_penalties]
    bits = penalize(logits, rows, changes)[neutral].view(torch.int32)
    assert torch.equal(bits, logits[neutral].view(torch.int32))
    free = [i for i in neutral if not cases[i].allowed]
    alone = sample(logits[free].clone(), pick(rows, free), "filtered")
    assert torch.equal(tokens[free], alone)
    unmasked = [i for i, case in enumerate(cases) if not case.allowed]
    without = replace(changes, masks=None)
    drawn = sample(logits[unmasked].clone(), pick(rows, unmasked), "filtered", without)
    assert torch.equal(tokens[unmasked], drawn)


def test_a_greedy_penalised_row_takes_the_likeliest_of_what_is_left() -> None:
    logits, rows, cases, changes = changed_batch()
    for tail in TAILS[1:]:
        tokens = sample(logits.clone(), rows, tail, changes)
        for i, case in enumerate(cases):
            if case.temperature == 0:
                assert tokens[i] == change(logits[i].numpy().astype(np.float64), case).argmax()


@pytest.mark.parametrize("tail", TAILS[1:])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_leaves_only_stop_tokens_goes_before_min_len(tail, temperature) -> None:
    stuck = Case(temperature, 4, 0.9, 0.1, stops=(3, 5), masked=True, allowed=(3, 5))
    beside = replace(stuck, allowed=(3, 5, 8))
    number = torch.arange(400)
    rows = rows_of([stuck, beside] * 200, number, number + 5)
    logits = logits_of(4).repeat(400, 1)
    tokens = sample(logits, rows, tail, changes_of([stuck, beside] * 200))
    assert set(tokens[::2].tolist()) <= {3, 5}
    assert set(tokens[1::2].tolist()) == {8}


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(num_top: int) -> None:
    logits, rows, _, changes = changed_batch()
    before = logits.clone()
    token = sample(logits, rows, "filtered", changes)
    assert torch.equal(logits, before)
    values, ids = logprobs(logits, token, num_top)
    raw = logits.numpy().astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    order = (-raw).argsort(-1)[:, :num_top]
    assert ids.tolist() == np.concatenate((token[:, None].numpy(), order), 1).tolist()
    np.testing.assert_allclose(values, np.take_along_axis(expected, ids.numpy(), 1), atol=1e-5)


def test_gather_reads_the_rows_parameters_from_the_step_state() -> None:
    state = StepState(StateShape(4, 2, [7], 2, VOCAB), CPU)
    sampling = Sampling(
        9, 0.5, 0.25, 6, 0.125, 99, stop_ids=(3,), presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.5, logit_bias=((8, 2.0),),
    )  # fmt: skip
    start = RowStart(2, sampling, 30, 12, penalty_slot=2, prompt=(5, 6), output=(6, 7, 7))
    plan = Plan(1, starts=(start,))
    state.apply(plan)
    rows = SamplingRows.gather(state, torch.tensor([2, 0]), torch.tensor([20, 1]))
    expected = {
        "position": [20, 1], "seed": [99, 0], "temperature": [0.5, 0.0], "top_k": [6, 0],
        "top_p": [0.25, 1.0], "min_p": [0.125, 0.0], "min_len": [12, 0],
        "presence_penalty": [0.5, 0.0], "frequency_penalty": [0.25, 0.0],
        "repetition_penalty": [1.5, 1.0], "penalty_slot": [2, 0],
    }  # fmt: skip
    assert {name: getattr(rows, name).tolist() for name in expected} == expected
    assert rows.stop_ids[0].tolist() == [3, 7, *[-1] * (MAX_STOP_IDS - 2)]
    assert set(rows.stop_ids[1].tolist()) == {-1}
    tables = state.penalties
    assert tables.in_prompt.nonzero().tolist() == [[2, 5], [2, 6]]
    assert tables.counts.nonzero().tolist() == [[2, 6], [2, 7]]
    assert tables.counts[2, [6, 7]].tolist() == [1, 2]
    assert tables.bias.nonzero().tolist() == [[2, 8]]
