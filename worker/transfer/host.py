"""This host, its processes and addresses, by the kernel. Free of torch: the controller uses it."""

import fcntl
import ipaddress
import os
import socket
import struct
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


GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


def interfaces() -> Iterator[tuple[str, str]]:
    """Names and addresses of network interfaces: the first of IPv4, all of IPv6 but link-local."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    of_v6 = Path("/proc/net/if_inet6")
    for line in of_v6.read_text().splitlines() if of_v6.exists() else ():
        address, *_, name = line.split()
        of_name = ipaddress.IPv6Address(bytes.fromhex(address))
        if not of_name.is_link_local:
            yield name, str(of_name)


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
