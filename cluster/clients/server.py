"""A server that a command asks over HTTP."""

from collections.abc import Generator
from contextlib import contextmanager

import httpx

from worker.errors import WorldError


class Server(httpx.Client):
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
        super().__init__(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            follow_redirects=True,
            transport=transport,
        )

    @contextmanager
    def answering(self) -> Generator[None]:
        """For requests. Raises WorldError where there is no answer, or not all of it."""
        try:
            yield
        except httpx.HTTPError as error:
            raise WorldError(
                f"no answer from {self.url}: {error}; `kvlane serve` starts a server, --url names "
                "another"
            ) from error
