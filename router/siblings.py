"""The routers that listen on the same port of the same node, and the metrics of all of them.

Whoever asks the port reaches one of them, and never knows which. So that one asks the others, at
the port that each has of its own, and answers with one page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httpx
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from router import vllm
from router.members import Members
from worker.api import Member

TIMEOUT_S = 1.0  # for another router's page; then the answer goes without it
HELP = "# HELP "


class Siblings:
    """What one router knows of them.

    Args:
        members: the controller's list.
        member: this router; its address is that of the shared port.
    """

    def __init__(self, members: Members, member: Member) -> None:
        self._members = members
        self._member = member
        # Nothing here speaks TLS, and to verify would load all certificates of the machine.
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False)
        self._registry = CollectorRegistry()
        self._count = Gauge(
            "kvlane_routers",
            "Routers of this port, by whether they answered this scrape",
            ("model", "role", "state"),
            registry=self._registry,
        )

    def shares(self, port: int) -> bool:
        """Whether it is the shared port, and not the one that this router has of its own."""
        return self._member.address.endswith(f":{port}")

    async def page(self, own: bytes) -> bytes:
        """The metrics of all of them, and how many answered.

        Args:
            own: this router's.
        """
        mine = self._member
        others = [
            each.metrics_address
            for each in (known.member for known in self._members.all())
            if (each.node, each.address) == (mine.node, mine.address) and each.name != mine.name
        ]
        found = await asyncio.gather(*map(self._asked, others))
        pages = [page for page in found if page is not None]
        silent = len(others) - len(pages)
        for state, number in (("answered", 1 + len(pages)), ("silent", silent)):
            self._count.labels(mine.model, mine.role, state).set(number)
        return merged([own.decode(), *pages]).encode() + generate_latest(self._registry)

    async def close(self) -> None:
        """End the connections to them."""
        await self._client.aclose()

    async def _asked(self, address: str) -> str | None:
        """Another one's metrics, if it answers in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):  # httpx's own is that of each part
                response = await self._client.get(f"http://{address}/metrics")
            return response.raise_for_status().text
        except (httpx.HTTPError, TimeoutError):
            return None


def merged(pages: Iterable[str]) -> str:
    """One exposition from several: the format wants all samples of a family in one place."""
    families: dict[str, list[str]] = {}
    for page in pages:
        for family in page.split(HELP)[1:]:
            about, kind, samples = family.split("\n", 2)
            families.setdefault(f"{HELP}{about}\n{kind}\n", []).append(samples)
    return "".join(head + vllm.joined(head, samples) for head, samples in families.items())
