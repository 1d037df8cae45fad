"""This host, its processes and addresses, by the kernel. Free of torch: the controller uses it."""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """The kernel's record of one process."""

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


def interfaces() -> Iterator[tuple[str, str]]:
    """Names and addresses of network interfaces: of IPv4, and of IPv6 but link-local."""
    import psutil  # the controller, which uses this file, need not wait for it

    for name, of_name in psutil.net_if_addrs().items():
        for one in of_name:
            # "%": the scope of an address that is link-local
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                yield name, one.address


def addresses_in(networks: Sequence[str]) -> list[str]:
    """Addresses of this machine by network, which is an interface's name or a range of
    addresses ("10.1.0.0/16"); ValueError names the first in which it has none.
    """
    here, addresses = list(interfaces()), list[str]()
    for network in networks:
        try:
            span = ipaddress.ip_network(network, strict=False)
            fits = (a for _, a in here if ipaddress.ip_address(a) in span)
        except ValueError:
            fits = (address for name, address in here if name == network)
        if (address := next(fits, None)) is None:
            known = ", ".join(f"{name} {address}" for name, address in here)
            raise ValueError(f"{network!r} is no network of this machine, which has {known}")
        addresses.append(address)
    return addresses
