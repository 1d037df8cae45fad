"""Directories and files of other kinds than are served: whose they are, what to take. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.config.checkpoint.refusals import QWEN, READ, unquantized
from worker.errors import Unsupported, UserError

SAVE = "from_pretrained and save_pretrained of transformers write them"
HF_FORM = "take the same model in the form of transformers, with config.json: its page links to it"
# Without a config.json: a file or folder that tells -> (what such a directory is, what to do).
WITHOUT_CONFIG: Mapping[str, tuple[str, str]] = {
    "params.json": ("weights in the form of their authors (Mistral, Meta)", HF_FORM),
    "tekken.json": ("a tokenizer in Mistral's form without a model beside it", HF_FORM),
    "consolidated*": ("weights in the form of their authors (Mistral, Meta)", HF_FORM),
    "model_index.json": ("a pipeline of diffusers, which makes images", f"take {QWEN}"),
    "mlc-chat-config.json": ("a model compiled by MLC", f"take {unquantized(Path())}"),
    "*.nemo": ("a NeMo archive", "take its export: NeMo writes Hugging Face checkpoints"),
    "*.engine": ("an engine of TensorRT", "take the checkpoint that it was built from"),
    "*.onnx": ("an ONNX model", f"take the one that it was exported from; {READ}"),
    "onnx": ("an ONNX model", f"take the one that it was exported from; {READ}"),
    "*.xml": ("an OpenVINO model", f"take the one that it was exported from; {READ}"),
    "global_step*": ("a checkpoint of DeepSpeed", f"take what its zero_to_fp32.py makes; {SAVE}"),
    "*.distcp": ("a checkpoint of torch.distributed", f"take it gathered; {SAVE}"),
    "*.safetensors": (
        "weights without a config.json", "take config.json and the tokenizer's files beside them",
    ),
}  # fmt: skip
# Beside a config.json.
BESIDE_CONFIG: Mapping[str, tuple[str, str]] = {
    "modules.json": ("a model that embeds texts (sentence-transformers)", f"take {QWEN}"),
}  # fmt: skip
ADAPTER = "adapter_config.json"
# By which some are told on the hub.
FILES = (ADAPTER, *BESIDE_CONFIG, "params.json", "model_index.json", "mlc-chat-config.json")
# Files with weights of other kinds, by how their names end.
OTHER_WEIGHTS = ("bin", "pt", "pth", "gguf", "onnx", "h5", "msgpack", "ot", "npz", "ckpt", "distcp")
# Safetensors that are not the model's: a LoRA adapter, the same weights in their authors' form.
ASIDE = ("adapter_", "consolidated")


def check_kind(path: Path) -> None:
    """Refuse a path that is no directory of a model to be served, by what it is instead."""
    if path.is_file():
        raise UserError(f"{path} is a file; set model.path to the directory that it lies in")
    has_config = (path / "config.json").exists()
    if not has_config and (path / ADAPTER).exists():
        raise Unsupported(_adapter(path))
    signs = BESIDE_CONFIG if has_config else WITHOUT_CONFIG
    for pattern, (kind, remedy) in signs.items():
        if found := sorted(path.glob(pattern)):
            raise Unsupported(f"{path} is {kind}, as {found[0].name} shows; {remedy}")
    if not has_config:
        _refuse_outer(path)


def _adapter(path: Path) -> str:
    """What to do with a directory that has an adapter, and no model."""
    try:
        said: Any = json.loads((path / ADAPTER).read_text(encoding="utf-8"))
        base = said["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    text = "base_model_name_or_path: a LoRA adapter without its model, and none are served"
    merge = "merge_and_unload of peft, then save_pretrained, make one model of both"
    return f"{path / ADAPTER}: {text}: take {base}; {merge}"


def _refuse_outer(path: Path) -> None:
    """Refuse a directory that holds models in others, with one that may be meant."""
    if (path / "snapshots").is_dir():  # as the hub's cache keeps a model
        ref = path / "refs" / "main"
        name = ref.read_text(encoding="utf-8").strip() if ref.exists() else "*"
        found = sorted((path / "snapshots").glob(name))
        whole = found[0] if found else path.name.removeprefix("models--").replace("--", "/")
        raise UserError(f"{path} is a model's folder in the hub's cache; set model.path to {whole}")
    if path.is_dir() and not any(path.iterdir()):
        fetch = f"hf download NAME --local-dir {path}"
        raise UserError(f"{path} is empty; fetch a model: {fetch}, or set model.path to its NAME")
    if found := sorted([*path.glob("*/config.json"), *path.glob("models--*")]):
        inner = found[0].parent if found[0].name == "config.json" else found[0]
        raise UserError(f"{path} has no config.json; set model.path to {inner}, if it is meant")


def no_safetensors(path: Path) -> str:
    """What to do in a directory without them."""
    if (path / ADAPTER).exists():
        return _adapter(path)
    others = sorted(x.name for end in OTHER_WEIGHTS for x in path.glob(f"*.{end}"))
    others += sorted(x.name for x in path.glob("*.safetensors") if x.name.startswith(ASIDE))
    held = f", but {others[0]}" if others else ""
    if held.endswith(".gguf"):
        return f"{path}: no *.safetensors file{held}: give the path of that file"
    if held.startswith(", but consolidated"):
        return f"{path}: no weights in the form of transformers{held}; {HF_FORM}"
    return f"{path}: no *.safetensors file{held}; {READ}: {SAVE}; or take a model that has them"


def tokenizer_remedy(path: Path) -> str:
    """What to do in a directory without tokenizer.json."""
    if (path / "tekken.json").exists():
        remedy = "take tokenizer.json from its page, or from the model that it was made of"
        return f"only tekken.json, in Mistral's form; {remedy}"
    text = "AutoTokenizer.from_pretrained and save_pretrained of transformers write it"
    return f"no such file; a slow (sentencepiece) tokenizer has to be converted first: {text}"
