"""Tests of the chain drafter's training: its text, its rows, its files and the bundled weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.train import acceptance, base
from benchmarks.train.answers import Said, Speaker, set_right
from benchmarks.train.base import Lesson, load_drafter, save_drafter, train_drafter
from benchmarks.train.chain_drafter import TAPS, ChainDrafter

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

NUM_DRAFTS = ChainDrafter.num_drafts
TARGET = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
BUNDLED = TARGET.with_name("tiny-chain")
LESSON = Lesson(steps=6, batch=2, round=8, passes=2)
SHAPES = {
    "fc.weight": (192, 576),
    "midlayer.input_layernorm.weight": (192,),
    "midlayer.hidden_norm.weight": (192,),
    "midlayer.post_attention_layernorm.weight": (192,),
    "midlayer.self_attn.q_proj.weight": (256, 384),
    "midlayer.self_attn.k_proj.weight": (128, 384),
    "midlayer.self_attn.v_proj.weight": (128, 384),
    "midlayer.self_attn.o_proj.weight": (192, 256),
    "midlayer.mlp.gate_proj.weight": (512, 192),
    "midlayer.mlp.up_proj.weight": (512, 192),
    "midlayer.mlp.down_proj.weight": (192, 512),
    "norm.weight": (192,),
}


@pytest.fixture(scope="module")
def said(target: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[Said]:
    return Speaker(target, TAPS).said(tokenizer, random.Random(3), 6)


def test_a_few_steps_lower_the_loss_and_leave_a_published_checkpoint(
    target, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(base, "STARTING_CHATS", 4)
    speaker = Speaker(target, TAPS)
    drafter, losses = train_drafter(ChainDrafter, speaker, tokenizer, LESSON, 0, "cpu")
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2]), losses
    save_drafter(drafter, tmp_path)
    _check_published(tmp_path)
    again = load_drafter(ChainDrafter, tmp_path, target.model.embed_tokens.weight)
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, drafter.state_dict()[name].bfloat16().float())


def test_the_bundled_drafter_is_small_and_drafts_well():
    _check_published(BUNDLED)
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 1.5 * 2**20
    found = acceptance.measure(ChainDrafter, TARGET, BUNDLED, 12, "trained")
    assert found.mean >= 3.3


def _check_published(folder: Path) -> None:
    """Tensors and flags of the form that SpecForge and SGLang write."""
    weights = load_file(str(folder / "model.safetensors"))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SHAPES
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config == ChainDrafter.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "use_aux_hidden_state": True,
    }
    assert "draft_vocab_size" not in config


def test_a_chat_is_kept_if_the_target_says_it_itself(target, said):
    speaker = Speaker(target, TAPS)
    chats = [(item.ids, item.num_prompt) for item in said]
    changed = chats[0][0].clone()
    changed[-5] = 500
    kept = speaker.read([(changed, chats[0][1]), *chats])
    assert [item.ids.tolist() for item in kept] == [ids.tolist() for ids, _ in chats]
    assert (speaker.num_read, speaker.num_kept) == (len(chats) + 1, len(chats))
    ids, num_prompt = chats[0]
    output = target.generate(ids[None, :num_prompt], do_sample=False, max_new_tokens=200)
    assert output[0].tolist() == ids.tolist()


def test_features_are_the_residuals_after_the_tapped_layers(target, said):
    with torch.inference_mode():
        states = target(said[0].ids[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1][0] for layer in TAPS], -1)
    torch.testing.assert_close(said[0].features, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_anchors_draft_together_as_one_row_after_the_other_does(target, said, own):
    drafter = ChainDrafter(target.model.embed_tokens.weight)
    features = torch.cat([item.features for item in said])
    drafter.start(target.model.norm.weight, features, torch.Generator().manual_seed(5))
    batch = set_right(said, NUM_DRAFTS)
    with torch.inference_mode():
        together = torch.stack(list(drafter(batch, own)))
        for row, item in enumerate(said[:3]):
            for anchor in (item.num_prompt, item.num_prompt + 9, len(item.ids) - 2):
                column = batch.num_anchors - (len(item.ids) - 1 - anchor)
                alone = _drafts_of(drafter, item, anchor, own)
                torch.testing.assert_close(together[: len(alone), row, column], alone)
                wanted = item.ids[anchor + 1 : anchor + 1 + NUM_DRAFTS]
                labels = batch.labels[:, row, column].tolist()
                assert labels == [
                    *wanted.tolist(),
                    *[-100] * (NUM_DRAFTS - len(wanted)),
                ]


def _drafts_of(drafter: ChainDrafter, item: Said, anchor: int, own: bool) -> Tensor:
    """Logits of the drafts behind one anchor, by rows in order and a list of keys and values.

    With the text's tokens fed back there are as many as the text has tokens left.
    """
    weights = drafter.state_dict()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits: list[Tensor] = []
    fused = item.features @ weights["fc.weight"].T
    num_drafts = NUM_DRAFTS if own else min(NUM_DRAFTS, len(item.ids) - 1 - anchor)
    for slot in range(1, anchor + num_drafts):
        if slot <= anchor:
            token, hidden = item.ids[slot], fused[slot - 1]
        else:
            token = logits[-1].argmax() if own else item.ids[slot]
        hidden = _row(weights, drafter.embedding[token], hidden, slot, keys, values)
        if slot >= anchor:
            normed = functional.rms_norm(hidden, (192,), weights["norm.weight"], 1e-6)
            logits.append(normed @ drafter.embedding.T)
    return torch.stack(logits)


def _row(
    weights: dict[str, Tensor],
    embedded: Tensor,
    hidden: Tensor,
    slot: int,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """The layer for one row, which joins `keys` and `values`; a feature in, its output out."""

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (192,), weights[f"midlayer.{name}.weight"], 1e-6)

    def project(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"midlayer.{name}_proj.weight"].T

    def turn(x: Tensor) -> Tensor:
        angles = slot * 10000.0 ** -(torch.arange(32) / 32)
        turned = torch.polar(torch.ones(32), angles) * torch.complex(x[:, :32], x[:, 32:])
        return torch.cat((turned.real, turned.imag), -1)

    mixed = torch.cat((norm("input_layernorm", embedded), norm("hidden_norm", hidden)))
    keys.append(turn(project("self_attn.k", mixed).view(2, 64)))
    values.append(project("self_attn.v", mixed).view(2, 64))
    queries = turn(project("self_attn.q", mixed).view(4, 64))
    found = [
        (queries[head] @ torch.stack(keys)[:, head // 2].T / 8).softmax(-1)
        @ torch.stack(values)[:, head // 2]
        for head in range(4)
    ]
    hidden = hidden + project("self_attn.o", torch.cat(found))
    normed = norm("post_attention_layernorm", hidden)
    inner = functional.silu(project("mlp.gate", normed)) * project("mlp.up", normed)
    return hidden + project("mlp.down", inner)


def test_windows_are_walked_as_a_server_steps():
    """Nine tokens behind the first: 1 without drafts, then 1 + 4, 1 + 0 and the last 2."""
    found = acceptance.walk("trained", [[4, 4, 0, 0, 0, 0, 0, 2, 1], []], 5)
    assert found.num_problems == 2
    assert (found.num_steps, found.num_accepted) == (4, 9)
    assert found.mean == 2.25
    assert found.by_draft == (2 / 3, 2 / 3, 1 / 3, 1 / 3)
