"""What a block drafter's rows are made by: twins and kernels against plain loops."""

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, check_columns, compiling
from tests.support.stepped_rows import PAGE_SIZE, columns_of, step_of
from worker.attention import layers_rope_store, layers_rope_store_triton, qk_rope_store
from worker.drafts import kept_rows, kept_rows_triton
from worker.ops.jit import HAS_TRITON
from worker.ops.rope import rope_inv_freq, rope_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_kept_tokens_go_where_plain_loops_say(width: int, seed: int) -> None:
    columns = columns_of(torch.Generator().manual_seed(200 + seed))
    sampled, drawn = step_of(columns, width, seed)
    op = kept_rows_triton.kept_rows_triton if INTERPRETED else kept_rows.kept_rows_ref
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


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_the_kernels_compile_for_hopper_without_one() -> None:
        columns = columns_of(torch.Generator().manual_seed(0))
        with compiling(kept_rows_triton):
            kept_rows_triton.kept_rows_triton(*step_of(columns, 4, 0), columns, PAGE_SIZE)
        kv, table = torch.empty(2, 2048).bfloat16(), torch.empty(64, 128)
        cache, at = torch.empty(2, 8, 64, 128).bfloat16(), torch.zeros(2, dtype=torch.int64)
        with compiling(layers_rope_store_triton) as found:
            layers_rope_store_triton.layers_rope_store_triton(
                kv, at, table, [(cache, cache)], at, kv[:1, :128].contiguous(), 1e-6
            )
        assert "st.global.v2.b32" in found["_layers_rope_store_kernel"]

    @pytest.mark.parametrize("normed", [False, True])
    def test_layers_are_stored_as_each_by_itself(normed: bool) -> None:
        kv = torch.randn(4, 3 * 2 * 2 * 16, generator=torch.Generator().manual_seed(1))
        positions, slots = torch.tensor([3, 20, 0, 0]), torch.tensor([9, 4, 0, 0])
        table = rope_table(rope_inv_freq(16, 1e4, None), 64, CPU)
        weights = torch.rand(3, 16) + 0.5 if normed else None
        memory = torch.zeros(2, 5, 2, 3, 2, 4, 16)
        for layer in range(3):
            norms = None
            if weights is not None:
                norms = qk_rope_store.HeadNorms(weights[layer], weights[layer], 1e-6)
            qk_rope_store.qk_rope_store_ref(
                kv[:, layer * 64 : (layer + 1) * 64], qk_rope_store.Rotation(table, positions),
                memory[0, :, :, layer].unbind(2), slots, norms,
            )  # fmt: skip
        caches = [memory[1, :, :, layer].unbind(2) for layer in range(3)]
        layers_rope_store.layers_rope_store_ref(kv, positions, table, caches, slots, weights, 1e-6)
        assert torch.equal(*memory)
        assert memory.any()

else:

    @pytest.mark.parametrize("shape", [(2, 128, 16), (8, 64, 4), (3, 32, 64)])
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize("num_layers", [1, 3])
    def test_layers_rope_store_matches_its_twin(shape, normed, num_layers) -> None:
        """Of a pool's memory; two padded rows meet on page 0."""
        num_heads, head_dim, page_size = shape
        width = num_layers * 2 * num_heads * head_dim
        generator = torch.Generator().manual_seed(7)
        kv = torch.randn(6, width + 8, generator=generator)[:, :width]
        kv[4:] = kv[3]
        positions = torch.tensor([3, 63, 1, 0, 0, 0])
        slots = torch.tensor([5 * page_size - 1, page_size, 2 * page_size, 0, 0, 0])
        table = rope_table(rope_inv_freq(head_dim, 1e4, None), 64, CPU)
        weights = torch.rand(num_layers, head_dim, generator=generator) + 0.5 if normed else None
        both = []
        for run in (
            layers_rope_store_triton.layers_rope_store_triton,
            layers_rope_store.layers_rope_store_ref,
        ):
            memory = torch.full((5, num_heads, num_layers, 2, page_size, head_dim), 7.0)
            caches = [memory[:, :, layer].unbind(2) for layer in range(num_layers)]
            run(kv, positions, table, caches, slots, weights, 1e-6)
            both.append(memory)
        assert torch.equal(both[0] == 7, both[1] == 7), "the same slots"
        assert torch.allclose(*both, atol=1e-6, rtol=1e-6)
