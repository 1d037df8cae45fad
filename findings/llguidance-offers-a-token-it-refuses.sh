#!/usr/bin/env bash
# llguidance 1.9.1: where a grammar forces a text, its mask offers a token that llguidance then refuses.
#
# An added token that looks like <…> is special to LLTokenizer, whatever `special` says in tokenizer.json (Qwen3's
# <tool_call> says false); no text of a grammar matches such a token. But where one text alone may follow, the mask
# is made by encoding that text as the tokenizer does, which finds the token in it: the mask has this one token,
# and consuming it ends in an error. [call], added in the same way, is text, offered and taken; where another text
# may follow, too, the mask leaves <call> out and offers its first piece.
#
# Seen:
#   '<call> x' special False: offered ['<call>'], taken False
#   '<call> x' special True: offered ['<call>'], taken False
#   '[call] x' special False: offered ['[call]'], taken True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet llguidance==1.9.1 numpy tokenizers==0.23.3
cat >"$place/offered.py" <<'PYTHON'
import json

import llguidance.numpy as bitmask
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

for word, special in (("<call>", False), ("<call>", True), ("[call]", False)):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False)])
    made = LLTokenizer(tokenizer.to_str())
    matcher = LLMatcher(made, LLMatcher.grammar_from_lark(f"start: {json.dumps(word + ' x')}"), log_level=0)
    mask = bitmask.allocate_token_bitmask(1, made.vocab_size)
    bitmask.fill_next_token_bitmask(matcher, mask)
    offered = [i for i in range(made.vocab_size) if mask[0][i // 32] >> i % 32 & 1]
    taken = matcher.try_consume_tokens(offered[:1]) == 1
    words = [made.decode_str([i]) for i in offered]
    print(f"{word + ' x'!r} special {special}: offered {words}, taken {taken}")
PYTHON
told=$("$place/venv/bin/python" "$place/offered.py")
echo "$told"
[ "$told" = "'<call> x' special False: offered ['<call>'], taken False
'<call> x' special True: offered ['<call>'], taken False
'[call] x' special False: offered ['[call]'], taken True" ] || { echo "this has changed" >&2; exit 1; }
