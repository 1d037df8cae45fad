#!/usr/bin/env bash
# llguidance 1.9.1: gbnf_to_lark makes rules without references greedy terminals, so texts of the grammar are refused.
#
# In GBNF (llama.cpp; xgrammar and SGLang read it, too) a rule may end wherever what follows it can begin: the grammar is
# context-free. gbnf_to_lark turns a rule that names no other one into a terminal of Lark, and terminals take as much
# as they can. So `word "ing"` with `word ::= [a-z]+` takes "singing" as a word that never ends, and
# `begin "b"` with `begin ::= "a" | "ab"` refuses "ab". There is neither an error nor a warning.
#
# Seen:
#   'singing' by root ::= word "ing": accepted False
#   'ab' by root ::= begin "b": accepted False
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet llguidance==1.9.1
cat >"$place/gbnf.py" <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

CASES = {
    "singing": 'root ::= word "ing"\nword ::= [a-z]+',
    "ab": 'root ::= begin "b"\nbegin ::= "a" | "ab"',
}
tokenizer = LLTokenizer("byte")
for text, gbnf in CASES.items():
    grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    print(f"{text!r} by {gbnf.partition(chr(10))[0]}: accepted {accepted}")
PYTHON
told=$("$place/venv/bin/python" "$place/gbnf.py")
echo "$told"
[ "$told" = "'singing' by root ::= word \"ing\": accepted False
'ab' by root ::= begin \"b\": accepted False" ] || { echo "this has changed" >&2; exit 1; }
