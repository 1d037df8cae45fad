"""Whom a request counts for where others wait: its API key, or the address that it comes from."""

import ipaddress
from collections.abc import Iterator, Sequence
from functools import lru_cache

from router.config import RouterConfig

Headers = Sequence[tuple[bytes, bytes]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
FORWARDED, FORWARDED_FOR = b"forwarded", b"x-forwarded-for"
MAX_HOPS = 16
MAX_KNOWN = 4096  # addresses


class Sources:
    """Names of sources. Of IPv6 the first 64 bits count, which are one customer's."""

    def __init__(self, config: RouterConfig) -> None:
        self.by_key = config.fair_by == "key"
        self._proxies = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self._peer = lru_cache(MAX_KNOWN)(self._read)

    def of(self, peer: tuple[str, int] | None, headers: Headers) -> str:
        """The address of who has sent a request, as trusted proxies tell it; "": not known."""
        found, name, is_proxy = self._peer(peer[0] if peer else "")
        if found is None or not is_proxy:
            return name
        for hop in _hops(headers):
            at, hop_name, is_proxy = self._read(hop)
            if at is None:  # what is no address was not written by a proxy of ours
                return name
            name = hop_name
            if not is_proxy:
                break
        return name

    def _read(self, text: str) -> tuple[Address | None, str, bool]:
        """An address, its name, and whether a trusted proxy has it."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return None, "", False
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        is_proxy = any(address in network for network in self._proxies)
        if address.version == 4:
            return address, str(address), is_proxy
        return address, str(ipaddress.ip_network((int(address) >> 64 << 64, 64))), is_proxy


def _hops(headers: Headers) -> Iterator[str]:
    """The addresses that proxies tell of, the nearest first.

    A proxy writes one of the two headers and passes on the other, which may be the client's own:
    where both are there and differ, neither counts.
    """
    told = {
        name: [hop for value in values for hop in _listed(name, value)]
        for name in (FORWARDED, FORWARDED_FOR)
        if (values := [value for key, value in headers if key == name])
    }
    lists = list(told.values())
    if not lists or (len(lists) == 2 and lists[0] != lists[1]):
        return
    yield from lists[0][: -MAX_HOPS - 1 : -1]


def _listed(name: bytes, value: bytes) -> Iterator[str]:
    for element in value.decode("latin-1").split(","):
        if name == FORWARDED:
            pairs = (pair.partition("=") for pair in element.split(";"))
            found = [text for key, _, text in pairs if key.strip().lower() == "for"]
            yield _without_port(found[0].strip().strip('"')) if found else ""
        else:
            yield _without_port(element.strip())


def _without_port(text: str) -> str:
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
