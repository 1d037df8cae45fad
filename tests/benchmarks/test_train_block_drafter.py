"""Tests of the block drafter's training: its blocks, its files and the bundled weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.train import acceptance, base
from benchmarks.train.answers import Said, Speaker, set_right
from benchmarks.train.base import Lesson, load_drafter, save_drafter, train_drafter
from benchmarks.train.block_drafter import BLOCK_SIZE, TAPS, BlockDrafter
from tests.support.dflash_reference import DFlashReference

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

TARGET = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
BUNDLED = TARGET.with_name("tiny-dflash")
LESSON = Lesson(steps=6, batch=2, round=6, passes=2)
LAYER = {
    "input_layernorm": (192,),
    "mlp.down_proj": (192, 512),
    "mlp.gate_proj": (512, 192),
    "mlp.up_proj": (512, 192),
    "post_attention_layernorm": (192,),
    "self_attn.k_norm": (64,),
    "self_attn.k_proj": (128, 192),
    "self_attn.o_proj": (192, 256),
    "self_attn.q_norm": (64,),
    "self_attn.q_proj": (256, 192),
    "self_attn.v_proj": (128, 192),
}
SHAPES = {"fc.weight": (192, 576), "hidden_norm.weight": (192,), "norm.weight": (192,)} | {
    f"layers.{layer}.{name}.weight": shape for layer in (0, 1) for name, shape in LAYER.items()
}


@pytest.fixture(scope="module")
def said(target: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[Said]:
    return Speaker(target, TAPS).said(tokenizer, random.Random(3), 4)


def check_published(folder: Path) -> None:
    """Tensors and flags of the form that its authors write."""
    weights = load_file(str(folder / "model.safetensors"))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SHAPES
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config == BlockDrafter.config
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["block_size"], config["num_target_layers"]) == (8, 6)
    assert config["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [1, 3, 4]}


def test_a_few_steps_lower_the_loss_and_leave_a_published_checkpoint(
    target: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "STARTING_CHATS", 4)
    speaker = Speaker(target, TAPS)
    drafter, losses = train_drafter(BlockDrafter, speaker, tokenizer, LESSON, 0, "cpu")
    assert sum(losses[-2:]) < 0.85 * sum(losses[:2]), losses
    save_drafter(drafter, tmp_path)
    check_published(tmp_path)
    again = load_drafter(BlockDrafter, tmp_path, target.model.embed_tokens.weight)
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, drafter.state_dict()[name].bfloat16().float())


def test_the_bundled_drafter_is_small_and_drafts_well() -> None:
    check_published(BUNDLED)
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 2.2 * 2**20
    found = acceptance.measure(BlockDrafter, TARGET, BUNDLED, 6, "trained")
    assert found.mean >= 5


@pytest.mark.parametrize("block", [2, 5, BLOCK_SIZE])
def test_anchors_draft_together_as_one_block_after_the_other_does(
    target: Qwen3ForCausalLM, said: list[Said], block: int
) -> None:
    """Against the reference of served blocks, which sees one anchor and the text before it."""
    drafter = load_drafter(BlockDrafter, BUNDLED, target.model.embed_tokens.weight)
    reference, batch = DFlashReference(TARGET, BUNDLED), set_right(said, BLOCK_SIZE - 1)
    with torch.inference_mode():
        together = drafter(batch, block)
        for row, item in enumerate(said[:3]):
            tokens = item.ids.tolist()
            for anchor in (item.num_prompt, item.num_prompt + 9, len(tokens) - 2):
                column = batch.num_anchors - (len(tokens) - 1 - anchor)
                alone = reference.block(tokens, anchor, block)[1:] @ reference.head.T
                torch.testing.assert_close(together[:, row, column], alone, rtol=2e-3, atol=2e-3)


def test_a_block_knows_nothing_of_the_text_behind_its_anchor(
    target: Qwen3ForCausalLM, said: list[Said]
) -> None:
    drafter = load_drafter(BlockDrafter, BUNDLED, target.model.embed_tokens.weight)
    batch, last = set_right(said, BLOCK_SIZE - 1), 3  # anchors that may change
    ids, features = batch.ids.clone(), batch.features.clone()
    num_rows = features.shape[1]
    ids[:, num_rows - last :] = 7
    features[:, num_rows - last :] = 1
    changed = replace(batch, ids=ids, features=features)
    with torch.inference_mode():
        first, second = drafter(batch, BLOCK_SIZE), drafter(changed, BLOCK_SIZE)
    assert torch.equal(first[:, :, :-last], second[:, :, :-last])
    assert not torch.equal(first[:, :, -last:], second[:, :, -last:])
