"""Kinds of layers: what each keeps, how ranks share it, and that another kind is another row."""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from worker.attention.base import AttentionShape
from worker.attention.build import build_attentions
from worker.cache.layout import KVRegion, ModelLayout, StateRegion
from worker.cache.pool import KVPool
from worker.config import ModelConfig, WorkerConfig
from worker.config.backends import BACKENDS
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.shape import Layer, ModelShape, read_model_shape
from worker.errors import Unsupported, UserError
from worker.model.kinds import KINDS, Cut, LayerKind, kinds_of, regions_of
from worker.start.build import _check_layers, model_layout
from worker.start.check import kv_token_bytes

CUT = Cut(16, 1, "bfloat16", "float8_e4m3fn")
LATENT = LayerKind(
    mixer="self_attn",
    people="latent attention",
    module="nowhere:Nothing",
    region=lambda shape, n, cut: KVRegion(
        "target", n, 1, 576, cut.num_groups, cut.page_size, cut.dtype, parts=1
    ),
    share=KINDS["heads"].share,
    width=lambda shape: shape.num_heads * 128,
)


def shape_of(path: str) -> ModelShape:
    return read_model_shape(ModelConfig(path=path).directory)


def test_layers_are_numbered_within_their_kind() -> None:
    hybrid, sparse = shape_of("tiny-hybrid"), shape_of("tiny-moe")
    kinds = [layer.kind for layer in hybrid.layers]
    assert {*kinds} == {"heads", "delta"}
    for kind in {*kinds}:
        numbers = [layer.number for layer in hybrid.layers if layer.kind == kind]
        assert numbers == list(range(kinds.count(kind)))
    assert hybrid.num_kv_layers == kinds.count("heads")
    assert [layer.is_sparse for layer in sparse.layers] == list(sparse.is_sparse)
    assert shape_of("tiny").layers[1] == Layer("heads", 1, False)


def test_pages_are_of_layers_with_keys_and_slots_of_those_with_a_state() -> None:
    shape = shape_of("tiny-hybrid")
    assert shape.delta is not None
    pages, slots = regions_of(shape, CUT)
    sizes = shape.num_kv_layers, shape.num_kv_heads, shape.head_dim
    assert pages == KVRegion("target", *sizes, 1, 16, "float8_e4m3fn")
    assert slots == StateRegion(sum(shape.is_delta), *shape.delta, "bfloat16")
    assert regions_of(shape_of("tiny"), CUT)[1] is None
    directory = ModelConfig(path="tiny-hybrid").directory
    assert kv_token_bytes(directory, 16, "float8_e4m3fn") == [pages.page_bytes // 16]
    with pytest.raises(Unsupported, match=r"linear_num_key_heads \d+ cannot be divided"):
        KINDS["delta"].share(shape, 0, 3)


@pytest.fixture
def latent() -> Iterator[ModelShape]:
    """tiny, as if its layers were of a kind that is not there."""
    shape = shape_of("tiny")
    family = FAMILIES[shape.architecture]
    layers = replace(family.layers, attention="latent")  # type: ignore[arg-type]
    with (
        mock.patch.dict(KINDS, {"latent": LATENT}),
        mock.patch.dict(FAMILIES, {shape.architecture: replace(family, layers=layers)}),
        mock.patch.dict(BACKENDS, {"latent": BACKENDS["heads"]}),
    ):
        yield shape


def test_another_kind_is_a_row(latent: ModelShape) -> None:
    config = WorkerConfig.model_validate(
        {"role": "decode", "model": {"dtype": "bfloat16"}, "kv": {"page_size": 16, "num_groups": 2}}
    )
    assert kinds_of(latent) == {"latent": LATENT}
    layout = model_layout(config, latent, None)
    assert layout.target == KVRegion(
        "target", latent.num_layers, 1, 576, 2, 16, "bfloat16", parts=1
    )
    assert layout.share(2, 1).regions == layout.regions  # each rank has a copy of one head
    pool = KVPool(ModelLayout(layout.regions).share(1, 0), 2, torch.device("cpu"))
    shape = AttentionShape(4, 1, 576, 1.0, kind="latent")
    with pytest.raises(Unsupported, match="1 parts a token; attention needs 2"):
        build_attentions({"prefill": "reference", "decode": "reference"}, pool, shape)


def test_settings_that_a_kind_refuses_are_named() -> None:
    hybrid, compiled = shape_of("tiny-hybrid"), {"graph": {"prefill": "compiled"}}
    for engine, text in (
        ({"max_prefill_tokens": 63}, "must be at least 64 for gated delta nets"),
        ({"max_prefill_tokens": 64, **compiled}, "compiled cannot trace gated delta nets"),
    ):
        config = WorkerConfig.model_validate({"role": "prefill", "engine": engine})
        with pytest.raises(Exception, match=text):
            _check_layers(config, hybrid)
        _check_layers(config, shape_of("tiny"))
    kv, engine = {"page_size": 1}, {"max_prefill_tokens": 64}
    config = WorkerConfig.model_validate({"role": "prefill", "engine": engine, "kv": kv})
    with pytest.raises(UserError, match=r"kv\.page_size must be at least 2"):
        _check_layers(config, hybrid)
    _check_layers(config, shape_of("tiny"))
