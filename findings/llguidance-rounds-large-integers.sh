#!/usr/bin/env bash
# llguidance 1.9.1: an integer of a schema beyond 2^53 is forced as another one, without a warning.
#
# JSON schemas may name integers of any size (ids in `const` and `enum`, bounds). llguidance reads numbers as doubles:
# of {"const": 9007199254740993} the grammar accepts 9007199254740992 alone, and refuses the value that was asked for.
# get_grammar_warnings() says nothing of it. Ids of tools and databases with 16 or more digits are such values.
#
# Seen:
#   error: ''  warnings: []
#   9007199254740993 accepted: False
#   9007199254740992 accepted: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet llguidance==1.9.1
cat >"$place/const.py" <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

ASKED = 9007199254740993
tokenizer = LLTokenizer("byte")
grammar = LLMatcher.grammar_from_json_schema(json.dumps({"const": ASKED}))
matcher = LLMatcher(tokenizer, grammar, log_level=0)
print(f"error: {matcher.get_error()!r}  warnings: {matcher.get_grammar_warnings()}")
for value in (ASKED, ASKED - 1):
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(str(value))
    accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    print(f"{value} accepted: {accepted}")
PYTHON
told=$("$place/venv/bin/python" "$place/const.py")
echo "$told"
[ "$told" = "error: ''  warnings: []
9007199254740993 accepted: False
9007199254740992 accepted: True" ] || { echo "this has changed" >&2; exit 1; }
