"""Directories of other kinds, and files beside a model's: told at once, or left alone."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from worker.config import ModelConfig, SpecConfig
from worker.errors import UserError
from worker.start.check import check_directories
from worker.weights.files import INDEX_NAME, weight_files

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 99\n"
EMBEDDING = "model.embed_tokens.weight"
BASE = {"base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = {"weight_map": {EMBEDDING: SHARDS[0], "model.norm.weight": SHARDS[1]}}


def made(path: Path, files: Mapping[str, Any]) -> Path:
    """A directory of such files: an object or a text is one in JSON, names are those of tensors."""
    for name, held in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors") and not isinstance(held, str):
            save_file({each: torch.zeros(2, 2) for each in held}, file)
        else:
            file.write_text(held if isinstance(held, str) else json.dumps(held))
    path.mkdir(exist_ok=True)
    return path


def refused(path: Path) -> str:
    """How, in words without the directory's own."""
    with pytest.raises(UserError) as caught:
        check_directories(ModelConfig(path=str(path)), SpecConfig(), {})
    assert caught.value.param == "model.path"
    return str(caught.value).replace(str(path), "DIR")


WHOLE = {"config.json": CONFIG, "model.safetensors": [EMBEDDING]}
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"adapter_config.json": BASE}, "LoRA adapter.*take meta-llama/Llama-3.1-8B-Instruct"),
    ({"adapter_config.json": "{"}, "LoRA adapter.*take its base model"),
    ({"config.json": CONFIG, "adapter_config.json": BASE}, "LoRA adapter.*take meta-llama"),
    ({"params.json": {}, "consolidated.00.pth": ""}, "form of their authors.*take the same model"),
    ({"tekken.json": {}}, "tokenizer in Mistral's form.*take the same model"),
    ({"config.json": CONFIG, "consolidated.safetensors": ["x"]}, "consolidated.*take the same"),
    ({"model_index.json": {}, "unet/config.json": {}}, "diffusers.*take Qwen"),
    ({"onnx/model.onnx": ""}, "ONNX.*take"),
    ({"a.nemo": ""}, "NeMo.*take its export"),
    ({"__0_0.distcp": ""}, r"torch\.distributed.*take it gathered"),
    ({"model.safetensors": ["x"]}, "without a config.json.*take config.json"),
    (WHOLE | {"modules.json": "[]"}, "embeds texts.*take Qwen"),
    ({"config.json": CONFIG, "tf_model.h5": ""}, r"no \*\.safetensors file, but tf_model.h5.*take"),
    ({}, "DIR is empty.*set model.path"),
    ({"checkpoint-9/config.json": CONFIG}, "set model.path to DIR/checkpoint-9"),
    ({"models--a--b/refs/main": "0f"}, "set model.path to DIR/models--a--b"),
    ({"snapshots/0f/config.json": {}, "refs/main": "0f\n"}, "set model.path to DIR/snapshots/0f$"),
    ({"config.json": POINTER}, "config.json: a pointer of Git LFS.*take"),
    ({"config.json": CONFIG, "model.safetensors": POINTER}, "safetensors: a pointer of Git LFS"),
    ({"config.json": CONFIG, INDEX_NAME: POINTER}, "index.json: a pointer of Git LFS"),
    ({"config.json": CONFIG, "model.safetensors": "<!doctype html>"}, "cut short or not.*take it"),
    ({"config.json": "<!doctype html>"}, "not valid JSON.*take it anew"),
    ({"config.json": CONFIG, SHARDS[0]: [EMBEDDING]}, "1 of 2 files model-.*take it anew"),
    (
        {"config.json": CONFIG, SHARDS[0]: [EMBEDDING], INDEX_NAME: INDEX},
        f"names files that are not there: {SHARDS[1]}; take it anew",
    ),
    (
        {"config.json": CONFIG, "a.safetensors": ["x"], "b.safetensors": ["x"]},
        "a.safetensors, b.safetensors hold the same tensors.*take model.safetensors.index.json",
    ),
    ({"config.json": CONFIG, "model.safetensors": ["a.qweight"]}, r"a\.qweight.*AWQ or GPTQ.*take"),
    ({"config.json": CONFIG, "model.safetensors": ["a.weight_packed"]}, "compressed-tensors.*take"),
    ({"config.json": {"model_type": "llama"}}, "architectures: must be .* set it to the class"),
]


@pytest.mark.parametrize(("files", "said"), KINDS)
def test_a_directory_of_another_kind_is_told_with_what_to_take(
    files: dict[str, Any], said: str, tmp_path: Path
) -> None:
    text = refused(made(tmp_path / "model", files))
    assert re.search(said, text), text


def test_a_file_in_the_place_of_a_directory_and_one_of_another_type(tmp_path: Path) -> None:
    path = made(tmp_path / "model", WHOLE)
    assert "set model.path to the directory" in refused(path / "config.json")
    for dtype, said in ((torch.uint8, "type U8"), (torch.float8_e4m3fn, "without weight_scale")):
        save_file({EMBEDDING: torch.zeros(2, 2).to(dtype)}, path / "model.safetensors")
        assert said in refused(path)


# Files with their tensors, and those that count.
BESIDE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "authors' form": ({"consolidated.safetensors": ["layers.0.wq.weight"]}, []),
    "adapter": ({"adapter_model.safetensors": ["base_model.lora_A.weight"]}, []),
    "stranger": ({"vae.safetensors": ["decoder.weight"]}, []),
    "other precision": ({"model.fp16.safetensors": [EMBEDDING]}, []),
    "second index": ({"model.fp16.safetensors.index.json": INDEX}, []),
    "left by a save before": ({name: [EMBEDDING] for name in SHARDS}, []),
    "index of those too": ({SHARDS[0]: [EMBEDDING], INDEX_NAME: {"weight_map": {}}}, []),
    "an index whose files are gone": ({INDEX_NAME: INDEX}, []),
    "not fetched": ({"model.fp16.safetensors": POINTER}, []),
    "folder": ({"original/consolidated.safetensors": ["x"]}, []),
    "a layer that drafts": ({"mtp.safetensors": ["mtp.fc.weight"]}, ["mtp.safetensors"]),
    "the rest": ({"other.safetensors": ["model.norm.weight"]}, ["other.safetensors"]),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_is_not_of_the_model_is_left_alone(case: str, tmp_path: Path) -> None:
    files, counts = BESIDE[case]
    made(tmp_path, WHOLE | files)
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors", *counts]


def test_of_several_files_those_count_that_the_index_names_or_all(tmp_path: Path) -> None:
    shards = {SHARDS[0]: [EMBEDDING], SHARDS[1]: ["model.norm.weight"]}
    strange = {"consolidated.safetensors": ["x"], "model.fp16.safetensors": [EMBEDDING]}
    made(tmp_path / "index", {**shards, **strange, INDEX_NAME: INDEX})
    made(tmp_path / "none", {**shards, **strange})
    made(tmp_path / "part", {**shards, INDEX_NAME: INDEX, "model.safetensors": [EMBEDDING]})
    for kind in ("index", "none", "part"):
        assert [file.name for file in weight_files(tmp_path / kind)] == [*SHARDS], kind
