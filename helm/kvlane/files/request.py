"""Asks the router for completions until one was prefilled by a prefill worker and its KV pulled.

With disaggregation.mode auto a decode worker prefills short prompts by itself. So prompts get longer.
"""

import json
import os
import random
import urllib.request

url, prefills = os.environ["URL"], os.environ["PREFILLS"]
headers = {"Content-Type": "application/json"}
if keys := os.environ.get("API_KEYS", "").split():
    headers["Authorization"] = f"Bearer {keys[0]}"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


model = ask("/v1/models")["data"][0]
room = model.get("max_model_len") or 512
num_words = 16
while True:
    words = " ".join(str(random.randrange(10)) for _ in range(num_words))
    answer = ask(
        "/v1/completions",
        {"model": model["id"], "prompt": words, "max_tokens": 4, "return_stages": True},
    )
    choice = answer["choices"][0]
    stages = choice["stages"]
    print(f"{answer['usage']['prompt_tokens']} prompt tokens: {json.dumps(stages)}", flush=True)
    assert answer["usage"]["completion_tokens"] >= 1, answer
    assert stages["decoded_by"].startswith("decode-"), stages
    if (stages["prefilled_by"] or "").startswith(f"{prefills}-"):
        break
    num_words *= 2
    assert 2 * num_words + 16 < room, f"no prompt was prefilled by a {prefills} worker"
if prefills == "prefill":
    assert stages["prefill_s"] > 0, stages
    assert stages["transfer_s"] > 0, stages
print(f"prefill on {stages['prefilled_by']}, KV pulled, decode on {stages['decoded_by']}")
