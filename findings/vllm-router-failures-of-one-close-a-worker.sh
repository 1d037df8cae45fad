#!/usr/bin/env bash
# vllm-router 0.1.17: two requests that fail close a worker to everybody.
#
# A request that a worker answers with 500 is sent to it again, five times in all, and each time counts for the
# worker's circuit breaker, whose threshold is ten. So two requests of one client that fail by themselves (here: what
# they ask for makes this server answer 500, as an internal error of one request would) open the circuit; for the next
# minute other clients' requests, which the worker would serve, get 503 without being sent. With --disable-retries
# --disable-circuit-breaker they are served. The server's health check says 200 all the while.
#
# Seen:
#   defaults: good 200, bad 500, bad 500, good 503: "No available workers (all circuits open or unhealthy)"; worker was asked 11 times
#   both disabled: good 200, bad 500, bad 500, good 200; worker was asked 4 times
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet vllm-router==0.1.17
cat >"$place/ask.py" <<'PYTHON'
import http.server, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
WHOLE = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}
ERROR = {"error": {"message": "this one fails", "type": "server_error", "param": None, "code": "internal_error"}}
asked = []


class Worker(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "me"}]})

    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        if not self.path.endswith("/completions"):  # it also looks for vLLM's .../render
            return self.say(404, ERROR)
        asked.append(text)
        self.say(*((500, ERROR) if text == "bad" else (200, WHOLE)))

    def say(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args):
        pass


def free():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def ask(url, text):
    """Status of a chat, and what was said if it is 503."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return f"{text} {answer.status}"
    except urllib.error.HTTPError as error:
        said = error.read().decode()
        return f"{text} {error.code}" + (f': "{said}"' if error.code == 503 else "")


def tried(router, *flags):
    """What a good, two bad and a good request get through a router with these flags."""
    asked.clear()
    worker = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    port = free()
    command = [router, "--port", str(port), "--prometheus-port", str(free()), "--worker-startup-check-interval", "1"]
    command += ["--worker-urls", f"http://127.0.0.1:{worker.server_port}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/v1/models").close()
                break
            except OSError:
                time.sleep(0.1)
        told = ", ".join(ask(url, text) for text in ("good", "bad", "bad", "good"))
        return f"{told}; worker was asked {len(asked)} times"
    finally:
        process.terminate()
        process.wait()


print("defaults:", tried(sys.argv[1]))
print("both disabled:", tried(sys.argv[1], "--disable-retries", "--disable-circuit-breaker"))
PYTHON
told=$("$place/venv/bin/python" "$place/ask.py" "$place/venv/bin/vllm-router")
echo "$told"
[ "$told" = 'defaults: good 200, bad 500, bad 500, good 503: "No available workers (all circuits open or unhealthy)"; worker was asked 11 times
both disabled: good 200, bad 500, bad 500, good 200; worker was asked 4 times' ] || { echo "this has changed" >&2; exit 1; }
