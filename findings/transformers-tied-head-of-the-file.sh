#!/usr/bin/env bash
# transformers 5.24.0: config.json's `tie_word_embeddings: true` does not hold if the files have a head of their own.
#
# Where model.safetensors holds lm_head.weight beside the embedding and the two differ in a single number,
# from_pretrained leaves them apart: logits come from the file's head. Where they are equal it ties them. The config
# of the loaded model says true in both cases. So what a tied checkpoint computes is known from its tensors alone,
# and an engine that trusts the field computes other logits.
#
# Seen:
#   equal heads: one tensor True, config says True
#   one number differs: one tensor False, config says True
#   logits are those of the file's head: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.3.5
cat >"$place/load.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

path = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained(path)
held = load_file(path / "model.safetensors")
head = held["model.embed_tokens.weight"].clone()


def loaded(head):
    held["lm_head.weight"] = head
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return LlamaForCausalLM.from_pretrained(path)


def told(name, model):
    is_one = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    print(f"{name}: one tensor {is_one}, config says {model.config.tie_word_embeddings}")
    return is_one


same = loaded(head.clone())
first = told("equal heads", same)
head[3, 5] += 1
other = loaded(head.clone())
second = told("one number differs", other)
ids = torch.arange(8)[None]
with torch.inference_mode():
    hidden = other.model(ids).last_hidden_state
    by_file = torch.allclose(other(ids).logits, hidden @ head.T, atol=1e-5)
print("logits are those of the file's head:", by_file)
kept = same.config.tie_word_embeddings and other.config.tie_word_embeddings
sys.exit(not (first and not second and by_file and kept))
PYTHON
"$place/venv/bin/python" "$place/load.py" "$place/model" 2>/dev/null
