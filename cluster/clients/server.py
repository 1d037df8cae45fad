"""A server that a command asks over HTTP."""

from collections.abc import Generator
from contextlib import contextmanager

import httpx

from worker.errors import WorldError


class Server:
    """Whom to ask, and how.

    url: with or without /v1. key: bearer key; "": none. transport: of requests; None: the network.
    """

    def __init__(
        self,
        url: str,
        key: str,
        timeout: httpx.Timeout,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            follow_redirects=True,
            transport=transport,
        )

    @contextmanager
    def answering(self) -> Generator[httpx.Client]:
        """For requests. Raises WorldError where there is no answer, or not all of it."""
        try:
            yield self.client
        except httpx.HTTPError as error:
            raise WorldError(
                f"no answer from {self.url}: {error}; `kvlane serve` starts a server, --url names "
                "another"
            ) from error

    def close(self) -> None:
        """End the connections."""
        self.client.close()
