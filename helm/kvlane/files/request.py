"""Asks the router for completions until one was prefilled by a prefill worker and its KV pulled.

With disaggregation.mode auto an idle decode worker prefills by itself; one whose rows would wait
does not. So each further request is longer and comes while more others run.
"""

import json
import os
import random
import ssl
import threading
import time
import urllib.request

url, prefills = os.environ["URL"], os.environ["PREFILLS"]
headers = {"Content-Type": "application/json"}
if file := os.environ.get("API_KEY_FILE"):
    with open(file) as keys:
        lines = [line.split() for line in keys if line.strip()]
    lines.sort(key=lambda words: "admin=yes" not in words)  # /config wants one of these
    headers["Authorization"] = f"Bearer {lines[0][0]}"
# The certificate is for the names by which clients come, and we come by the Service's.
context = ssl._create_unverified_context() if url.startswith("https") else None
deadline = time.monotonic() + 240


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=120, context=context) as response:
        return json.load(response)


def complete(num_words, **options):
    words = " ".join(str(random.randrange(10)) for _ in range(num_words))
    return ask("/v1/completions", {"model": model["id"], "prompt": words, **options})


while not any(m["role"] == prefills and m["live"] for m in ask("/config")["members"]):
    assert time.monotonic() < deadline, f"no {prefills} worker answers"
    time.sleep(1)
model = ask("/v1/models")["data"][0]
room = model.get("max_model_len") or 512
for num in (1, 2, 4, 8, 16, 32):
    others = {"max_tokens": room // 2, "ignore_eos": True}
    for _ in range(num):
        threading.Thread(target=complete, args=(1,), kwargs=others, daemon=True).start()
    time.sleep(0.2)
    # With logprobs decode draws the first token, so the transfer is one of the stages before it.
    answer = complete(min(32 * num, room // 4), max_tokens=4, logprobs=1, return_stages=True)
    stages = answer["choices"][0]["stages"]
    print(f"{answer['usage']['prompt_tokens']} prompt tokens: {json.dumps(stages)}", flush=True)
    assert answer["usage"]["completion_tokens"] >= 1, answer
    assert stages["decoded_by"].startswith("decode-"), stages
    if (stages["prefilled_by"] or "").startswith(f"{prefills}-"):
        break
else:
    raise SystemExit(f"no prompt was prefilled by a {prefills} worker")
if prefills == "prefill":
    assert stages["prefill_s"] > 0, stages
    assert stages["transfer_s"] > 0, stages
print(f"prefill on {stages['prefilled_by']}, KV pulled, decode on {stages['decoded_by']}")
