"""Penalties, masks and windows in the draw kernels, and logprobs, against their torch twins.

Under the interpreter; compiled for sm_90. `changed_rows` is what the GPU's tests use as well.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, compiling
from tests.support.pairwise import in_whole, whole
from tests.unit.test_kernels_triton import rows_of
from worker.api import MAX_STOP_IDS
from worker.draw import changes_triton, logprobs, logprobs_triton
from worker.draw import draw_rows_triton as draw_rows
from worker.draw import sampler_triton as draw
from worker.draw.sampler import SamplingRows, change, draw_ref
from worker.forward.draws import Changes, Masks

pytest.importorskip("triton", reason=WHY)

PARAMETERS: dict[str, list[float]] = {  # of ten rows, again and again
    "temperature": [1.0, 0.0, 0.7, 1.0, 0.0, 1.5, 1.0, 0.0, 1.0, 0.8],
    "presence_penalty": [0.0, 2.7, 0.0, 0.0, -1.4, 1.3, 0.0, 0.0, 3.1, 0.0],
    "frequency_penalty": [0.0, 0.0, 1.31, 0.0, 0.0, 0.97, 0.0, 0.0, -1.23, 0.0],
    "repetition_penalty": [1.0, 1.0, 1.0, 1.3, 0.8, 1.1, 1.0, 1.0, 1.7, 1.0],
}
SLOTS = [0, 1, 2, 3, 4, 5, 6, 0, 7, 0]  # slot 6 has nothing but a bias
LINES = [0, 0, 1, 0, 2, 3, 0, 4, 5, 0]
FILTERS = {
    "top_k": [0, 40, 30, 0, 0, 25, 0, 3, 900, 0],
    "top_p": [0.9, 1.0, 0.8, 0.95, 0.5, 1.0, 0.9, 0.9, 0.7, 0.99],
    "min_p": [0.0, 0.0, 0.01, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.02],
}


def changed_rows(
    m: int, vocab: int, width: int = 1, device: str = "cpu", **columns: Any
) -> tuple[SamplingRows, Changes]:
    """Rows of m windows, a third of them with nothing of it, and what changes the others.

    Every second window is below its minimum; one mask leaves stop ids alone.
    """
    generator = torch.Generator().manual_seed(vocab)
    repeated = {
        name: [values[i % 10] for i in range(m) for _ in range(width)]
        for name, values in (PARAMETERS | columns).items()
    }
    position = torch.arange(m * width) * 7 + 3
    stops = torch.full((m * width, MAX_STOP_IDS), -1)
    stops[:, :2] = torch.tensor([3, vocab - 2])
    rows = rows_of(
        m * width, device, **repeated, position=position, stop_ids=stops,
        min_len=torch.where(torch.arange(m * width) // width % 2 == 0, position + 1, 0),
        penalty_slot=[SLOTS[i % 10] for i in range(m) for _ in range(width)],
    )  # fmt: skip
    bits = torch.rand(7, vocab, generator=generator) < 0.5
    bits[0], bits[1] = True, False
    bits[1, [3, vocab - 2]] = True
    weights = torch.tensor([1 << i for i in range(31)] + [-(1 << 31)])
    padded = torch.nn.functional.pad(bits, (0, -vocab % 32)).view(7, -1, 32)
    words = (padded * weights).sum(-1).to(torch.int32)
    line = torch.tensor([LINES[i % 10] for i in range(m) for _ in range(width)])
    counts = torch.randint(-3, 4, (8, vocab), generator=generator, dtype=torch.int32).clamp(min=0)
    biased = torch.tensor([False, True, False, False, True, False, True, False])
    bias = torch.randn(8, vocab, generator=generator) * biased[:, None]
    in_prompt = torch.rand(8, vocab, generator=generator) < 0.3
    drafts = None
    if width > 1:
        drafts = torch.randint(4, vocab - 3, (m, width - 1), generator=generator)
        for table in (counts, in_prompt):  # they are new to the text
            table[:, drafts.flatten()] = 0
        drafts[::3, width // 2 :] = -1
        drafts[1::3] = drafts[1::3, :1]  # the same one again and again
        drafts = drafts.to(device)
    return rows, Changes(
        counts.to(device),
        in_prompt.to(device),
        bias.to(device),
        biased.to(device),
        Masks(words.to(device), line.to(device)),
        drafts,
    )


def made_of(changes: Changes, m: int, vocab: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Logits of m windows in which drafts are likely tokens, so that their penalty matters."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(m * changes.width, vocab, generator=generator) * 2
    made = made.to(changes.counts.device)
    if changes.drafts is not None:
        at = changes.drafts.clamp(min=0).repeat_interleave(changes.width, 0)
        made.scatter_(1, at, 9.0)
    made[:, 0] = float("-inf")
    return made.to(dtype)


if not INTERPRETED:

    @pytest.mark.parametrize(
        ("dtype", "width"), [(torch.bfloat16, 4), *in_whole((torch.float32, 1))]
    )
    def test_changed_draws_compile_for_hopper_without_one(dtype, width, monkeypatch) -> None:
        for module, name in (
            (draw, "SEARCH_BLOCK"),
            (draw, "DRAW_BLOCK"),
            (changes_triton, "STUCK_BLOCK"),
        ):
            monkeypatch.setattr(module, name, 512 if whole else 128)
        rows, changes = changed_rows(2, 1000, width)
        made = made_of(changes, 2, 1000, 0, dtype)
        with compiling(draw) as found, compiling(changes_triton) as more, compiling(draw_rows):
            draw.draw_triton(made, rows, "filtered", changes=changes)
        assert "mul.hi.u32" in found["_draw_kernel"]
        for ptx in (found["_best_kernel"], more["_stuck_kernel"]):  # no other products of floats
            assert "mul.rn.f32" in ptx
            assert "div.rn.f32" in ptx
            assert "fma.rn" not in ptx

    def test_logprobs_compile_for_hopper_without_one() -> None:
        with compiling(logprobs_triton):
            logprobs_triton.logprobs_triton(
                torch.empty(2, 151936, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64), 20
            )

else:
    pytestmark = [  # numpy's, where a GPU says nothing
        pytest.mark.filterwarnings(f"ignore:{what}") for what in ("All-NaN", "invalid value")
    ]
    F32, BF16 = torch.float32, torch.bfloat16

    @pytest.fixture(autouse=True)
    def small_blocks() -> Iterator[None]:
        """Several blocks a row, although the rows are short."""
        with (
            mock.patch.multiple(draw, DRAW_BLOCK=128, SEARCH_BLOCK=128),
            mock.patch.object(changes_triton, "STUCK_BLOCK", 128),
            mock.patch.multiple(draw_rows, LISTED_ROWS=4, NUM_PROGRAMS=6),
            mock.patch.object(logprobs_triton, "VOCAB_BLOCK", 128),
        ):
            yield

    @pytest.mark.parametrize(
        ("dtype", "width"), [(F32, 1), (BF16, 3), *in_whole((BF16, 1), (F32, 4), (BF16, 4))]
    )
    def test_unfiltered_changed_draws_are_the_twin_s(dtype: torch.dtype, width: int) -> None:
        m = 10 if width == 1 or whole else 6
        rows, changes = changed_rows(m, 250, width)
        made = made_of(changes, m, 250, 1, dtype)
        got = draw.draw_triton(made, rows, "random", changes=changes)
        assert torch.equal(got, draw_ref(made, rows, "random", changes))
        without = draw_ref(made, rows, "random")
        assert int((got != without).sum()) > width * 2
        if changes.drafts is not None:
            blank = replace(changes, drafts=torch.full_like(changes.drafts, -1))
            assert not torch.equal(got, draw_ref(made, rows, "random", blank))
        none = replace(changes, masks=None)
        got = draw.draw_triton(made, rows, "random", changes=none)
        assert torch.equal(got, draw_ref(made, rows, "random", none))

    @pytest.mark.parametrize(
        ("dtype", "width"), [(BF16, 1), (F32, 2), *in_whole((F32, 1), (BF16, 2))]
    )
    def test_filtered_changed_draws_are_the_twin_s(dtype: torch.dtype, width: int) -> None:
        m = 10 if width == 1 or whole else 6
        rows, changes = changed_rows(m, 250, width, **FILTERS)
        made = made_of(changes, m, 250, 2, dtype)
        got = draw.draw_triton(made, rows, "filtered", changes=changes)
        assert torch.equal(got, draw_ref(made, rows, "filtered", changes))

    @pytest.mark.parametrize("dtype", [BF16, *in_whole((F32,))])
    def test_a_try_without_the_filter_changes_no_draw(dtype: torch.dtype) -> None:
        """Some tries give a token that top_p keeps, some do not; ties stand at the border."""
        top_p = [0.5, 0.6, 0.9, 0.95, 0.7, 0.5, 0.55, 0.8] * 2
        rows = rows_of(16, top_p=top_p, min_p=[0.0, 0.01] * 8, temperature=[1.0, 1.0, 1.6, 0.7] * 4)
        generator = torch.Generator().manual_seed(8)
        made = torch.randn(16, 250, generator=generator) * 2
        made[8:] = (made[8:] / 2).round()
        made = made.to(dtype)
        got = draw.draw_triton(made, rows, "filtered")
        assert torch.equal(got, draw_ref(made, rows, "filtered"))
        unfiltered = draw_ref(made, replace(rows, top_p=torch.ones(16)), "filtered")
        assert 2 <= int((got == unfiltered).sum()) <= 14
        with mock.patch.object(draw, "TRY_FROM", 2.0):
            assert torch.equal(draw.draw_triton(made, rows, "filtered"), got)

    def test_greedy_rows_take_what_penalties_leave_at_the_last_bit() -> None:
        """Two tokens that only the order and the roundings of the penalties tell apart."""
        rows, changes = changed_rows(10, 250, temperature=[0.0] * 10)
        generator = torch.Generator().manual_seed(4)
        made = torch.randn(10, 250, generator=generator)
        changed = change(made, rows, changes)
        best = changed.argmax(-1)
        for other in (1, 105, 249):
            # Another token's logit moves to where its changed value is as near as can be.
            nearly = made.clone()
            gap = changed.gather(1, best[:, None])[:, 0] - changed[:, other]
            nearly[:, other] += torch.where(gap.isfinite(), gap, 0.0)
            got = draw.draw_triton(nearly, rows, "random", changes=changes)
            assert torch.equal(got, draw_ref(nearly, rows, "greedy", changes))

    @pytest.mark.parametrize(
        ("dtype", "num_top"),
        [(F32, 0), (BF16, 1), (F32, 20), *in_whole((BF16, 0), (F32, 1), (BF16, 20))],
    )
    def test_logprobs_are_the_twin_s(dtype: torch.dtype, num_top: int) -> None:
        """Many equal ones among them: coarse logits, a block of equal ones, a few finite ones."""
        generator = torch.Generator().manual_seed(6)
        made = (torch.randn(6, 500, generator=generator) * 3).to(torch.bfloat16).to(dtype)
        made[1] = (made[1] * 2).round() / 2
        made[2] = 1.5
        made[3, 20:] = float("-inf")
        made[4, :2] = torch.tensor([-0.0, 0.0])
        token = torch.tensor([0, 499, 7, 3, 1, 250])
        got, ids = logprobs_triton.logprobs_triton(made[:, :481], token % 481, num_top)
        wanted, wanted_ids = logprobs.logprobs_ref(made[:, :481], token % 481, num_top)
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=2e-6)
