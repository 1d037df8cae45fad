"""Where drafters' rows go, and how they draw: twins and kernels against plain loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, check_columns, compiling
from tests.support.pairwise import whole
from tests.support.stepped_rows import PAGE_SIZE, columns_of, step_of
from worker.attention import qk_rope_store, qk_rope_store_triton
from worker.attention.qk_rope_store import HeadNorms
from worker.drafts import draft_steps, draft_steps_triton
from worker.drafts.draft_steps import DraftDraws
from worker.ops.jit import HAS_TRITON
from worker.ops.philox import gumbel_ref
from worker.ops.rope import rope_inv_freq, rope_table
from worker.step.rows import RowColumns, SampledRows

CPU = torch.device("cpu")
DRAW = draft_steps_triton.draw_drafts_triton if INTERPRETED else draft_steps.draw_drafts_ref
STORE = qk_rope_store.layers_rope_store_ref
if INTERPRETED:
    STORE = qk_rope_store_triton.layers_rope_store_triton


def expected(columns: RowColumns, sampled: SampledRows, drawn: Tensor) -> dict[str, list[Any]]:
    rows, position, valid, width = sampled.rows, sampled.position, sampled.valid, sampled.width
    found: dict[str, list[Any]] = {name: [] for name in draft_steps.DraftSteps._fields}
    ahead: list[list[tuple[int, int, int]]] = []
    for i, row in enumerate(rows.tolist()):
        pages, longest = columns.page_table[row].tolist(), int(columns.max_len[row])
        num = int(drawn[i, width])
        for j in range(width):
            at = int(position[i * width + j])
            counts = bool(valid[i]) and j < num and at > 0
            own = counts and at < longest
            page = pages[at // PAGE_SIZE] if own else 0
            found["tokens"].append(int(drawn[i, j]))
            found["positions"].append(at if own else 0)
            found["slots"].append(page * PAGE_SIZE + at % PAGE_SIZE if own else 0)
            is_end = counts and (j == num - 1 or (at - 1) % PAGE_SIZE == PAGE_SIZE - 1)
            found["tail_pages"].append(pages[(at - 1) // PAGE_SIZE] if is_end else 0)
        found["last"].append(i * width + max(num - 1, 0))
        line = []
        for k in range(width - 1):
            at = int(columns.seq_len[row]) + k
            if columns.active[row] and at + 1 < longest:
                line.append((at, pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE, at + 1))
            else:
                line.append((0, 0, 1))
        ahead.append(line)
    for at, name in enumerate(("draft_positions", "draft_slots", "draft_lens")):
        found[name] = [[line[k][at] for line in ahead] for k in range(width - 1)]
    return found


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6 if whole else 2))
def test_rows_go_where_plain_loops_say(width: int, seed: int) -> None:
    columns = columns_of(torch.Generator().manual_seed(100 + seed))
    step = step_of(columns, width, seed)
    wanted = expected(columns, *step)
    op = draft_steps_triton.draft_rows_triton if INTERPRETED else draft_steps.draft_rows_ref
    found = op(*step, columns, PAGE_SIZE)
    for name, value in found._asdict().items():
        assert value.tolist() == wanted[name], name
        check_columns(value.unbind() if value.dim() > 1 else (value,))
    assert sum(wanted["slots"]) > 0
    assert sum(wanted["tail_pages"]) > 0


def draws_case(num_ids: int, mapped: bool, num: int = 1) -> tuple[Tensor, DraftDraws]:
    """Arguments of draw_drafts for `num` drafts of five rows: greedy and not, two without one."""
    generator = torch.Generator().manual_seed(num_ids)
    logits = 3 * torch.randn(5 * num, num_ids, generator=generator)
    rows, position = torch.tensor([4, 1, 2, 0, 3]), torch.tensor([9, 80, 0, 0, 33])
    position = position.repeat_interleave(num) + torch.arange(num).repeat(5)
    slots = torch.tensor([5, 17, 1, 0, 0]).repeat_interleave(num)
    slots[2 * num - 1] *= num == 1  # of several the last is missing
    seed = torch.tensor([0, 7, 1 << 40, -3, 12])
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.25])
    ids = None
    if mapped:
        ids = torch.randperm(3 * num_ids, generator=generator)[:num_ids].sort().values
    return logits, DraftDraws(rows, position, slots, seed, temperature, ids)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("num", "num_ids"), [(1, 1), (1, 97), (1, 2500), (3, 97)])
def test_drafts_are_drawn_with_the_targets_noise_each_at_its_own_position(
    num, num_ids, mapped
) -> None:
    logits, draws = draws_case(num_ids, mapped, num)
    rows, position, slots, seed, temperature, ids, _ = draws
    assert seed is not None
    drafts = torch.full((6, num + 2), 5)
    found = DRAW(logits, draws, drafts[:, 1 : 1 + num])
    own = list(range(num_ids)) if ids is None else ids.tolist()
    for line, row in enumerate(rows.repeat_interleave(num).tolist()):
        noise = gumbel_ref(seed[row : row + 1], position[line : line + 1] + 1, own[-1] + 1)
        scale = float(temperature[row])
        values = logits[line] / scale + noise[0, own] if scale else logits[line]
        wanted = own[int(values.argmax())] if slots[line] else 0
        assert int(found[line]) == wanted
        assert int(drafts[row, 1 + line % num]) == (wanted if slots[line] else -1)
    assert (drafts[:, [0, -1]] == 5).all()
    assert (drafts[5] == 5).all()


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6 if whole else 2))
def test_kept_tokens_go_where_plain_loops_say(width: int, seed: int) -> None:
    columns = columns_of(torch.Generator().manual_seed(200 + seed))
    sampled, drawn = step_of(columns, width, seed)
    op = draft_steps_triton.kept_rows_triton if INTERPRETED else draft_steps.kept_rows_ref
    positions, slots = op(sampled, drawn, columns, PAGE_SIZE)
    check_columns((positions, slots))
    wanted = []
    for i, row in enumerate(sampled.rows.tolist()):
        for j in range(width):
            at = int(sampled.position[i * width + j]) - 1
            kept = bool(sampled.valid[i]) and j < int(drawn[i, width])
            page = int(columns.page_table[row, at // PAGE_SIZE]) if kept else 0
            slot = page * PAGE_SIZE + at % PAGE_SIZE if kept else 0
            wanted.append((at if kept else 0, slot))
    assert list(zip(positions.tolist(), slots.tolist(), strict=True)) == wanted
    assert sum(slot for _, slot in wanted) > 0


@pytest.mark.parametrize("shape", [(2, 128, 16), (8, 64, 4), (3, 32, 64)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_are_stored_as_each_by_itself(shape, normed, num_layers) -> None:
    """Of a pool's memory; two padded rows meet on page 0."""
    num_heads, head_dim, page_size = shape
    size = 2 * num_heads * head_dim
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(6, num_layers * size + 8, generator=generator)[:, : num_layers * size]
    kv[4:] = kv[3]
    slots = torch.tensor([5 * page_size - 1, page_size, 2 * page_size, 0, 0, 0])
    table = rope_table(rope_inv_freq(head_dim, 1e4, None), 64, CPU)
    rotation = qk_rope_store.Rotation(table, torch.tensor([3, 63, 1, 0, 0, 0]))
    weights = torch.rand(num_layers, head_dim, generator=generator) + 0.5 if normed else None
    memory = torch.full((2, 5, num_heads, num_layers, 2, page_size, head_dim), 7.0)
    mine, wanted = ([each[:, :, i].unbind(2) for i in range(num_layers)] for each in memory)
    STORE(kv, rotation, mine, slots, weights, 1e-6)
    for i, cache in enumerate(wanted):
        norms = None if weights is None else HeadNorms(weights[i], weights[i], 1e-6)
        part = kv[:, i * size : (i + 1) * size]
        qk_rope_store.qk_rope_store_ref(part, rotation, cache, slots, norms)
    assert torch.equal(*(memory == 7)), "the same slots"
    bound = 1e-6 if INTERPRETED else 0
    torch.testing.assert_close(*memory, atol=bound, rtol=bound)


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_the_kernels_compile_for_hopper_without_one() -> None:
        columns = columns_of(torch.Generator().manual_seed(0))
        with compiling(draft_steps_triton, "_draft_rows_kernel", "_kept_rows_kernel"):
            draft_steps_triton.draft_rows_triton(*step_of(columns, 4, 0), columns, PAGE_SIZE)
            draft_steps_triton.kept_rows_triton(*step_of(columns, 4, 0), columns, PAGE_SIZE)
        for mapped in (False, True):
            logits, draws = draws_case(97, mapped, 3)
            with compiling(draft_steps_triton, "_best_draft_kernel", "_keep_draft_kernel"):
                draft_steps_triton.draw_drafts_triton(
                    logits.bfloat16(), draws, torch.full((6, 3), 5)
                )
        kv, table = torch.empty(2, 2048).bfloat16(), torch.empty(64, 128)
        cache, at = torch.empty(2, 8, 64, 128).bfloat16(), torch.zeros(2, dtype=torch.int64)
        rotation = qk_rope_store.Rotation(table, at)
        with compiling(qk_rope_store_triton) as found:
            qk_rope_store_triton.layers_rope_store_triton(
                kv, rotation, [(cache, cache)], at, kv[:1, :128].contiguous(), 1e-6
            )
        assert "st.global.v2.b32" in found["_qk_rope_store_kernel"]
