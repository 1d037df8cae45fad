#!/usr/bin/env bash
# transformers 5.24.0: apply_chat_template removes keys that are None, and a call of the past vanishes.
#
# OpenAI's API gives an assistant's turn with calls a `content` of null, and published chat templates (DeepSeek's
# R1-Distill, for one) write the calls of a turn where `message['content'] is none`. apply_chat_template drops keys
# whose value is None from every message before it renders, so there the test is false: content is undefined, and
# undefined is not none. The turn is left out of the prompt, without a word. jinja2 alone, given the same message, writes it.
#
# Seen:
#   jinja2:       <user>how late?<call>clock<tool>noon
#   transformers: <user>how late?<tool>noon
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0 jinja2==3.1.6
cat >"$place/render.py" <<'PYTHON'
import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{% if m['content'] is none %}{% for c in m['tool_calls'] %}<call>{{ c['function']['name'] }}{% endfor %}"
    "{% elif m['content'] %}<assistant>{{ m['content'] }}{% endif %}"
    "{% else %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "how late?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
tokenizer.chat_template = TEMPLATE
print("jinja2:      ", jinja2.Environment().from_string(TEMPLATE).render(messages=MESSAGES))
print("transformers:", tokenizer.apply_chat_template(MESSAGES, tokenize=False))
PYTHON
told=$("$place/venv/bin/python" "$place/render.py" 2>/dev/null)
echo "$told"
[ "$told" = "jinja2:       <user>how late?<call>clock<tool>noon
transformers: <user>how late?<tool>noon" ] || { echo "this has changed" >&2; exit 1; }
