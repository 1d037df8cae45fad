"""Listening TCP sockets and whose they are, as the kernel shows them in /proc."""

import ipaddress
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from worker.errors import UserError
from worker.transfer.host import process_stat

LISTEN = "0A"  # the state, in /proc/net/tcp
WORD = 8  # hexadecimal digits of an address that are in the machine's order
ANY = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens."""

    host: str  # "0.0.0.0" and "::": at every address
    port: int
    inode: int

    @property
    def address(self) -> str:
        """As one writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def place(self) -> tuple[str, int]:
        """Where to connect from this machine."""
        return ("127.0.0.1" if self.host in ANY else self.host), self.port


def listeners() -> list[Listener]:
    """Of this network namespace."""
    found: list[Listener] = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text("ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTEN:
                host, _, port = fields[1].partition(":")
                found.append(Listener(host_of(host), int(port, 16), int(fields[9])))
    return found


def host_of(digits: str) -> str:
    """An address as the kernel writes it: words of 32 bits, each of which begins with its end."""
    words = (digits[i : i + WORD] for i in range(0, len(digits), WORD))
    address = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def command_line(pid: int) -> list[str]:
    """Of a process; empty if it is gone, or the kernel's."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return [word.strip() for word in text.split("\0") if word.strip()]


def environment(pid: int) -> dict[str, str]:
    """With which a process was executed; empty if it is not ours to read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def families(is_root: Callable[[int, list[str]], bool]) -> dict[int, list[str]]:
    """Pid -> command line of the processes that `is_root` takes, and of all that stem from them."""
    lines = {int(path.name): command_line(int(path.name)) for path in _processes()}
    parents: dict[int, int] = {}
    for pid in lines:
        try:
            parents[pid] = process_stat(pid).parent
        except OSError:
            continue  # it has ended meanwhile
    roots = {pid for pid in parents if is_root(pid, lines[pid])}

    def belongs(pid: int) -> bool:
        while pid not in roots:
            if pid not in parents:
                return False
            pid = parents[pid]
        return True

    return {pid: lines[pid] for pid in sorted(parents) if belongs(pid)}


def owners(pids: Iterable[int]) -> dict[int, int]:
    """Inode of a socket -> the first of these processes that holds it.

    Raises UserError if one of them is another user's.
    """
    found: dict[int, int] = {}
    for pid in pids:
        directory = f"/proc/{pid}/fd"
        try:
            for fd in os.listdir(directory):
                inode = _inode(f"{directory}/{fd}")
                if inode is not None:
                    found.setdefault(inode, pid)
        except PermissionError:
            raise UserError(f"process {pid} is another user's; ask as that user") from None
        except FileNotFoundError:
            continue  # it has ended meanwhile
    return found


def _inode(path: str) -> int | None:
    try:
        match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
    except FileNotFoundError:  # closed meanwhile
        return None
    return int(match[1]) if match else None


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]
