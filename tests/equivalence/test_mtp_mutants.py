"""What goes wrong in an MTP layer of experts without a word turns its laws red."""

from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import test_mtp as laws
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.pairwise import one_in
from worker.config import ModelConfig
from worker.drafts.chain import ChainDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

MUTANTS = {
    "no shared expert": (
        "model.experts:Experts.forward", "self.shared is not None and not is_carried", "False",
    ),
    "no gate of it": ("model.experts:Experts.forward", ".sigmoid()", ""),
    "weights are not renormalised": (
        "ops.experts.route:route_ref", "if shape.renormalizes:", "if False:",
    ),
    "another expert's weights": (
        "model.experts:Experts._held_modules", "experts.{i}", "experts.{(i + 1) % 8}",
    ),
    "ups are gates": ("weights.stacks:of_stack", "i * apart", "(len(parts) - 1 - i) * apart"),
    "the next expert's rows": (
        "weights.stacks:OfStack.__getitem__", "slice(self.number, self.number + 1)",
        "slice(self.number - 1, self.number or None)",
    ),
}  # fmt: skip


def drafts(path: Path) -> None:
    laws.test_drafts_equal_transformers("qwen3.5-moe", path)


@pytest.mark.parametrize("name", one_in(4, MUTANTS))
def test_a_mutant_is_red(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *MUTANTS[name])
    with pytest.raises(AssertionError):
        drafts(tmp_path)


def test_the_experts_that_a_layer_of_the_target_chooses_are_seen(tmp_path, monkeypatch) -> None:
    real = ChainDrafter.__init__

    def init(model: Any, shape: Any, target: Any, longest: int) -> None:
        real(model, shape, target, longest)
        theirs = target.layers[-1].feed_forward.gate
        model.feed_forward.register_forward_pre_hook(
            lambda own, _: own.gate.copy_(theirs) is None or None
        )

    monkeypatch.setattr(ChainDrafter, "__init__", init)
    with pytest.raises(AssertionError):
        drafts(tmp_path)


def test_experts_of_padding_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, "ops.experts.route:route_ref", "(slots < sink)", "(slots < 0)")
    with pytest.raises(AssertionError, match="of drafts alone"):
        laws.replayed(ModelConfig(path="tiny-hybrid-moe").directory, 8)
