"""What `benchmarks.gpu_cluster` serves: a model that it makes and a configuration that loads."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks.gpu_cluster import serve_config
from benchmarks.judges.served import make_model
from benchmarks.load.words import Words
from cluster.config import load
from cluster.resolve import with_devices
from router.text.tokenizer import Text

QWEN3 = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-8b.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    make_model(QWEN3, place)
    return place


def test_every_token_is_a_piece_of_text(model: Path) -> None:
    text = Text(model)
    assert text.vocab_size == json.loads(QWEN3.read_text())["vocab_size"]
    tokens = [5, 1023, 1024, 99_999, text.vocab_size - 1]
    output = text.output([7])
    assert all(output.feed([token]).text for token in tokens)
    assert text.decode(tokens).endswith(f" 1024 99999 {text.vocab_size - 1}")


def test_prompts_are_of_the_bundled_words(model: Path) -> None:
    words = Words(Tokenizer.from_file(str(model / "tokenizer.json")))
    assert words.is_additive
    text = words.text(np.random.default_rng(0), 512)
    assert len(words.ids(text)) == 512
    assert max(words.ids(text)) < 1024


@pytest.mark.parametrize(("num_gpus", "share"), [(0, 0.0), (1, 0.5), (2, 1.0)])
def test_its_configuration_loads(num_gpus: int, share: float, model: Path, tmp_path: Path) -> None:
    options = Namespace(
        gpus=num_gpus, model_config=QWEN3, prompt_len=512, output_len=128, chunk=2048,
        concurrency=32, mode="always",
    )  # fmt: skip
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve_config(options, model, "tcp")))
    config = with_devices(load(path), has_gpus=num_gpus > 0)
    assert config.prefill.num_gpus == config.decode.num_gpus == share
    assert config.model.name == "qwen3-8b"
    expected = 0.425 if num_gpus == 1 else "auto"
    assert config.decode.engine.memory_fraction == expected
