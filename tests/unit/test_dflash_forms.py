"""Published DFlash drafters: how their directories are read, loaded and computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.chain_checkpoints import write_chain
from tests.support.dflash_checkpoints import ABSENT, FORMS, TAPS, TARGET, write_dflash
from tests.support.dflash_reference import DFlashReference
from tests.support.shallow import shallow
from worker.attention.base import AttentionShape
from worker.attention.build import build_attentions
from worker.cache.layout import KVLayout
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import KeyMask
from worker.config.checkpoint.rope_fields import RopeScaling
from worker.config.checkpoint.shape import ModelShape, read_model_shape
from worker.drafts.build import regions
from worker.drafts.dflash import DFlashDrafter
from worker.drafts.drafter_config import read_chain_shape, read_dflash_shape
from worker.drafts.drafter_shape import DFlashShape
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import SingleCollective

FULL = "full_attention"
BLOCK, CAUSAL = KeyMask(causal=False), KeyMask(causal=True)


def read(path: Path, form: str = "zlab", target: ModelShape = TARGET, **flags: Any) -> DFlashShape:
    write_dflash(path, target, form, **flags)
    return read_dflash_shape(path, target)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("flags", "field", "expected"),
    [
        ({"num_layers": 3}, "masks", (BLOCK,) * 3),
        ({}, "rms_norm_eps", 1e-5),
        ({}, "mask_token_id", 96),
        ({"block_size": 16}, "block_size", 16),
        ({"draft_vocab_size": 40}, "vocab_size", 40),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        (
            {"layer": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
            "rope_scaling",
            RopeScaling("linear", 2.0),
        ),
        ({"own": ("mask_embedding",), "mask_token_id": ABSENT}, "mask_token_id", None),
        # The tensor stands in the id's place.
        ({"own": ("mask_embedding",)}, "mask_token_id", None),
    ],
)
def test_what_varies_is_read(flags, field, expected, form, tmp_path: Path) -> None:
    assert getattr(read(tmp_path, form, **flags), field) == expected


def test_broken_weights_are_named(tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"model\.safetensors: cut short"):
        read_dflash_shape(tmp_path, TARGET)
    with pytest.raises(UserError, match=r"none/config\.json: no such file"):
        read_dflash_shape(tmp_path / "none", TARGET)


ZLAB = {"mask_token_id": 96, "target_layer_ids": list(TAPS)}


@pytest.mark.parametrize(("config", "size"), [({"block_size": ABSENT}, 6), ({}, 4)])
def test_a_block_s_size_may_stand_with_the_projector(config, size, tmp_path: Path) -> None:
    inner = {"dflash_config": {**ZLAB, "block_size": size}}
    assert read(tmp_path, **config, **inner).block_size == size


@pytest.mark.parametrize(
    ("num_layers", "target_layers", "taps"),
    [
        (5, 36, (1, 9, 17, 25, 33)),  # Qwen3-8B
        (1, 36, (18,)),
        (1, 7, (3,)),
        (2, 10, (1, 7)),
        (4, 12, (1, 4, 6, 9)),  # 3.67 and 6.33 are rounded, not cut
    ],
)
def test_taps_are_spread_evenly_unless_said(num_layers, target_layers, taps, tmp_path) -> None:
    target = replace(TARGET, num_layers=target_layers)
    for ids in ({}, {"target_layer_ids": []}):
        config = {"mask_token_id": 1, **ids}
        flags = {"num_layers": num_layers, "dflash_config": config, "target": target}
        assert read(tmp_path, taps=taps, **flags).taps == taps
    assert read(tmp_path, taps=(0, 3), num_layers=num_layers, target=target).taps == (0, 3)


SWA, OTHER = {**ZLAB, "use_swa": True}, {"form": "speculators"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (BLOCK, BLOCK)),
        ({"causal": True}, (CAUSAL, CAUSAL)),
        ({"is_causal": True}, (CAUSAL, CAUSAL)),
        ({"is_causal": True, "causal": True}, (CAUSAL, CAUSAL)),
        ({"is_causal": False, "sliding": (0, 1)}, (KeyMask(causal=False, window=3),) * 2),
        ({"sliding": (1,)}, (BLOCK, KeyMask(window=3))),
        ({"sliding": (0, 1), "window": 5}, (KeyMask(window=5),) * 2),
        ({"sliding": (1,), "causal": False}, (BLOCK, KeyMask(causal=False, window=3))),
        ({"sliding": (1,), "causal": True}, (CAUSAL, KeyMask(window=3))),
        ({"sliding": (1,), "use_sliding_window": ABSENT}, (BLOCK, KeyMask(window=3))),
        ({"layer_types": [FULL, FULL], "sliding_window": 7}, (BLOCK, BLOCK)),
        ({"sliding_window": 7, "use_sliding_window": False}, (BLOCK, BLOCK)),
        # use_swa gives windows, not causality.
        ({"dflash_config": {**SWA, "swa_window_size": 7}}, (KeyMask(causal=False, window=7),) * 2),
        ({"dflash_config": SWA, "sliding_window": 9}, (KeyMask(causal=False, window=9),) * 2),
        ({"dflash_config": {**SWA, "causal": True}, "sliding_window": 9}, (KeyMask(window=9),) * 2),
        ({"dflash_config": SWA, "sliding": (0, 1)}, (KeyMask(window=3),) * 2),
        ({"dflash_config": {**ZLAB, "use_swa": False, "swa_window_size": 7}}, (BLOCK, BLOCK)),
        ({**OTHER, "sliding_window_non_causal": ABSENT}, (BLOCK, BLOCK)),
        ({**OTHER, "causal": True}, (BLOCK, BLOCK)),  # of sliding layers only
        ({**OTHER, "sliding": (1,)}, (BLOCK, KeyMask(window=3))),
        ({**OTHER, "sliding": (1,), "causal": False}, (BLOCK, KeyMask(causal=False, window=3))),
    ],
)
def test_masks_by_layer(flags, expected, tmp_path: Path) -> None:
    assert read(tmp_path, **flags).masks == expected


PUBLISHED = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": [FULL, FULL],
    "max_window_layers": 2,
    "rope_scaling": None,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_matter_changes_nothing(form: str, tmp_path: Path) -> None:
    expected = read(tmp_path, form)
    more: dict[str, Any] = {"sample_from_anchor": False, "attention_sink_bias": False}
    if form == "zlab":
        dflash = {**ZLAB, "attention_sink_bias": False, "num_target_layers": 10, "causal": None}
        more |= {"dflash_config": dflash, "target_hidden_size": 32, "is_causal": None}
    else:
        more |= {"num_hidden_layers": 2, "speculators_version": "0.5.0", "shift_label": False}
    assert read(tmp_path, form, layer=PUBLISHED, **more) == expected
    rope = {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}
    assert read(tmp_path, form, layer=rope) == expected
    if form == "speculators":
        assert read(tmp_path, form, layer={"model_type": "llama"}) == expected


def test_a_tied_head_is_the_target_s_or_refused(tmp_path: Path) -> None:
    tied = replace(TARGET, tie_word_embeddings=True)
    assert "head" not in read(tmp_path, target=tied, tie_word_embeddings=True).names
    for own in ("embed_tokens", "lm_head"):
        with pytest.raises(Unsupported, match="tie_word_embeddings: a head that is"):
            read(tmp_path, target=tied, tie_word_embeddings=True, own=(own,))
    reduced = {"tie_word_embeddings": True, "draft_vocab_size": 40}
    assert "head" in read(tmp_path, **reduced).names
    assert "head" in read(tmp_path, "speculators", tie_word_embeddings=True, own=("lm_head",)).names


def test_a_pickled_mask_embedding_is_refused_unless_it_is_in_safetensors_too(tmp_path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"mask_embedding\.pt: .*into the safetensors files"):
        read(tmp_path)
    assert read(tmp_path, own=("mask_embedding",)).mask_token_id is None


def test_each_reader_names_the_other(tmp_path: Path) -> None:
    for form in FORMS:
        read(tmp_path, form)
        with pytest.raises(Unsupported, match=r"by blocks: set spec\.drafter to dflash"):
            read_chain_shape(tmp_path, TARGET)
    for form in ("specforge", "speculators", "eagle", "mimo"):
        write_chain(tmp_path / form, form, TARGET)
        with pytest.raises(Unsupported, match=r"set spec\.drafter to chain"):
            read_dflash_shape(tmp_path / form, TARGET)


SERVED = shallow(4)
CPU = torch.device("cpu")
PLACEMENT = Placement(SingleCollective(), torch.float32, CPU)
OF_SERVED = {"taps": (0, 1, 2), "layer": {"head_dim": 32}}
CASES: dict[str, dict[str, Any]] = {
    "zlab": {},
    "prefix": {"prefix": "model."},
    "aliases": {"aliases": True},
    "aliases and prefix": {"aliases": True, "prefix": "model."},
    "mask of its own": {"own": ("mask_embedding",), "mask_token_id": ABSENT},
    "one layer": {"num_layers": 1, "taps": (2,)},
    "biases": {"bias": True},
    "windows": {"sliding": (1,), "window": 5},
    "windows that see ahead": {"sliding": (0, 1), "window": 5, "causal": False},
    "causal": {"causal": True},
    "draft vocabulary": {"draft_vocab_size": 300, "own": ("t2d",)},
    "head of its own": {"own": ("lm_head",)},
    "rope": {"layer": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "speculators": {"form": "speculators", "own": ("embed_tokens", "lm_head")},
    "speculators, draft vocabulary": {
        "form": "speculators", "draft_vocab_size": 300, "own": ("embed_tokens", "t2d"),
        "prefix": "model.",
    },
    "speculators, windows": {
        "form": "speculators", "sliding": (0,), "own": ("embed_tokens", "lm_head"),
    },
}  # fmt: skip
NUM_TEXT, NUM_ROWS = 21, 4


def load(directory: Path, options: dict[str, Any]) -> tuple[DFlashDrafter, dict[str, Tensor]]:
    target = read_model_shape(SERVED)
    layer = OF_SERVED["layer"] | options.get("layer", {})
    written = write_dflash(directory, target, **OF_SERVED | options | {"layer": layer})
    model = load_model(SERVED, target, PLACEMENT)
    drafter = DFlashDrafter(read_dflash_shape(directory, target), model, 64)
    drafter.fill(directory)
    return drafter, written


def batch_of(first: int, num: int, query_start: Tensor) -> Batch:
    """Tokens at positions first .. first + num - 1 of the only request, in pages 1, 2, ..."""
    at = torch.arange(first, first + num)
    return Batch(
        input_ids=torch.full((num,), 0), positions=at, slot_mapping=at + 16,
        query_start=query_start, seq_lens=torch.tensor([first + num], dtype=torch.int32),
        page_table=torch.tensor([[1, 2, 3]], dtype=torch.int32), num_reqs=1, num_tokens=num,
        max_query_len=num, max_seq_len_ub=first + num,
    )  # fmt: skip


@pytest.mark.parametrize("form", CASES)
@torch.no_grad()
def test_a_block_of_every_published_form_is_what_plain_torch_says(form, tmp_path: Path) -> None:
    drafter, written = load(tmp_path, CASES[form])
    spec, reference = drafter.shape, DFlashReference(SERVED, tmp_path)
    held = {key.tensor: shard.dest for key, shard in drafter.shards().items()}
    assert held.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(held[name], tensor), name
    pool = KVPool(KVLayout(regions(spec, 16, "float32")), 4, CPU)
    tokens = torch.randint(2, 1000, (NUM_TEXT,), generator=torch.Generator().manual_seed(4))
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5
    names = dict.fromkeys(("prefill", "decode", "spec"), "reference")
    of_mask = {
        mask: build_attentions(names, pool, AttentionShape(*heads, mask, "draft")).spec
        for mask, _ in drafter.runs
    }
    text, num = batch_of(0, NUM_TEXT - 1, torch.zeros(1, dtype=torch.int32)), NUM_TEXT - 1
    with forward_context(text, next(iter(of_mask.values())), None):
        drafter.store(reference.features(tokens.tolist())[:num], text.positions)
    for layer, both in enumerate(reference.draft_rows(tokens[:num].tolist())):
        for cache, wanted in zip(pool.layer(layer, "draft"), both, strict=True):
            found = cache[1:3].transpose(1, 2).flatten(0, 1)[:num]
            assert torch.allclose(found, wanted, atol=2e-5, rtol=2e-5)
    block = batch_of(num, NUM_ROWS, torch.tensor([0, NUM_ROWS], dtype=torch.int32))
    ids = torch.full((NUM_ROWS,), spec.mask_token_id or 0)
    ids[0] = tokens[-1]
    found = drafter.logits(replace(block, input_ids=ids), NUM_ROWS, NUM_ROWS - 1, of_mask)
    wanted = reference.block(tokens.tolist(), num, NUM_ROWS)[1:] @ reference.head.T
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    assert (found - wanted.roll(1, 0)).abs().max() > 0.1, "rows are not told apart"
    pool.close()
