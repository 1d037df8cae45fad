"""DFlash drafters of every published form load whole, and a block is what plain torch says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.chain_checkpoints import change_config
from tests.support.dflash_checkpoints import ABSENT, write_dflash
from tests.support.dflash_reference import DFlashReference
from tests.support.shallow import shallow
from worker.attention.base import AttentionShape, build_attentions
from worker.cache.layout import KVLayout
from worker.cache.pool import KVPool
from worker.drafts.build import regions
from worker.drafts.dflash_config import read_dflash_shape
from worker.drafts.dflash_model import DFlashDrafter
from worker.errors import UserError
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.model.loader import load_model
from worker.model.shape import read_model_shape
from worker.peers.base import SingleCollective

TARGET = shallow(4)
CPU = torch.device("cpu")
KIND: Any = {"device": CPU, "dtype": torch.float32}
TAPS = {"taps": (0, 1, 2), "head_dim": 32}
FORMS: dict[str, dict[str, Any]] = {
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
NUM_TEXT, BLOCK = 21, 4


def load(directory: Path, options: dict[str, Any]) -> tuple[DFlashDrafter, dict[str, Tensor]]:
    target = read_model_shape(TARGET)
    written = write_dflash(directory, target, **TAPS | options)
    model = load_model(TARGET, target, SingleCollective(), **KIND)
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


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_block_of_every_published_form_is_what_plain_torch_says(form, tmp_path: Path) -> None:
    drafter, written = load(tmp_path, FORMS[form])
    spec, reference = drafter.spec, DFlashReference(TARGET, tmp_path)
    held = {name: shard.dest for name, shard in drafter.shards().items()}
    assert held.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(held[name], tensor), name
    pool = KVPool(KVLayout(regions(spec, 16, "float32")), 4, CPU)
    tokens = torch.randint(2, 1000, (NUM_TEXT,), generator=torch.Generator().manual_seed(4))
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5
    names = dict.fromkeys(("prefill", "decode", "spec"), "reference")
    of_mask = {
        mask: build_attentions(names, pool, AttentionShape(*heads, mask, "draft")).spec
        for mask, _ in drafter.runs()
    }
    text, num = batch_of(0, NUM_TEXT - 1, torch.zeros(1, dtype=torch.int32)), NUM_TEXT - 1
    with forward_context(text, next(iter(of_mask.values())), None):
        drafter.store(reference.features(tokens.tolist())[:num], text.positions)
    for layer, both in enumerate(reference.draft_rows(tokens[:num].tolist())):
        for cache, wanted in zip(pool.layer(layer, "draft"), both, strict=True):
            found = cache[1:3].transpose(1, 2).flatten(0, 1)[:num]
            assert torch.allclose(found, wanted, atol=2e-5, rtol=2e-5)
    block = batch_of(num, BLOCK, torch.tensor([0, BLOCK], dtype=torch.int32))
    ids = torch.full((BLOCK,), spec.mask_token_id or 0)
    ids[0] = tokens[-1]
    part, residual = drafter.embed(ids, BLOCK), None
    for mask, numbers in drafter.runs():
        with forward_context(block, of_mask[mask], of_mask[mask].plan(block)):
            part, residual = drafter.run(part, residual, block.positions, numbers)
    found = drafter.logits(part, residual, BLOCK, BLOCK - 1)
    wanted = reference.block(tokens.tolist(), num, BLOCK)[1:] @ reference.head.T
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    assert (found - wanted.roll(1, 0)).abs().max() > 0.1, "rows are not told apart"
    pool.close()


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    target = read_model_shape(TARGET)
    write_dflash(tmp_path, target, num_layers=3, **TAPS)
    change_config(tmp_path, {"num_hidden_layers": 2})
    model = load_model(TARGET, target, SingleCollective(), **KIND)
    drafter = DFlashDrafter(read_dflash_shape(tmp_path, target), model, 64)
    with pytest.raises(UserError, match=r"unexpected tensors: layers\.2\."):
        drafter.fill(tmp_path)
