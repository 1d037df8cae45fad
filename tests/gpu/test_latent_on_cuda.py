"""Latent attention on one GPU: the kernels against their definitions, and as graphs hold them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.test_latent_attention import (
    EIGHT,
    HALF_A_STEP,
    LAYER,
    STORES,
    Scene,
    Store,
    make,
    worth,
)
from worker.attention.latent import latent_rope_store, latent_rope_store_ref
from worker.cache.pool import KVPool
from worker.forward.batch import Batch
from worker.forward.context import forward_context

pytestmark = pytest.mark.gpu(1)

CUDA = torch.device("cuda")
# (heads, (latent, rope)): V2-Lite, GLM-4.7-Flash, V3, and tiles of which a part is used.
MODELS = [(16, (512, 64)), (20, (512, 64)), (128, (512, 64)), (4, (128, 16))]
RAGGED = [(0, 1), (63, 1), (64, 1), (700, 1), (129, 1), (1300, 1)]
FEW = [[(8191, 1)], [(9000, 1), (0, 1), (290, 1), (30000, 1)]]
WIDTHS = [(0, 16), (37, 1), (500, 7), (0, 1), (64, 3), (1000, 16)]
CHUNKS = [(0, 130), (512, 100), (100, 1), (17, 30)]
BOUNDS = {"bfloat16": 0.01, "float16": 0.0015, "float32": 2e-5}  # of |error| / (1 + |value|)


def scene_of(shapes: list[tuple[int, int]], model: Any = MODELS[0], **options: Any) -> Scene:
    options = {"page_size": 64, "dtype": "bfloat16", "queries": "bfloat16"} | options
    return make(shapes, *model, **options, device=CUDA)


def exact(scene: Scene) -> Tensor:
    """The definition's result from a float32 copy of what the pool is worth."""
    layout = scene.pool.layout
    region = replace(scene.pool.region(), dtype="float32")
    pool = KVPool(type(layout)((region,)), scene.pool.num_pages, CUDA)
    pool.layer(LAYER)[0].copy_(worth(scene.pool.layer(LAYER)[0]))
    shape = replace(scene.shape, dtype="float32")
    whole = replace(scene, pool=pool, q=scene.q.float(), shape=shape)
    return whole.attend("reference")


def check(scene: Scene) -> None:
    out, wanted = scene.attend("triton"), exact(scene)
    error = ((out.float() - wanted).abs() / (1 + wanted.abs())).max().item()
    assert error < BOUNDS[scene.shape.dtype], error
    assert not out[int(scene.batch.query_start[-1]) :].any()


@pytest.mark.parametrize(
    ("model", "page_size"), [*((model, 64) for model in MODELS), (MODELS[0], 16)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", EIGHT])
def test_decode_windows_and_chunks_match_the_definition(model, page_size, dtype) -> None:
    for shapes in (RAGGED, WIDTHS, CHUNKS):
        check(scene_of(shapes, model, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("model", MODELS[:3], ids=str)
@pytest.mark.parametrize("shapes", [RAGGED, WIDTHS, RAGGED[4:5], FEW[1]])
def test_eight_bits_have_the_bits_of_what_they_are_worth(shapes, model) -> None:
    """Powers of two change no other bit, and rows are widened before products see them."""
    eight = scene_of(shapes, model, dtype=EIGHT)
    plain = scene_of(shapes, model)
    plain.pool.layer(LAYER)[0].copy_(worth(eight.pool.layer(LAYER)[0]))
    plain.q.copy_(eight.q)
    assert torch.equal(eight.attend("triton"), plain.attend("triton"))


@pytest.mark.parametrize(("dtype", "page_size"), [("float16", 1), ("float32", 16)])
def test_other_dtypes_match_the_definition(dtype, page_size) -> None:
    for shapes in (RAGGED, WIDTHS):
        check(scene_of(shapes, (4, (128, 16)), dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("dtype", ["bfloat16", EIGHT])
def test_rows_of_many_lengths_and_a_very_long_one(dtype) -> None:
    shapes = [(17 * i % 640, 1) for i in range(250)] + [(20000, 1)]
    check(scene_of(shapes, padded=(5, 5), dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", EIGHT])
@pytest.mark.parametrize("shapes", FEW, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_few_requests_in_as_many_parts_as_there_can_be(shapes, page_size, dtype) -> None:
    check(scene_of(shapes, padded=(0, 0), dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("dtype", ["bfloat16", EIGHT])
@pytest.mark.parametrize("shapes", [RAGGED, WIDTHS, FEW[1]])
def test_the_same_bits_every_time(shapes, dtype) -> None:
    scene = scene_of(shapes, dtype=dtype)
    made = scene.made("triton")
    first = scene.attend(made)
    assert all(torch.equal(scene.attend(made), first) for _ in range(20))


@pytest.mark.parametrize("dtype", ["bfloat16", EIGHT])
@pytest.mark.parametrize("model", MODELS[:3], ids=str)
@pytest.mark.parametrize("shapes", [RAGGED, WIDTHS, FEW[1]])
def test_a_row_s_bits_do_not_depend_on_the_other_rows(shapes, model, dtype) -> None:
    """Each request alone, the others cut down to nothing, under a much higher length bound."""
    scene = scene_of(shapes, model, dtype=dtype)
    made, batch = scene.made("triton"), scene.batch
    together = scene.attend(made)
    for number in range(len(shapes)):
        lengths = torch.zeros_like(batch.seq_lens)
        lengths[number] = batch.seq_lens[number]
        out = scene.attend(made, replace(batch, seq_lens=lengths, max_seq_len_ub=30000))
        mine = slice(*batch.query_start[number : number + 2].tolist())
        assert torch.equal(out[mine], together[mine])
        out[mine] = 0
        assert not out.any(), "requests without rows"


@pytest.mark.parametrize("model", MODELS[:2], ids=str)
@pytest.mark.parametrize("num_reqs", [1, 3, 40, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", EIGHT])
def test_a_graph_serves_lengths_that_it_was_not_captured_with(num_reqs, model, dtype) -> None:
    """Captured at short lengths under a high bound; replayed with others, and with rows gone."""
    shapes = [(1 + 37 * i % 900 + 5000 * (i == 1), 1) for i in range(num_reqs)]
    scene = scene_of(shapes, model, padded=(0, 0), dtype=dtype)
    made, live = scene.made("triton"), scene.batch
    buffer = replace(live, seq_lens=torch.ones_like(live.seq_lens), max_seq_len_ub=40960)

    def attend(batch: Batch) -> Tensor:
        with forward_context(batch, made, made.plan(batch)):
            return made.forward(scene.q, LAYER)

    attend(buffer)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(buffer)
    for keep in (num_reqs, num_reqs // 2, num_reqs):
        lengths = live.seq_lens.clone()
        lengths[keep:] = 0
        buffer.seq_lens.copy_(lengths)
        graph.replay()
        assert torch.equal(out, attend(replace(live, seq_lens=lengths)))
        assert not out[keep:].any()


@pytest.mark.parametrize(
    "of",
    [
        *(Store(*each) for each in STORES),
        *(Store(16, (512, 64), 64, torch.bfloat16, is_eight) for is_eight in (False, True)),
    ],
    ids=str,
)
def test_what_stores_rows_matches_its_definition(of: Store) -> None:
    got, wanted = of.run(latent_rope_store, device=CUDA), of.run(latent_rope_store_ref)
    for which, (one, other) in enumerate(zip(got, wanted, strict=True)):
        one, other = one.cpu().float(), other.float()
        bound = 1e-5 if of.dtype == torch.float32 else 2**-6  # two roundings
        if which and of.is_eight:  # a number may fall to the other side
            assert (one != other).float().mean() < 0.02
            bound = 2 * HALF_A_STEP * float(other.abs().max())
        error = (one - other).abs() / (1 + other.abs())
        assert error.max() < bound
