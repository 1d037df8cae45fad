"""Commands that need no cluster: version, config; chat and bench against a known server."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.load.selfcheck import running_stub
from benchmarks.load.stub import StubOptions
from cluster import cli
from cluster.clients.chat import TIMEOUT, converse
from cluster.clients.server import Server
from cluster.config import Config, fields, leaves, load, origins
from cluster.diagnose import checks
from cluster.resolve import explain
from tests.support.commands import REPOSITORY, run
from tests.support.patience import HANG_S
from worker.errors import WorldError

STUB_SAYS = " word" * 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_stub(StubOptions(ttft_s=0.01, itl_s=0.001)) as found:
        yield found


def explained(*sets: str, num_gpus: int = 0, path: Path | None = None) -> dict[str, str]:
    lines = explain(load(path, sets), origins(path, sets), num_gpus)
    rows = (line.partition(" = ") for line in lines)
    return {name: " ".join(rest.split()) for name, _, rest in rows}


def test_the_version_is_told() -> None:
    """By a process of its own from the beginning; others are forked from one that is there."""
    command = [sys.executable, "-m", "cluster", "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "kvlane")


def test_down_where_nothing_runs_is_done_and_status_is_a_mistake(tmp_path: Path) -> None:
    left = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment = left | {"XDG_RUNTIME_DIR": str(tmp_path)}
    down, status = (run([command], env=environment) for command in ("down", "status"))
    assert (down.returncode, down.stdout[:20]) == (0, "no kvlane runs here;")
    assert (status.returncode, status.stderr[:27]) == (2, "error: no kvlane runs here;")


def test_every_leaf_is_described_in_the_schema() -> None:
    silent = [path for path, field in fields() if not field.description]
    assert not silent, "write a text below the field"
    schema = Config.model_json_schema()
    port = schema["$defs"]["ClusterConfig"]["properties"]["port"]
    assert (
        port["description"] == "Port of all routers, on each node that has some; 0: any free one."
    )
    for path in leaves():
        node = schema
        for name in path.split("."):
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            node = node["properties"][name]
        assert node["description"], path


def test_every_leaf_is_explained_once_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("kv: {page_size: 8}\ndecode: {engine: {threads: 2, strict: true}}\n")
    rows = explained("decode.engine.strict=false", "prefill.engine.graph=eager", path=path)
    assert list(rows) == list(leaves())
    assert rows["kv.page_size"] == f"8 # {path}"
    assert rows["decode.engine.threads"] == f"2 # {path}"
    assert rows["decode.engine.strict"] == "False # --set"
    assert rows["prefill.engine.graph.decode"] == "eager # --set"
    assert rows["prefill.engine.threads"] == "1 # auto: CPUs of this process"
    assert rows["transport.name"] == "shm # auto: KV of cpu, on one node"
    assert rows["ping.max_misses"] == "3 # default"
    for name, row in rows.items():
        if row.startswith("auto #"):
            assert len(row) > len("auto # default; "), f"{name} does not say what auto is"


def test_what_auto_is_on_gpus_is_explained_as_well() -> None:
    rows = explained(num_gpus=1)
    assert rows["prefill.replicas"] == "0 # auto: one GPU: the decode worker does both"
    assert rows["decode.num_gpus"].startswith("1.0 # auto: ")
    assert rows["routers.replicas"] == "1 # auto: decode workers have 1 GPUs"
    assert rows["decode.engine.graph.decode"] == "full # auto: CUDA"
    assert rows["prefill.engine.graph.decode"].startswith("eager # auto: a prefill worker ")
    assert rows["kv.page_size"] == "64 # auto: CUDA"
    assert "64 at least and 256 at most" in rows["decode.engine.max_num_reqs"]


@pytest.mark.parametrize(("sets", "told"), [([], 1), (["prefill.replicas=1"], 0)])
def test_that_one_gpu_has_one_worker_is_told_in_a_line(
    sets: list[str], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(checks, "checked", lambda config, *_, **__: (config, []))
    for name in ("_prepare_environment", "supervise"):
        monkeypatch.setattr(cli, name, lambda *_: 0)
    config = load(None, ["cluster.local_ray.num_gpus=1", *sets])
    cli._start(config, True, "", lambda _, text: lines.append(text))
    assert [line for line in lines if "one worker prefills and decodes" in line] == lines
    assert len(lines) == told


def test_a_later_source_of_a_whole_section_wins() -> None:
    sets = ["decode.engine.threads=3", "decode.engine={strict: true}"]
    assert origins(None, sets) == {"decode.engine.strict": "--set"}
    assert origins(None, sets, {"decode.replicas": "--decode"})["decode.replicas"] == "--decode"


def test_what_others_call_a_flag_is_taken_and_ours_is_named() -> None:
    words = ["config", "m", "--tensor-parallel-size", "2", "--max-model-len=4096"]
    done = run([*words, "--gpu-memory-utilization", "0.5", "--served-model-name", "n"])
    assert done.stderr.splitlines() == [
        "--tensor-parallel-size 2: here this is --set prefill.tp=2 --set decode.tp=2",
        "--max-model-len 4096: here this is --set model.max_model_len=4096",
        "--gpu-memory-utilization 0.5: here this is --set engine.memory_fraction=0.5",
        "--served-model-name n: here this is --set model.served_name=n",
    ]
    told = [line.split(": here this is ")[1].split() for line in done.stderr.splitlines()]
    ours = run(["config", "--model", "m", *(word for line in told for word in line)])
    assert (ours.returncode, ours.stderr, ours.stdout) == (0, "", done.stdout)
    (row,) = (
        line for line in run([*words, "--explain"]).stdout.splitlines() if "decode.tp " in line
    )
    assert row.split()[-1] == "--tensor-parallel-size"


def test_a_model_is_named_once_and_a_key_never() -> None:
    for command in ("serve", "config", "doctor"):
        done = run([command, "tiny", "--model", "tiny"])
        assert (done.returncode, done.stderr) == (
            2, "error: both tiny and --model name a model; name one\n"
        )  # fmt: skip
    done = run(["serve", "tiny", "--api-key", "secret-7"])
    assert done.returncode == 2
    assert "--api-key-file" in done.stderr
    assert "secret-7" not in done.stderr
    done = run(["serve", "no/such/model", "--offline"])
    assert (done.returncode, "no/such/model" in done.stderr) == (2, True)


def test_simulated_acceptance_has_a_flag() -> None:
    path = "spec.simulate_accept_len"
    done = run(["config", "--explain", "--spec-simulate-accept-len", "2.5"])
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"{path} "))
    assert row.split() == [path, "=", "2.5", "#", "--spec-simulate-accept-len"]
    done = run(["config", "--spec-simulate-accept-len", "0.5"])
    assert (done.returncode, "simulate_accept_len" in done.stderr) == (2, True)


def test_a_reader_that_goes_early_gets_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run(["config", "--schema"], stdout=write_end)
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run(["config"], stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ("no JSON", "sent no chunk of a chat: no JSON"),
        ("[]", "sent no chunk of a chat: []"),
        ('{"choices": [{"text": "a"}]}', 'sent no chunk of a chat: {"choices": [{"text": "a"}]}'),
        ('{"error": {"message": "gone"}}', "the answer broke off: gone"),
    ],
)
def test_chat_takes_no_other_events(event: str, told: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        listed = {"data": [{"id": "m"}]}
        streamed = httpx.Response(200, text=f"data: {event}\n\n")
        return streamed if request.method == "POST" else httpx.Response(200, json=listed)

    server = Server("http://other", "", TIMEOUT, httpx.MockTransport(answer))
    with pytest.raises(WorldError) as raised:
        converse(server, {}, "", "hello")
    assert str(raised.value).endswith(told)


def test_chat_asks_once_with_a_message_or_what_is_piped(url: str) -> None:
    for arguments, given in (["hello"], ""), ([], "hello\nthere\n"):
        done = run(["chat", "--url", f"{url}/v1", "--max-tokens", "16", *arguments], input=given)
        assert (done.returncode, done.stdout) == (0, f"{STUB_SAYS}\n"), done.stderr


def test_chat_on_a_terminal_goes_on_until_ctrl_d(url: str) -> None:
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cluster", "chat", "--url", url, "--max-tokens", "16"],
        cwd=REPOSITORY, stdin=terminal, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.write(controller, b"one\n\ntwo\n\x04")
        output, _ = process.communicate(timeout=HANG_S)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 0
    assert output.startswith("stub at http://127.0.0.1:")
    assert output.count(STUB_SAYS) == 2


def test_chat_says_what_is_wrong() -> None:
    done = run(["chat", "--url", "http://127.0.0.1:9", "hello"])
    assert done.returncode == 1
    assert done.stderr.startswith("error: no answer from http://127.0.0.1:9")
    with running_stub(StubOptions(fail_every=1)) as failing:
        done = run(["chat", "--url", failing, "hello"])
    assert (done.returncode, done.stderr) == (1, "error: 503: as asked\n")


def test_bench_is_the_load_harness(url: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    load = ["--concurrency", "2", "--num", "4", "--processes", "1"]
    done = run(["bench", "--url", url, *load, "--json", str(path), "--quiet"])
    assert done.returncode == 0, done.stderr
    assert len(json.loads(path.read_text())["runs"][0]["outcomes"]) == 4
    assert run(["bench", "--rate", "1"]).returncode == 2
    told = run(["bench", "--help"]).stdout
    assert told.startswith("usage: kvlane bench")
    assert "--concurrency" in told
