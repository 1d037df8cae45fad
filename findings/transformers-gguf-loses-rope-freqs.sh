#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: a GGUF file's `rope_freqs.weight` is dropped, and rope is not scaled.
#
# llama.cpp writes the scaling of Llama 3.1 to 3.3 (rope type llama3) as a tensor of factors, rope_freqs.weight, one for
# each pair of a head, by which it divides the frequencies. from_pretrained(..., gguf_file=...) maps other tensors and
# keys but leaves this one out without a word: the model turns at unscaled frequencies.
#
# Seen:
#   factors in the file: 1.0 to 8.0
#   rope_type: default
#   slowest frequency / unscaled: 1.0 (by the file: 0.125)
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 torch==2.13.0 numpy==2.3.5 accelerate==1.12.0
cat >"$place/load.py" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import transformers

HIDDEN, HEADS, WIDTH, VOCAB = 64, 2, 128, 32
path = Path(sys.argv[1]) / "model.gguf"
factors = np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32)
made = gguf.GGUFWriter(path, "llama")
made.add_block_count(1)
made.add_context_length(4096)
made.add_embedding_length(HIDDEN)
made.add_feed_forward_length(WIDTH)
made.add_head_count(HEADS)
made.add_head_count_kv(HEADS)
made.add_layer_norm_rms_eps(1e-5)
made.add_rope_freq_base(500000.0)
made.add_rope_dimension_count(HIDDEN // HEADS)
made.add_vocab_size(VOCAB)
made.add_tokenizer_model("gpt2")
made.add_token_list([chr(97 + i) for i in range(26)] + list("012345"))
made.add_token_merges(["a b"])
made.add_eos_token_id(0)
shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
shapes |= {f"blk.0.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
shapes |= {"blk.0.ffn_gate": (WIDTH, HIDDEN), "blk.0.ffn_up": (WIDTH, HIDDEN), "blk.0.ffn_down": (HIDDEN, WIDTH)}
for name, shape in shapes.items():
    made.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
    made.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
made.add_tensor("rope_freqs.weight", factors)
made.write_header_to_file()
made.write_kv_data_to_file()
made.write_tensors_to_file()
made.close()

model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
turned = float(model.model.rotary_emb.inv_freq[-1])
plain = 500000.0 ** -(1 - 2 / (HIDDEN // HEADS))
print(f"factors in the file: {factors[0]} to {factors[-1]}")
print("rope_type:", model.config.rope_parameters["rope_type"])
print(f"slowest frequency / unscaled: {turned / plain:.3} (by the file: {1 / factors[-1]:.3})")
PYTHON
told=$("$place/venv/bin/python" "$place/load.py" "$place" 2>"$place/errors") || { cat "$place/errors" >&2; exit 1; }
echo "$told"
[ "$told" = "factors in the file: 1.0 to 8.0
rope_type: default
slowest frequency / unscaled: 1.0 (by the file: 0.125)" ] || { echo "this has changed" >&2; exit 1; }
