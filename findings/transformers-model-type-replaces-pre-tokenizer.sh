#!/usr/bin/env bash
# transformers 5.24.0: for model_type qwen3_5_moe_text AutoTokenizer replaces how a tokenizer.json splits text.
#
# A tokenizer.json says itself how text is split before merges, and tokenizer_config.json names PreTrainedTokenizerFast,
# which takes the file as it stands. With a config.json of model_type qwen3_5_text beside them it does. With
# qwen3_5_moe_text, the same family's experts, it is the class Qwen3_5Tokenizer: vocabulary and merges are the
# file's, the split is the class's, and nothing is said. A model that was trained on such an architecture with a vocabulary
# of its own is given other ids; `tokenizers` reads the file as it stands.
#
# Seen:
#   the file: 'ab=1' -> ['ab', '=1']
#   qwen3_5_text: TokenizersBackend ['ab', '=1']
#   qwen3_5_moe_text: Qwen3_5Tokenizer ['ab', '=', '1']
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.1
cat >"$place/split.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer

place, text = Path(sys.argv[1]), "ab=1"
vocab = {piece: i for i, piece in enumerate(["a", "b", "=", "1", "ab", "=1"])}
made = Tokenizer(BPE(vocab, [("a", "b"), ("=", "1")]))
split = pre_tokenizers.Split(Regex(r"=\d+|\w+"), "isolated")
made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
made.decoder = decoders.ByteLevel()
made.save(str(place / "tokenizer.json"))
(place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
print(f"the file: {text!r} ->", made.encode(text).tokens)
for kind in ("qwen3_5_text", "qwen3_5_moe_text"):
    (place / "config.json").write_text(json.dumps({"model_type": kind}))
    found = AutoTokenizer.from_pretrained(place)
    print(f"{kind}:", type(found).__name__, found.tokenize(text))
PYTHON
mkdir "$place/model"
told=$("$place/venv/bin/python" "$place/split.py" "$place/model" 2>"$place/errors") || { cat "$place/errors" >&2; exit 1; }
echo "$told"
[ "$told" = "the file: 'ab=1' -> ['ab', '=1']
qwen3_5_text: TokenizersBackend ['ab', '=1']
qwen3_5_moe_text: Qwen3_5Tokenizer ['ab', '=', '1']" ] || { echo "this has changed" >&2; exit 1; }
