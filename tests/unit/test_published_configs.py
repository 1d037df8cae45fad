"""config.json as published: fields that are absent, older names, and what no tiny model has."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.instruments import WEIGHTS
from tests.support.family_table import MODELS
from tests.support.published import HEAD, TABLE, published, rows
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.shape import ModelShape, read_model_shape
from worker.start.check import check_directories

COMMAND_R_PLUS = "CohereLabs/c4ai-command-r-plus"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def made(name: str, **more: Any) -> ModelShape:
        (tmp_path / "config.json").write_text(json.dumps(published()[name][0] | more))
        return read_model_shape(tmp_path)

    return made


def test_gemma_2(read: Any) -> None:
    shape = read("google/gemma-2-27b-it")
    assert [mask.window for mask in shape.masks[:4]] == [4096, None, 4096, None]
    assert shape.scales.attention == 144**-0.5
    assert (shape.scales.attention_cap, shape.scales.logits_cap) == (50.0, 30.0)
    assert shape.tie_word_embeddings
    assert not shape.span


def test_gemma_3_names_little_of_what_it_is(read: Any) -> None:
    shape = read("google/gemma-3-4b-it")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab_size, shape.max_position_embeddings) == (262208, 131072)
    assert [mask.window for mask in shape.masks[4:8]] == [1024, None, 1024, 1024]
    assert (shape.rope(0).theta, shape.rope(0).scaling) == (10000.0, None)
    assert (shape.rope(5).theta, shape.rope(5).scaling.factor) == (1e6, 8.0)
    assert shape.eos_token_ids == (1, 106)
    assert shape.tie_word_embeddings
    assert shape.dtype == "bfloat16"
    small = read("google/gemma-3-1b-it")
    assert [mask.window for mask in small.masks[4:7]] == [512, None, 512]
    assert (small.rope(0).theta, small.rope(5).theta) == (10000.0, 1e6)
    assert not small.scales.attention_cap


def test_exaone_4(read: Any) -> None:
    shape = read("LGAI-EXAONE/EXAONE-4.0-32B")
    assert read("LGAI-EXAONE/EXAONE-4.0-32B", layer_types=None) == shape, "by its pattern"
    assert [mask.window for mask in shape.masks[:5]] == [4096, 4096, 4096, None, 4096]
    assert [shape.rope(i) is None for i in range(5)] == [False, False, False, True, False]
    assert shape.rope(0).scaling.rope_type == "llama3"
    small = read("LGAI-EXAONE/EXAONE-4.0-1.2B")
    assert not small.masks
    assert all(small.rope(i) is not None for i in range(30))


def test_olmo_3(read: Any) -> None:
    shape = read("allenai/Olmo-3-7B-Instruct")
    assert (shape.rope(0).scaling, shape.rope(3).scaling.rope_type) == (None, "yarn")
    assert shape.rope(3).scaling.original_max_position_embeddings == 8192
    assert shape.masks[3].window is None


def test_command_r(read: Any) -> None:
    shape = read(COMMAND_R_PLUS)
    assert shape.max_position_embeddings == 131072
    assert shape.scales.logits == pytest.approx(1.2)
    assert shape.features.head_norm
    assert shape.tie_word_embeddings
    assert not read(COMMAND_R_PLUS, use_qk_norm=False).features.head_norm
    small = read("CohereLabs/c4ai-command-r7b-12-2024")
    assert [mask.window for mask in small.masks[:5]] == [4096, 4096, 4096, None, 4096]
    assert [small.rope(i) is None for i in range(5)] == [False, False, False, True, False]
    assert small.scales.logits == 4.0


@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3.3-70b", "qwen3-235b-a22b"])
def test_large_shapes_of_benchmarks_divide_among_eight_ranks(name: str, tmp_path: Path) -> None:
    own = json.loads((MODELS / f"{name}.json").read_text())
    for more, num in product(({}, {"quantization_config": WEIGHTS["fp8"]}), (1, 2, 4, 8)):
        (tmp_path / "config.json").write_text(json.dumps(own | more))
        model = ModelConfig(path=str(tmp_path), load_format="dummy")
        check_directories(model, SpecConfig(), {"decode.tp": (num, "auto")})


def test_the_table_says_what_is_said_of_each(tmp_path: Path) -> None:
    """Else write it anew: python -m tests.support.published > tests/support/published.txt."""
    told = [row for row, _ in rows(tmp_path).values()]
    table = TABLE.read_text()
    assert table.splitlines()[table.splitlines().index(HEAD) + 1 :] == told
    assert len(told) >= 40
    assert all(re.search(r"\| served|\b(take|set)\b", row) for row in told)
