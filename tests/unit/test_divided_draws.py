"""Draws over a vocabulary that is divided among ranks are those over all of it.

The twins here; the kernels under the interpreter, and compiled for sm_90.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, compiling
from tests.support.pairwise import in_whole, more
from tests.unit.test_draft_rows import draws_case
from tests.unit.test_kernels_triton import rows_of
from worker.api import MAX_STOP_IDS
from worker.drafts import draft_steps, draft_steps_triton
from worker.draw import sampler
from worker.draw import sampler_triton as draw
from worker.draw.sampler import SamplingRows
from worker.model.layers import VocabParallelEmbedding
from worker.model.placement import Placement
from worker.ops import best_pairs, best_pairs_triton
from worker.ops.best_pairs import VocabPart
from worker.plan import Tail

pytest.importorskip("triton", reason=WHY)

# The kernel has one for both: rows of temperature 0 are greedy.
TAILS: tuple[Tail, ...] = ("random",) if INTERPRETED else ("greedy", "random")
F32, BF16 = torch.float32, torch.bfloat16
Draw = Callable[[Tensor, VocabPart | None], Tensor]
pytestmark = [  # numpy's, where a GPU says nothing
    pytest.mark.filterwarnings(f"ignore:{what}") for what in ("All-NaN", "invalid value")
]


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Several blocks a rank, although the rows are short."""
    with (
        mock.patch.object(draw, "DRAW_BLOCK", 64),
        mock.patch.object(draft_steps_triton, "BLOCK", 64),
        mock.patch.object(best_pairs_triton, "ROWS", 4),
    ):
        yield


def heads_of(vocab_size: int, size: int) -> list[VocabParallelEmbedding]:
    """Of all ranks, whose collective is never called."""
    groups: list[Any] = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    placements = [Placement(group, F32, torch.device("cpu")) for group in groups]
    return [VocabParallelEmbedding(vocab_size, 1, placement) for placement in placements]


def divided(logits: Tensor, size: int, draw_part: Draw) -> list[Tensor]:
    """What each of so many ranks draws, each from its columns of the logits."""
    heads = heads_of(logits.shape[1], size)
    told: list[Tensor] = []

    def told_by_all(gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = []
        for head in heads:
            columns = logits[:, head.start : head.stop]
            found.append(draw_part(columns, replace(head.part, gather=gather)))
        return found

    def tell(pairs: Tensor) -> Tensor:
        told.append(pairs)
        return pairs[None]

    told_by_all(tell)
    assert all((each.dtype, len(each)) == (torch.int64, len(logits)) for each in told)
    everyone = torch.stack(told)
    return told_by_all(lambda pairs: everyone)


def target(rows: SamplingRows, tail: Tail) -> Draw:
    if INTERPRETED:
        return lambda logits, part: draw.draw_triton(logits, rows, "random", part=part)
    return lambda logits, part: sampler.draw_ref(logits, rows, tail, None, part)


def drafter(case: tuple[Any, ...], *, greedy: bool) -> Draw:
    """Those of a drafter, and what they leave in the state."""
    draws = case[1]._replace(seed=None) if greedy else case[1]
    op = draft_steps_triton.draw_drafts_triton if INTERPRETED else draft_steps.draw_drafts_ref

    def drafted(logits: Tensor, part: VocabPart | None) -> Tensor:
        drafts = torch.full((6, 1), 5)
        found = op(logits, draws._replace(part=part), drafts)
        return torch.cat((found, drafts[:, 0]))

    return drafted


def check(logits: Tensor, size: int, draw_part: Draw) -> None:
    wanted = draw_part(logits, None)
    for rank, found in enumerate(divided(logits, size, draw_part)):
        assert torch.equal(found, wanted), rank


def some_logits(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Of six rows: coarse ones, equal ones, some at -inf; all negative in one."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 2 * torch.randn(6, vocab_size, generator=generator)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, : vocab_size // 2 + 1] = float("-inf")
    logits[4] = logits[4].round() - 20
    return logits.to(dtype)


def check_target(tail: Tail, size: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Stop ids of all ranks, which half of the rows may not draw."""
    temperature = 0.0 if tail == "greedy" else [1.0, 0.6, 1.3, 0.8, 0.0, 0.9]
    logits = some_logits(vocab_size, dtype)
    stops = torch.full((6, MAX_STOP_IDS), -1)
    best = logits.float().topk(3).indices
    stops[:, :3], stops[:, 3] = best, vocab_size - 1
    rows = rows_of(6, temperature=temperature, min_len=[99, 0, 0, 99, 99, 0], stop_ids=stops)
    check(logits, size, target(rows, tail))


def check_ties(size: int) -> None:
    """The best stand at the last id of one rank and the first of the next."""
    rows = rows_of(3, temperature=0.0)
    logits = torch.full((3, 250), -3.0)
    first = heads_of(250, size)[1].start
    logits[:, first - 1 : first + 1] = torch.tensor([[2.0], [-1.0], [0.0]])
    logits[2, first - 1] = -0.0
    assert target(rows, "greedy")(logits, None).tolist() == [first - 1] * 3
    check(logits, size, target(rows, "greedy"))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("size", "vocab_size", "dtype"),
    [(2, 250, F32), (3, 401, BF16), (8, 131, F32), *in_whole((4, 23, F32), (8, 1200, BF16))],
)
def test_ranks_draw_as_one_does(tail: Tail, size: int, vocab_size: int, dtype: torch.dtype) -> None:
    check_target(tail, size, vocab_size, dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_values_the_lowest_id_wins_over_ranks_too(size: int) -> None:
    check_ties(size)


@pytest.mark.parametrize("tail", TAILS)
def test_what_is_not_a_number_is_as_on_one_rank(tail: Tail) -> None:
    rows = rows_of(4, temperature=0.0 if tail == "greedy" else 1.0)
    logits = torch.randn(4, 250, generator=torch.Generator().manual_seed(1))
    logits[0, 200] = float("nan")
    logits[1, [30, 180]] = float("nan")
    logits[2, 128:] = float("nan")  # all of the second rank's
    check(logits[:3], 2, target(rows_of(3, temperature=rows.temperature[:3]), tail))
    logits[3] = float("nan")
    first, second = divided(logits, 2, target(rows, tail))
    assert torch.equal(first, second)
    assert 0 <= first[3] < 250


def check_drafts(size: int, num_ids: int, *, mapped: bool, greedy: bool) -> None:
    case = draws_case(num_ids, mapped)
    check(case[0], size, drafter(case, greedy=greedy))
    check(case[0].round(), size, drafter(case, greedy=greedy))


@pytest.mark.product(
    case=((2, 250), (4, 97), (4, 20), *more((8, 1200))), mapped=(False, True), greedy=(False, True)
)
def test_ranks_draft_as_one_does(case: tuple[int, int], mapped: bool, greedy: bool) -> None:
    check_drafts(*case, mapped=mapped, greedy=greedy)


def test_parts_hold_each_id_once_and_begin_where_noise_does() -> None:
    for vocab_size, size in ((151936, 8), (250, 4), (23, 8), (16, 2)):
        heads = heads_of(vocab_size, size)
        assert [head.start for head in heads] == [0, *(head.stop for head in heads[:-1])]
        assert heads[-1].stop == vocab_size
        assert len({len(head.weight) for head in heads}) == 1
        for head in heads:
            assert head.part.vocab_size == vocab_size
            assert head.part.first % best_pairs.ALIGNMENT == 0
            assert head.start == min(head.part.first, vocab_size)
    assert heads_of(250, 1)[0].part is None


if not INTERPRETED:

    def test_the_kernels_compile_for_hopper_without_one() -> None:
        with compiling(best_pairs_triton):
            for ids in (torch.zeros(2, 80, dtype=torch.int32), torch.zeros(2, 80).long()):
                best_pairs_triton.best_pairs_triton(torch.zeros(2, 80), ids, 1 << 30)
            best_pairs_triton.best_ids_triton(torch.zeros(4, 2).long())

    def last_rank(real: Any) -> Any:
        """Of equal values: ids are not compared."""

        def best(pairs: Tensor) -> Tensor:
            key = (pairs + 0xFFFFFFFF) >> 32
            at = len(pairs) - 1 - key.flip(0).argmax(0)
            return -pairs.gather(0, at[None])[0] & 0xFFFFFFFF

        return best

    def bits_as_integers(real: Any) -> Any:
        """Of negative values the smallest is above all."""

        def pairs(values: Tensor, ids: Tensor) -> Tensor:
            at = values.argmax(-1) if len(ids) else values.new_zeros(len(values)).long()
            best = values.gather(1, at[:, None])[:, 0] if len(ids) else values.sum(-1)
            return (best.view(torch.int32).long() << 32) - (ids[at] if len(ids) else 0)

        return pairs

    WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "ids without the offset": (
            "best_pairs_ref", lambda real: lambda x, ids: real(x, ids - ids[:1]),
        ),
        "noise without the offset": ("gumbel_ref", lambda real: lambda *args: real(*args[:3])),
        "stops without the offset": ("ban_early_stops", lambda real: lambda *args: real(*args[:2])),
        "the highest of equal ones": (
            "best_pairs_ref", lambda real: lambda values, ids: real(values.flip(1), ids.flip(0)),
        ),
        "values without ids": ("best_ids_ref", last_rank),
        "bits as integers": ("best_pairs_ref", bits_as_integers),
        "the first rank's alone": ("best_ids_ref", lambda real: lambda pairs: real(pairs[:1])),
    }  # fmt: skip

    def check_targets() -> None:
        for tail in TAILS:
            check_target(tail, 2, 250, F32)
        check_ties(2)

    def check_all_drafts() -> None:
        for greedy in (False, True):
            check_drafts(2, 250, mapped=False, greedy=greedy)
        check(torch.zeros(5, 250), 2, drafter(draws_case(250, False), greedy=True))

    IN_DRAFTS = ("ids without the offset", "values without ids", "the first rank's alone")

    @pytest.mark.parametrize(
        ("name", "owner", "law"),
        [(name, sampler, check_targets) for name in WRONG]
        + [(name, draft_steps, check_all_drafts) for name in IN_DRAFTS],
    )
    def test_what_is_wrong_is_found(name, owner, law) -> None:
        attribute, wrong = WRONG[name]
        changed = mock.patch.object(owner, attribute, wrong(getattr(owner, attribute)))
        with changed, pytest.raises(AssertionError):
            law()
