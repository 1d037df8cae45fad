"""Attention sinks as a feature of layers, although no family that is served has them yet.

The oracle is Llama of `transformers` with the attention of its gpt-oss.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence import test_models as models
from tests.equivalence.test_hybrid_mutants import mutate
from worker.config.checkpoint.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, Path]:
    """A model with sinks, and where it is."""
    family = FAMILIES["LlamaForCausalLM"]
    layers = replace(family.layers, sinks=True)
    families: Any = FAMILIES
    monkeypatch.setitem(families, "LlamaForCausalLM", replace(family, layers=layers))
    path = tmp_path / "sinks"
    model: Any = models.save_random(path, "Llama", {})
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(2 * torch.randn(4))
    model.save_pretrained(path)
    llama, oss = (
        import_module(f"transformers.models.{name}.modeling_{name}")
        for name in ("llama", "gpt_oss")
    )
    monkeypatch.setattr(llama, "eager_attention_forward", oss.eager_attention_forward)
    return model, path


def test_logits_and_greedy_ids_equal_transformers(saved: tuple[torch.nn.Module, Path]) -> None:
    models.assert_same(*saved, chunks=(64, 5))


@pytest.mark.parametrize("num", models.RANKS)
def test_ranks_equal_one(saved: tuple[torch.nn.Module, Path], num: int, tmp_path: Path) -> None:
    models.assert_ranks_equal_one(num, saved[1], tmp_path)


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        ("attention.reference:ReferenceAttention._weights", "if sinks is not None:", "if False:"),
        ("model.attention:SelfAttention.shards", "if self.sinks is not None:", "if False:"),
    ],
)
def test_sinks_left_out_are_red(
    where: str,
    old: str,
    new: str,
    saved: tuple[torch.nn.Module, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch, where, old, new)
    with pytest.raises((AssertionError, ValueError)):
        models.assert_same(*saved, chunks=(64,))
