"""`kvlane top`: rows of a known state, and the command itself against a router."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from rich.text import Text

from cluster.cli import main
from cluster.clients.server import Server
from cluster.clients.top import TIMEOUT, picture, show
from cluster.tables import plain
from router.observe.board import Board, Change, History, Latency, Rates, RouterRow, WorkerRow
from tests.fault.router_doubles import DecodeDouble, make_model, serving, speak
from tests.support.commands import REPOSITORY
from tests.support.patience import HANG_S
from worker.errors import UserError, WorldError

BOARD = Board(
    state="bad", summary="prefill-0 is lost", model="tiny", version="1", told_by="router-0",
    window_s=300.0, step_s=2.0, running=3, waiting=1, sessions=0, turns={},
    outcomes={"stop": 7, "busy": 2, "invalid_value": 1}, errors={"busy": 2},
    prompt_tokens=400, cached_tokens=100, prefills={"local": 6, "pulled": 4},
    pulled_bytes=3_000_000, pull_s=0.02, rates=Rates(0.5, 1200.0, 34.4),
    latencies={"time_to_first_token": Latency(0.0123, 0.5, 12.345, 10),
               "inter_token": Latency(None, None, None, 0)},
    history=History(), hour=History(), hour_step_s=30.0,
    routers=[RouterRow("router-0", "ready", "a", 3, 1), RouterRow("router-1", "silent", "b")],
    workers=[
        WorkerRow("decode-0", "decode", "ready", "a", heard_s=0.2, running=3, waiting=0,
                  max_running=64, free_pages=75, pages=100, page_size=16, queued_tokens=7, ranks=2,
                  drafter="chain", tokens_per_row=2.44),
        WorkerRow("decode-1", "decode", "silent", "b", heard_s=40.0),
        WorkerRow("prefill-0", "prefill", "lost", reason="its process\x1b[2J died"),
    ],
    changes=[Change("prefill-0", "prefill", "abc", "lost", "its process died", 12.0)],
)  # fmt: skip
SHOWN = """\
tiny at http://x, kvlane 1: prefill-0 is lost
34 output tokens/s, 1,200 prompt tokens/s (25% cached), 0.5 ended/s, 3 running, 1 waiting
disaggregated: 4 of 10 prompts in 5 min; 3 MB of KV at 150 MB/s
errors in 5 min: busy 2 (of 10 ended)

WORKER     STATE   RUNNING  WAITING     KV TOKENS  QUEUED  ANSWERED  NODE
decode-0   ready      3/64        0  25% of 1,600       7     0.2 s  a, tp 2, chain 2.4 tokens/step
decode-1   silent        -        -             -       -    40.0 s  b
prefill-0  lost          -        -             -       -         -  its process [2J died

ROUTER    STATE   RUNNING  WAITING  NODE
router-0  ready         3        1  a
router-1  silent        -        -  b

LATENCY, 5 min      P50     P90     P99  COUNT
first token     12.3 ms  500 ms  12.3 s     10
between chunks        -       -       -      0

CHANGE    NAME       STATE
12 s ago  prefill-0  lost   its process died"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = make_model(tmp_path_factory.mktemp("model"))
    with serving(directory, DecodeDouble(script=speak([70]))) as (_, found):
        yield found


def test_all_is_shown_in_columns() -> None:
    assert plain(picture(BOARD, "http://x")) == SHOWN
    assert ": NO ANSWER\n" in plain(picture(BOARD, "http://x", "NO ANSWER"))


def test_what_is_bad_is_red_and_errors_are_where_nothing_else_ends() -> None:
    def styles(board: Board) -> list[str]:
        lines = {part.plain.split(":")[0]: str(part.style)
                 for part in picture(board, "http://x") if isinstance(part, Text)}  # fmt: skip
        return [lines["tiny at http"], lines["errors in 5 min"]]

    assert styles(BOARD) == ["bold red", ""]
    good = replace(BOARD, state="good")
    assert styles(good) == ["bold", ""]
    assert styles(replace(good, outcomes={"busy": 2})) == ["bold", "red"]


def test_it_is_printed_once_where_there_is_no_terminal_and_as_json(url: str, capsys) -> None:
    assert main(["top", "--url", f"{url}/v1"]) == 0
    plain = capsys.readouterr()
    assert plain.err == ""
    assert plain.out.startswith(f"small at {url}, kvlane ")
    assert "decode-0  ready" in plain.out
    assert "\x1b" not in plain.out
    assert main(["top", "--url", url, "--json"]) == 0
    told = capsys.readouterr().out
    assert msgspec.json.decode(told, type=Board).model == "small"
    assert told.count("\n") > 20, "it is for people, too"


def test_it_says_what_is_wrong(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: no answer from http://127.0.0.1:9")
    assert main(["top", "--url", f"{url}/docs"]) == 2
    assert capsys.readouterr().err == f"error: {url}/docs/dashboard/data: 404: is it a kvlane?\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--url", "http://host:port"], "--url http://host:port: Invalid port: 'port'"),
        (["--interval", "0"], "--interval 0: at least 0.1 s"),
        (["--interval", "nan"], "--interval nan: at least 0.1 s"),
        (["--api-key-file", "KEYS"], "KEYS: the first key is not ASCII"),
    ],
)
def test_mistakes_are_told_before_anybody_is_asked(
    more, says, tmp_path, monkeypatch,
    capsys,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("KEYS").write_text("clé\n")
    assert main(["top", "--url", "http://127.0.0.1:9", *more]) == 2
    assert capsys.readouterr().err == f"error: {says}\n"


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        ("moved", WorldError, "something else than a kvlane"),
        ("other", WorldError, "something else than a kvlane"),
        ("closed", UserError, "401: it wants a key; --api-key-file names"),
    ],
)
def test_other_servers_are_told_from_a_kvlane(path: str, error: type, says: str) -> None:
    """A web server that forwards, asks for a key, or says what it likes."""

    def answer(request: httpx.Request) -> httpx.Response:
        status = {"moved": 301, "closed": 401}.get(request.url.path.split("/")[1], 200)
        return httpx.Response(status, headers={"location": "/other"}, content=b"<p")

    server = Server(f"http://elsewhere/{path}", "", TIMEOUT, httpx.MockTransport(answer))
    with pytest.raises(error, match=says):
        show(server, 1.0, once=True, as_json=True)


@pytest.mark.parametrize("pressed", [b"xq", b"\x03"], ids=["q", "ctrl-c"])
def test_who_ends_it_gets_the_terminal_as_it_was(url: str, pressed: bytes) -> None:
    def give_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # becomes the controlling one

    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cluster", "top", "--url", f"{url}/v1", "--interval", "0.1"],
        cwd=REPOSITORY,
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=give_terminal,
    ) as process:  # fmt: skip
        os.close(terminal)
        output = b""
        while b"LATENCY" not in output:
            output += os.read(controller, 4096)
        os.write(controller, pressed)
        while True:
            try:
                output += os.read(controller, 4096)
            except OSError:  # it has closed its side
                break
        assert process.wait(HANG_S) == 0
    os.close(controller)
    for opens, closes in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert output.count(opens) == 1
        assert output.index(opens) < output.index(b"LATENCY") < output.rindex(closes)
    assert b"decode-0" in output
