"""`kvlane top`: what `/dashboard` shows, in a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
import unicodedata
from collections.abc import Generator, Sequence

import httpx
import msgspec

from cluster.screen import columns
from router.observe.board import Board, Latency, RouterRow, WorkerRow
from worker.errors import UserError, WorldError

TIMEOUT_S = 5.0
MIN_INTERVAL_S = 0.1
LOOK_S = 0.25  # at the size of the terminal
NUM_CHANGES = 10
LATENCIES = {
    "time_to_first_token": "first token",
    "inter_token": "between chunks",
    "end_to_end": "end to end",
}
ANSWERING = ("ready", "draining")  # others have no figures
OPEN = "\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
CLOSE = "\x1b[?25h\x1b[?1049l"
BOLD, RED, YELLOW, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
MARKED = {"lost": RED, "silent": RED, "draining": YELLOW, "starting": YELLOW}


class Source:
    """A server that is asked again and again.

    Args:
        url: with or without /v1.
        key: bearer key; "": none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        )

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def ask(self) -> bytes:
        """What `/dashboard/data` says.

        Raises:
            UserError: it is no kvlane, or wants a key.
            WorldError: it does not answer.
        """
        try:
            answer = self._client.get("/dashboard/data")
        except httpx.HTTPError as error:
            raise WorldError(
                f"no answer from {self.url}: {error}; `kvlane serve` starts a server, --url names "
                "another"
            ) from error
        if answer.status_code in (401, 403):
            raise UserError(
                f"{self.url}/dashboard/data: {answer.status_code}: it wants a key; --api-key-file "
                "names a file with one"
            )
        if answer.is_client_error:
            raise UserError(f"{self.url}/dashboard/data: {answer.status_code}: is it a kvlane?")
        if not answer.is_success:
            raise WorldError(f"{self.url}/dashboard/data: {answer.status_code}")
        return answer.content


def show(source: Source, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Print once, or until q or Ctrl-C where standard output is a terminal.

    Args:
        source: whom to ask.
        interval_s: between two questions.
        once: print plain lines and return.
        as_json: print what the server says and return.

    Raises:
        UserError, WorldError: see `Source.ask`; while it runs, only the first time.
    """
    if not interval_s >= MIN_INTERVAL_S:  # nan, too
        raise UserError(f"--interval {interval_s:g}: at least {MIN_INTERVAL_S:g} s")
    told = source.ask()
    board = decoded(told)
    if as_json:
        print(msgspec.json.format(told).decode())
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print("\n".join(lines(board, source.url)))
    else:
        with contextlib.suppress(KeyboardInterrupt), _screen():
            _watch(source, interval_s, board)


def decoded(told: bytes) -> Board:
    """The answer of a server.

    Raises:
        WorldError: it is of another version, or no kvlane.
    """
    try:
        return msgspec.json.decode(told, type=Board)
    except msgspec.MsgspecError as error:
        raise WorldError(
            f"the server says something else than a kvlane of this version: {error}"
        ) from error


def lines(board: Board, url: str, failure: str = "") -> list[str]:
    """The whole picture, the most important first.

    Args:
        board: what the server has said.
        url: of it.
        failure: why that is old, or "".
    """
    found = [f"{board.model} at {url}, kvlane {board.version}: {failure or board.summary}"]
    found += [*_load(board), "", *_workers(board.workers), ""]
    found += [*_routers(board.routers), "", *_latencies(board.latencies, board.window_s)]
    if board.changes:
        rows = [
            (f"{_span(each.ago_s)} ago", each.name, each.state, each.text)
            for each in board.changes[:NUM_CHANGES]
        ]
        found += ["", *columns([("CHANGE", "NAME", "STATE", ""), *rows])]
    return ["".join(c if c.isprintable() else " " for c in line) for line in found]


def _load(board: Board) -> list[str]:
    rates = board.rates
    cached = f"{board.cached_tokens / board.prompt_tokens:.0%}" if board.prompt_tokens else "-"
    told = ", ".join(f"{outcome} {count}" for outcome, count in board.errors.items()) or "none"
    return [
        f"{rates.output_tokens:,.0f} output tokens/s, {rates.prompt_tokens:,.0f} prompt tokens/s "
        f"({cached} cached), {rates.requests:.1f} ended/s, {board.running} running, "
        f"{board.waiting} waiting",
        f"errors in {_span(board.window_s)}: {told} (of {sum(board.outcomes.values())} ended)",
    ]


def _workers(rows: Sequence[WorkerRow]) -> list[str]:
    head = ("WORKER", "STATE", "RUNNING", "WAITING", "PAGES", "QUEUED", "ANSWERED", "NODE")
    cells: list[Sequence[str]] = [head]
    for row in rows:
        figures = ("-", "-", "-", "-")
        if row.state in ANSWERING:
            pages = f"{1 - row.free_pages / row.pages:.0%}" if row.pages else "-"
            running, queued = f"{row.running}/{row.max_running}", str(row.queued_tokens)
            figures = (running, str(row.waiting), pages, queued)
        heard = "-" if row.heard_s is None else f"{row.heard_s:.1f} s"
        cells.append((row.name, row.state, *figures, heard, _about(row) or row.reason))
    return columns(cells, right=range(2, 7))


def _about(row: WorkerRow) -> str:
    """Where it is, of how many ranks, what drafts for it and what a step yields."""
    told = [row.node] if row.node else []
    if row.ranks > 1:
        told.append(f"tp {row.ranks}")
    if row.drafter and row.tokens_per_row:
        told.append(f"{row.drafter} {row.tokens_per_row:.1f} tokens/step")
    elif row.drafter:
        told.append(row.drafter)
    return ", ".join(told)


def _routers(rows: Sequence[RouterRow]) -> list[str]:
    head = ("ROUTER", "STATE", "RUNNING", "WAITING", "NODE")
    cells: list[Sequence[str]] = [head]
    for row in rows:
        figures = (str(row.running), str(row.waiting)) if row.state in ANSWERING else ("-", "-")
        cells.append((row.name, row.state, *figures, row.node or row.reason))
    return columns(cells, right=range(2, 4))


def _latencies(found: dict[str, Latency], window_s: float) -> list[str]:
    head = (f"LATENCY, {_span(window_s)}", "P50", "P90", "P99", "COUNT")
    cells = [
        (LATENCIES.get(name, name), *map(_seconds, (of.p50, of.p90, of.p99)), str(of.count))
        for name, of in found.items()
    ]
    return columns([head, *cells], right=range(1, 5))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _span(seconds: float) -> str:
    for limit, unit_s, unit in ((100, 1, "s"), (6000, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


@contextlib.contextmanager
def _screen() -> Generator[None]:
    """The terminal's other screen, and keys as they are pressed; whatever ends it puts it back.

    Ctrl-Z does nothing: it would leave the shell on the other screen.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before, handler = termios.tcgetattr(sys.stdin), signal.signal(signal.SIGTERM, end)
    suspends = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(OPEN)
        yield
    finally:
        sys.stdout.write(CLOSE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGTSTP, suspends)


def _watch(source: Source, interval_s: float, board: Board) -> None:
    """Draw and ask, until q is pressed."""
    told_at, error = time.monotonic(), ""
    while True:
        old = _span(time.monotonic() - told_at)
        failure = f"NO ANSWER for {old}, these figures are old: {error}" if error else ""
        if _pressed_q(lines(board, source.url, failure), interval_s):
            return
        try:
            board, told_at, error = decoded(source.ask()), time.monotonic(), ""
        except (UserError, WorldError) as failed:
            error = str(failed)


def _pressed_q(text: Sequence[str], wait_s: float) -> bool:
    """Show the text for a while, drawn anew when the terminal changes; whether q was pressed."""
    until, left_s, size = time.monotonic() + wait_s, wait_s, None
    while left_s > 0:
        if size != (size := shutil.get_terminal_size()):
            _draw(text, *size)
        if select.select([sys.stdin], [], [], min(left_s, LOOK_S))[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or b"q" in pressed.lower():
                return True
        left_s = until - time.monotonic()
    return False


def _draw(text: Sequence[str], width: int, height: int) -> None:
    # A line is erased before it is written: after the last column, that would erase a character.
    shown = [f"\x1b[2K{_style(_cut(line, width), i)}" for i, line in enumerate(text[:height])]
    below = "\r\n\x1b[J" if len(shown) < height else ""
    sys.stdout.write("\x1b[H" + "\r\n".join(shown) + below)
    sys.stdout.flush()


def _cut(line: str, width: int) -> str:
    """What of a line fits into so many columns; a wide character takes two."""
    for i, char in enumerate(line):
        if not unicodedata.combining(char):
            width -= 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width < 0:
            return line[:i]
    return line


def _style(line: str, number: int) -> str:
    """The first line bold; names of states that need a look in colour."""
    if number == 0:
        return f"{BOLD}{line}{PLAIN}"
    words = line.split(maxsplit=2)
    colour = MARKED.get(words[1]) if len(words) > 1 else None
    return f"{colour}{line}{PLAIN}" if colour else line
