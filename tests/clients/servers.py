"""Our harness against servers of others: `python -m tests.clients.servers [NAME …] [--versus]`.

Installs llama.cpp (in the wheel xllamacpp) and what `transformers serve` needs into .tools/servers,
has both serve the bundled model on this machine's CPUs, and runs `kvlane bench --agree` against
them, a request at a time, in a network namespace: tokens, requests and times as far as that server
tells. `transformers serve` has no page of metrics: its usage is compared with what our tokenizer
counts in its texts. Exits with 1 where something is more than 3 % apart. --versus: instead, these
and kvlane side by side, by `benchmarks.versus`.

llama.cpp closes connections after streams and says so nowhere, so none is used twice. `transformers
serve` refuses requests with `ignore_eos`, so answers are as long as the model makes them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from transformers import AutoModelForCausalLM

from benchmarks import versus
from tests.e2e.harness import serving as serving_kvlane
from tests.support.gguf_files import CONTROL, NORMAL, Words, write_model
from tests.support.namespaces import ENTER, INSIDE, run

REPOSITORY = Path(__file__).resolve().parents[2]
TINY, PLACE = REPOSITORY / "worker" / "assets" / "tiny", REPOSITORY / ".tools" / "servers"
PORT, START_S = 8123, 240.0
INSTALL = {"llama.cpp": "xllamacpp==2026.10.11549", "transformers": "accelerate"}
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.endpoint_metrics, params.n_ctx, params.n_parallel, params.fit_params = True, 8192, 1, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
time.sleep(1e6)
"""
BENCH = (
    "--agree", "--tokenizer", str(TINY), "--endpoint", "completions", "--concurrency", "1",
    "--processes", "1", "--quiet", "--header", "Connection: close",
)  # fmt: skip
LOADS = {"llama.cpp": ("--source", "synthetic:2048,256", "--num", "6"),
         "transformers": ("--source", "problems", "--num", "12")}  # fmt: skip


VERSUS = (
    "--tokenizer", str(TINY), "--rounds", "3", "--load",
    "--endpoint completions --source problems --concurrency 1 --num 12 --quiet"
    " --header 'Connection: close' --slo ttft=2s,itl=50ms", "--load",
    "--endpoint completions --source problems --rate 1 --num 12 --quiet"
    " --header 'Connection: close' --slo ttft=2s,itl=50ms",
)  # fmt: skip


def as_gguf(path: Path) -> None:
    """The bundled model, its words split as GPT-2's are."""
    read = json.loads((TINY / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in read["added_tokens"]}
    ids = {**read["model"]["vocab"], **special}
    tokens = sorted(ids, key=lambda word: ids[word])
    merges = [each if isinstance(each, str) else " ".join(each) for each in read["model"]["merges"]]
    types = [CONTROL if word in special else NORMAL for word in tokens]
    keys = {"ggml.eos_token_id": 2, "ggml.padding_token_id": 0, "ggml.add_bos_token": False}
    words = Words(tokens, "gpt2", "gpt-2", types, merges=merges, keys=keys)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    write_model(path, model, "qwen3", words=words)


@contextmanager
def serving(name: str, python: Path, port: int = PORT) -> Iterator[str]:
    """The server of that name listens while the body runs; its URL."""
    if name == "llama.cpp":
        as_gguf(PLACE / "tiny.gguf")
        words = [str(python), "-c", LLAMA, str(PLACE / "tiny.gguf"), str(port)]
    else:
        words = [str(python), "-m", "transformers.cli.transformers", "serve", str(TINY)]
        words += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
        words += ["--port", str(port)]
    log = PLACE / f"{name}.log"
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            until, url = time.monotonic() + START_S, f"http://127.0.0.1:{port}"
            while True:
                try:
                    if httpx.get(f"{url}/health", timeout=5).is_success:
                        break
                except httpx.TransportError:
                    pass
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"{name} does not serve: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.kill()


def compare(name: str, python: Path) -> int:
    """What `kvlane bench` ends with."""
    print(f"--- {name}", flush=True)
    with serving(name, python) as url:
        words = [sys.executable, "-m", "cluster", "bench", "--url", url, *BENCH, *LOADS[name]]
        return subprocess.run(words, check=False).returncode


def side_by_side(names: list[str], python: Path) -> int:
    """What `benchmarks.versus` ends with."""
    with ExitStack() as stack:
        made = serving_kvlane(["--prefill", "1"], PORT - 1, keep=PLACE)
        servers = [f"kvlane={stack.enter_context(made)}"]
        for port, name in enumerate(names, PORT):
            servers.append(f"{name}={stack.enter_context(serving(name, python, port))}")
        return versus.main([*servers, *VERSUS])


def main() -> int:
    """1 if a server says otherwise."""
    names = [each for each in sys.argv[1:] if each in INSTALL] or [*INSTALL]
    if INSIDE in os.environ:
        run("ip", "link", "set", "lo", "up")
        python = PLACE / "bin" / "python"
        if "--versus" in sys.argv:
            return side_by_side(names, python)
        return max([compare(name, python) for name in names])
    packages = [INSTALL[name] for name in names]
    run(str(REPOSITORY / "tests" / "support" / "venv"), str(PLACE), "--no-deps", *packages)
    (site,) = PLACE.glob("lib/python3.*/site-packages")
    (site / "own.pth").write_text(str(Path(httpx.__file__).parents[1]))  # all that is here, too
    inside = [*ENTER, sys.executable, "-m", "tests.clients.servers", *sys.argv[1:]]
    return subprocess.run(inside, env={**os.environ, INSIDE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
