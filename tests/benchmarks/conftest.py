"""What the tests of the drafters' trainings share: the bundled model, which they train for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

TARGET = Path(__file__).parents[2] / "worker" / "assets" / "tiny"


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    """In float32, as transformers loads it."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of the bundled model."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))
