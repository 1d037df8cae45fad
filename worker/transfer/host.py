"""Which host this is and what runs on it, by the kernel. Free of torch: the controller uses it."""

import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What the kernel tells of one process."""

    state: str  # one letter; Z and X: it has ended
    parent: int
    start_ticks: int  # clock ticks from boot to its start: pids are used again, this is not


def process_stat(pid: int) -> ProcessStat:
    """Of a process of this pid namespace; raises OSError if there is none."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # The command name before these fields is in parentheses and may hold any character.
    state, parent, *fields = text.rpartition(")")[2].split()
    return ProcessStat(state, int(parent), int(fields[17]))


def host_key() -> str:
    """The same for two processes iff they share a kernel boot and a pid namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
