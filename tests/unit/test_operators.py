"""What an operator reads: every command's output, causes of deaths, states told apart."""

import io
import json
import os
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.clients.operators import status_table
from cluster.config import Config
from cluster.control.commands import Scaled
from cluster.control.replicas import Event, ReplicaStatus, State
from cluster.diagnose.facts import build
from cluster.diagnose.running import ClusterExamination, of_command
from cluster.serve.progress import JsonScreen, Screen
from cluster.sites.ray_private import OomKills, reason_of
from tests.support.asynchronous import asynchronous
from tests.support.monitored import Monitored
from worker.errors import UserError

# Whoever runs the harness as a program, where another test has imported it.
pytestmark = pytest.mark.filterwarnings("ignore:'benchmarks.load.__main__' found:RuntimeWarning")

ROWS = [
    ReplicaStatus(
        "decode-0", "decode", State.READY, "abc", 1, 1000.0, "tiny", "n", 7, (7,), "tcp://n:1",
        "n:2", {"pages": 3},
    ),
    ReplicaStatus("prefill-0", "prefill", State.STARTING, "def", 0, progress="loading 50%"),
    ReplicaStatus(
        "router-0", "router", State.READY, "0", 0, 1040.0, "tiny", "n", 9, (9,), "http://n:8000",
        "n:3",
    ),
]  # fmt: skip
SHOWN = """\
NAME       STATE                  ROLE     MODEL  UPTIME  RESTARTS  NODE  PID  URL            METRICS  INCARNATION
decode-0   ready                  decode   tiny   2 min   1         n     7                   n:2      abc
prefill-0  starting, loading 50%  prefill                 0                                            def
router-0   ready                  router   tiny   80 s    0         n     9    http://n:8000  n:3      0
decode-0: pages 3"""  # noqa: E501
RAY_SAYS = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n The actor is dead "
    "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
)
CUT = "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes"
ANSWERS: dict[str, Any] = {
    "status": ROWS, "warning": "", "drain": True, "configuration": Config(), "restart": None,
    "turn": None, "scale": Scaled({"decode-1": "decode", "decode-2": "decode"}, {}), "down": True,
}  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, *words: str, **answers: Any) -> tuple[int, list[Any]]:
    """The exit code of a command whose controller answers so, and what it was asked last."""
    asked: list[Any] = []

    @contextmanager
    def connected(_: object) -> Any:
        def ask(method: str, *args: object) -> Any:
            asked[:] = [method, *args]
            answer = (ANSWERS | answers)[method]
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield ask

    monkeypatch.setattr(cli, "_connected", connected)
    return cli.main(list(words)), asked


@pytest.mark.parametrize(
    ("words", "answers", "code", "told"),
    [
        (["drain", "decode-0"], {}, 0, "decode-0 is drained\n"),
        (["drain"], {"drain": False}, 1, "the cluster is drained; requests were cut off\n"),
        (["drain", "decode-0"], {"drain": False}, 0,
         "decode-0 is drained; others go on with what it had begun\n"),
        (["drain", "decode-0"], {"drain": False, "warning": "the last one"}, 1,
         "decode-0 is drained; requests were cut off\nwarning: the last one\n"),
        (["drain", "router-1"], {"drain": False}, 1,
         "router-1 is drained; requests were cut off\n"),
        (["restart"], {}, 0, "every worker was restarted\n"),
        (["restart", "decode-0"], {}, 0, "decode-0 was restarted\n"),
        (["restart"], {"restart": UserError("no worker")}, 2, "error: no worker\n"),
        (["role", "decode-0", "prefill"], {}, 0, "decode-0 is a prefill worker\n"),
        (["scale", "decode=3"], {}, 0, "decode=3: decode-1, decode-2 started\n"),
        (["scale", "decode=3"], {"scale": Scaled({}, {})}, 0, "decode=3: nothing to do\n"),
        (["scale", "decode=0", "prefill=1"],
         {"scale": Scaled({"prefill-0": "prefill"}, {"decode-0": "decode"})}, 0,
         "decode=0: decode-0 drained\nprefill=1: prefill-0 started\n"
         "warning: no decode worker is left: requests get 503\n"),
        (["scale", "decode=1", "decode=2"], {}, 2,
         "error: a role is given twice; name it once\n"),
    ],
)  # fmt: skip
def test_every_command_says_what_it_did(
    words: list[str], answers: Mapping[str, Any], code: int, told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found, _ = run(monkeypatch, *words, **answers)
    captured = capsys.readouterr()
    assert (found, captured.out + captured.err) == (code, told)


def test_scale_asks_for_numbers_of_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = run(monkeypatch, "scale", "decode=3", "router=2", "--timeout", "7")
    assert asked == ["scale", {"decode": 3, "router": 2}, 7.0]
    _, asked = run(monkeypatch, "scale", "prefill=0")
    assert asked == ["scale", {"prefill": 0}, Config().cluster.drain_timeout_s]


@pytest.mark.parametrize("word", ["decode", "decode=", "decode=-1", "decode=two", "workers=2"])
def test_a_word_that_is_no_number_of_a_role_is_named(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["scale", word])
    assert raised.value.code == 2
    assert f"{word}: expected ROLE=N, as decode=3" in capsys.readouterr().err


def test_status_shows_role_model_url_and_uptime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_table(ROWS, 1120.0) == SHOWN
    assert "kvlane scale" in status_table([], 0.0)
    run(monkeypatch, "status", "--json")
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["role"], first["model"], first["ready_at"]) == ("decode", "tiny", 1000.0)


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        (CUT, "its process was killed (signal 9, kill -9), or crashed: then its log has a stack"),
        ("Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a "
         "SIGTERM.", "its process was ended from outside (signal 15, kill)"),
        ("Owner's node has crashed.", "its process died (Owner's node has crashed)"),
    ],
)  # fmt: skip
def test_a_cause_of_death_is_in_an_operators_words(detail: str, cause: str) -> None:
    assert reason_of(RuntimeError(RAY_SAYS + detail)) == cause


def test_a_kill_by_the_kernel_is_told_as_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free 1\noom_kill 3\n")
    kills = OomKills(counters)
    assert not kills.was_one()
    monkeypatch.setattr("cluster.sites.ray_private.OOM_KILLS", kills)
    counters.write_text("nr_free 1\noom_kill 4\n")
    for _ in range(2):  # who asks again hears the same
        assert reason_of(RuntimeError(RAY_SAYS + CUT)).startswith("out of memory: the kernel")
    kills.grew_at -= 100
    assert not kills.was_one()
    assert not OomKills(tmp_path / "none").was_one()


def logged(events: list[Event]) -> list[tuple[str, str, str]]:
    """Level, state and message of each line of JSON."""
    out = io.StringIO()
    for event in events:
        JsonScreen(out).event(event)
    lines = map(json.loads, out.getvalue().splitlines())
    return [(line["level"], line["state"], line["message"]) for line in lines]


@asynchronous
async def test_logs_tell_drained_turned_restarted_and_lost_apart() -> None:
    cluster = await Monitored.started("decode-0", "decode-1", "decode-2", "decode-3")
    begun = len(cluster.monitor.events)
    cluster.last("decode-0").pids = (1,)
    await cluster.monitor.renew("decode-0", None, "prefill")
    await cluster.monitor.renew("decode-1", None)
    cluster.last("decode-2").die()
    await cluster.until(lambda: len(cluster.site.made["decode-2"]) == 2)
    await cluster.monitor.drain(["decode-3"], None)
    events = cluster.monitor.events[begun:]
    of = {name: [line for line, event in zip(logged(events), events, strict=True)
                 if event.name == name] for name in cluster.site.made}  # fmt: skip
    assert ("INFO", "turning", "turning to prefill") in of["decode-0"]
    assert ("INFO", "restarting", "restarting") in of["decode-1"]
    assert ("WARNING", "lost", "lost") in of["decode-2"]
    assert ("INFO", "drained", "drained") in of["decode-3"]
    assert {level for name, lines in of.items() if name != "decode-2" for level, *_ in lines} == {
        "INFO"
    }


def test_which_kvlane_it_is_is_told(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    version = build(tmp_path)
    assert "commit" not in version, "git knows none there"
    assert build(Path(__file__).parents[2]).startswith(version)
    cluster = ClusterExamination(Config(), Config(), ())
    assert of_command("1, commit a", cluster).what == "1, commit a"


@pytest.mark.parametrize("words", [["serve", "--pre", "2"], ["drain", "x", "--time", "1"],
                                   ["status", "--js"], ["top", "--onc"], ["chat", "--mod", "m"],
                                   ["bench", "--conc", "3", "--url", "http://a"]])  # fmt: skip
def test_no_flag_is_shortened(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        raise SystemExit(cli.main(words))
    assert raised.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_full_disk_ends_no_serve_whose_lines_go_there():
    with open("/dev/full", "w") as out, open(os.devnull, "w") as other:
        for screen in (Screen(out), JsonScreen(out)):
            for line in range(2):
                screen.line(f"line {line}")
        os.dup2(other.fileno(), out.fileno())  # closing it writes again
