"""`kvlane top`: what `/dashboard` shows, in a terminal."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence

import httpx
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from cluster.clients.server import Server
from cluster.tables import plain, span, table, text
from router.observe.board import Board, Latency, RouterRow, WorkerRow
from worker.errors import UserError, WorldError

TIMEOUT = httpx.Timeout(5.0)
MIN_INTERVAL_S = 0.1
DRAWN_PER_S = 4  # anew, as the terminal may have another size
NUM_CHANGES = 10
LATENCIES = {
    "time_to_first_token": "first token",
    "inter_token": "between chunks",
    "end_to_end": "end to end",
    "kv_pull": "KV transfer",
}
ANSWERING = ("ready", "draining")  # others have no figures


def show(server: Server, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Draw every `interval_s` until q or Ctrl-C; `once`, or without a terminal, print plain lines.

    Raises as `ask` and `decoded`; while it runs, only the first time.
    """
    if not interval_s >= MIN_INTERVAL_S:  # nan, too
        raise UserError(f"--interval {interval_s:g}: at least {MIN_INTERVAL_S:g} s")
    answer = ask(server)
    board = decoded(answer)
    if as_json:
        print(msgspec.json.format(answer).decode())
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print(plain(picture(board, server.url)))
    else:
        with contextlib.suppress(KeyboardInterrupt), _keys():
            _watch(server, interval_s, board)


def ask(server: Server) -> bytes:
    """What `/dashboard/data` says; UserError if that is no kvlane or wants a key."""
    with server.answering():
        answer = server.get("/dashboard/data")
    where = f"{server.url}/dashboard/data: {answer.status_code}"
    if answer.status_code in (401, 403):
        raise UserError(f"{where}: it wants a key; --api-key-file names a file with one")
    if answer.is_client_error:
        raise UserError(f"{where}: is it a kvlane?")
    if not answer.is_success:
        raise WorldError(where)
    return answer.content


def decoded(answer: bytes) -> Board:
    """The answer of a server; WorldError if it is of another version, or no kvlane."""
    try:
        return msgspec.json.decode(answer, type=Board)
    except msgspec.MsgspecError as error:
        raise WorldError(
            f"the server says something else than a kvlane of this version: {error}"
        ) from error


def picture(board: Board, url: str, failure: str = "") -> list[RenderableType]:
    """All that the server at `url` has said, the most important first. failure: why that is old."""
    summary = f"{board.model} at {url}, kvlane {board.version}: {failure or board.summary}"
    *load, errors = _load(board)
    all_fail = 0 < sum(board.errors.values()) == sum(board.outcomes.values())
    bad = failure or board.state == "bad"
    parts: list[RenderableType] = [text(summary, "bold red" if bad else "bold")]
    parts += [*map(text, load), text(errors, "red" if all_fail else ""), ""]
    parts += [_workers(board.workers), "", _routers(board.routers), ""]
    parts += [_latencies(board.latencies, board.window_s)]
    if board.changes:
        changes = [
            (f"{span(change.ago_s)} ago", change.name, change.state, change.text)
            for change in board.changes[:NUM_CHANGES]
        ]
        parts += ["", table(("CHANGE", "NAME", "STATE", ""), changes)]
    return parts


def _load(board: Board) -> list[str]:
    rates = board.rates
    cached = f"{board.cached_tokens / board.prompt_tokens:.0%}" if board.prompt_tokens else "-"
    errors = ", ".join(f"{outcome} {count}" for outcome, count in board.errors.items()) or "none"
    return [
        f"{rates.output_tokens:,.0f} output tokens/s, {rates.prompt_tokens:,.0f} prompt tokens/s "
        f"({cached} cached), {rates.requests:.1f} ended/s, {board.running} running, "
        f"{board.waiting} waiting",
        f"disaggregated: {_transfers(board)}",
        f"errors in {span(board.window_s)}: {errors} (of {sum(board.outcomes.values())} ended)",
    ]


def _transfers(board: Board) -> str:
    pulled, prompts = board.prefills.get("pulled", 0), sum(board.prefills.values())
    said = f"{pulled:,} of {prompts:,} prompts in {span(board.window_s)}"
    if not board.pull_s:
        return said
    rate = _bytes(board.pulled_bytes / board.pull_s)
    return f"{said}; {_bytes(board.pulled_bytes)} of KV at {rate}/s"


def _bytes(num: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1000
    return f"{num:.3g} TB"


def _workers(workers: Sequence[WorkerRow]) -> Table:
    head = ("WORKER", "STATE", "RUNNING", "WAITING", "KV TOKENS", "QUEUED", "ANSWERED", "NODE")
    rows: list[Sequence[str]] = []
    for worker in workers:
        figures = ("-", "-", "-", "-")
        if worker.state in ANSWERING:
            tokens = f"{worker.pages * worker.page_size:,}"
            used = (
                f"{1 - worker.free_pages / worker.pages:.0%} of {tokens}" if worker.pages else "-"
            )
            running = f"{worker.running}/{worker.max_running}"
            figures = (running, str(worker.waiting), used, str(worker.queued_tokens))
        heard = "-" if worker.heard_s is None else f"{worker.heard_s:.1f} s"
        about = _about(worker) or worker.reason or worker.progress
        rows.append((worker.name, worker.state, *figures, heard, about))
    return table(head, rows, right=range(2, 7))


def _about(worker: WorkerRow) -> str:
    tokens = f" {worker.tokens_per_row:.1f} tokens/step" if worker.tokens_per_row else ""
    drafter = f"{worker.drafter}{tokens}" if worker.drafter else ""
    ranks = f"tp {worker.ranks}" if worker.ranks > 1 else ""
    return ", ".join(filter(None, (worker.node, ranks, drafter)))


def _routers(routers: Sequence[RouterRow]) -> Table:
    rows: list[Sequence[str]] = []
    for router in routers:
        answers = router.state in ANSWERING
        figures = (str(router.running), str(router.waiting)) if answers else ("-", "-")
        rows.append((router.name, router.state, *figures, router.node or router.reason))
    return table(("ROUTER", "STATE", "RUNNING", "WAITING", "NODE"), rows, right=range(2, 4))


def _latencies(latencies: dict[str, Latency], window_s: float) -> Table:
    head = (f"LATENCY, {span(window_s)}", "P50", "P90", "P99", "COUNT")
    rows = [
        (LATENCIES.get(name, name), *map(_seconds, (of.p50, of.p90, of.p99)), str(of.count))
        for name, of in latencies.items()
    ]
    return table(head, rows, right=range(1, 5))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


@contextlib.contextmanager
def _keys() -> Generator[None]:
    """Keys as they are pressed; whatever ends it puts the terminal back.

    Ctrl-Z does nothing: it would leave the shell on the other screen.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before, at_term = termios.tcgetattr(sys.stdin), signal.signal(signal.SIGTERM, end)
    at_suspend = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, at_term)
        signal.signal(signal.SIGTSTP, at_suspend)


def _watch(server: Server, interval_s: float, board: Board) -> None:
    answered_at, error = time.monotonic(), ""
    with Live(screen=True, refresh_per_second=DRAWN_PER_S) as live:
        while True:
            old = span(time.monotonic() - answered_at)
            failure = f"NO ANSWER for {old}, these figures are old: {error}" if error else ""
            live.update(Group(*picture(board, server.url, failure)), refresh=True)
            if pressed_q(interval_s):
                return
            try:
                board, answered_at, error = decoded(ask(server)), time.monotonic(), ""
            except (UserError, WorldError) as failed:
                error = str(failed)


def pressed_q(wait_s: float) -> bool:
    """Whether q is pressed within that time, or there is no terminal any more."""
    until = time.monotonic() + wait_s
    while (left_s := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False
