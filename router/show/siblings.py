"""The routers that listen on the same port of the same node, and the metrics of all of them.

Whoever asks the port reaches one of them, and never knows which. So that one asks the others, at
the ports of their own, and answers with one page.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge

from router.dispatch.members import Members
from router.observe import vllm
from router.observe.exposition import EOF, rendered
from worker.api import Member

TIMEOUT_S = 1.0  # for another router's page
STALE_S = 15.0  # so long the last page of a busy one stands for it: sums must not fall meanwhile
TELL_S = 1.0  # for what one is told
MAX_TOLD = 16  # requests at one router at a time, beside those for pages
HELP = "# HELP "


class Siblings:
    """What one router, `member`, knows of them; its address is that of the shared port.

    said: headers, for a path, by which they know one another.
    """

    def __init__(
        self, members: Members, member: Member, said: Callable[[str], Mapping[str, str]]
    ) -> None:
        self._members, self._member, self._said = members, member, said
        # Nothing here speaks TLS, and to verify would load all certificates of the machine.
        self._client = httpx.AsyncClient(
            timeout=max(TIMEOUT_S, TELL_S), trust_env=False, verify=False, limits=httpx.Limits()
        )
        self._slots: dict[str, asyncio.Semaphore] = {}  # by address
        self._last: dict[tuple[str, str], tuple[str, float]] = {}  # (address, form) -> page, when
        self._registry = CollectorRegistry()
        self._count = Gauge(
            "kvlane_routers",
            "Routers of this port, by whether they answered this scrape",
            ("model", "role", "state"),
            registry=self._registry,
        )

    @property
    def name(self) -> str:
        """Of this router."""
        return self._member.name

    @property
    def incarnation(self) -> str:
        """Of this router."""
        return self._member.incarnation

    def routers(self) -> list[Member]:
        """All other routers of the cluster."""
        routers = (known.member for known in self._members.all() if known.member.role == "router")
        return [router for router in routers if router.name != self.name]

    def shares(self, port: int) -> bool:
        """Whether it is the shared port, and not the one that this router has of its own."""
        return self._member.address.endswith(f":{port}")

    async def page(self, own: bytes, form: str = CONTENT_TYPE_LATEST) -> bytes:
        """The metrics of all of them, `own` first, and how many answered, in the form of `own`."""
        mine, port = self._member, attrgetter("node", "address")
        others = [k.member for k in self._members.all() if k.member.name != mine.name]
        addresses = [other.metrics_address for other in others if port(other) == port(mine)]
        now = time.monotonic()
        pages_now = await self._ask_all(addresses, "/metrics", form)
        for address, page in zip(addresses, pages_now, strict=True):
            if page is not None:
                self._last[address, form] = page, now
        self._last = {key: last for key, last in self._last.items() if key[0] in addresses}
        lasts = [last for (_, written), last in self._last.items() if written == form]
        pages = [page for page, at in lasts if now - at < STALE_S]
        silent = pages_now.count(None)
        for state, number in (("answered", 1 + len(addresses) - silent), ("silent", silent)):
            self._count.labels(mine.model, mine.role, state).set(number)
        counted = rendered(self._registry, form)  # last: it ends as a page of its form has to
        return merged([own.decode(), *pages]).encode() + counted

    async def ask_routers(self, path: str) -> dict[str, str | None]:
        """What every other router of the cluster answers at its own port; None: not in time."""
        addresses = {member.name: member.metrics_address for member in self.routers()}
        answers = await self._ask_all(addresses.values(), path)
        return dict(zip(addresses, answers, strict=True))

    async def tell(self, router: Member, path: str, content: bytes = b"") -> httpx.Response | None:
        """What one answers to a POST at its own port; None: nothing in time.

        Few ask it at a time: one that stands still holds nobody up who asks another.
        """
        address = router.metrics_address
        slots = self._slots.setdefault(address, asyncio.Semaphore(MAX_TOLD))
        try:
            async with asyncio.timeout(TELL_S), slots:
                url = f"http://{address}{path}"
                return await self._client.post(url, content=content, headers=self._said(path))
        except (httpx.HTTPError, TimeoutError):
            return None

    async def close(self) -> None:
        """End the connections to them."""
        await self._client.aclose()

    async def _ask_all(
        self, addresses: Iterable[str], path: str, accepted: str = ""
    ) -> list[str | None]:
        async def ask(address: str) -> str | None:
            url, headers = f"http://{address}{path}", {"accept": accepted, **self._said(path)}
            try:
                async with asyncio.timeout(TIMEOUT_S):  # httpx's own is that of a part
                    response = await self._client.get(url, headers=headers)
                return response.raise_for_status().text
            except (httpx.HTTPError, TimeoutError):
                return None

        return await asyncio.gather(*map(ask, addresses))


def merged(pages: Iterable[str]) -> str:
    """One exposition from several, without OpenMetrics' end mark: more may follow.

    The format wants all samples of a family in one place.
    """
    families: dict[str, list[str]] = {}
    for page in pages:
        for family in page.removesuffix(EOF).split(HELP)[1:]:
            about, kind, samples = family.split("\n", 2)
            families.setdefault(f"{HELP}{about}\n{kind}\n", []).append(samples)
    return "".join(head + vllm.merged_samples(head, samples) for head, samples in families.items())
