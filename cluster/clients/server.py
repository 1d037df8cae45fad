"""A server that a command asks over HTTP."""

import ssl
from collections.abc import Generator
from contextlib import contextmanager

import httpx

from cluster.clients.find import untrusted
from worker.errors import WorldError


class Server(httpx.Client):
    """Whom to ask, and how.

    url: with or without /v1. key: bearer key; "": none. transport: of requests; None: the network.
    verify: whose certificates count; True: those that this machine trusts, or SSL_CERT_FILE.
    """

    def __init__(
        self,
        url: str,
        key: str,
        timeout: httpx.Timeout,
        transport: httpx.BaseTransport | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        super().__init__(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            follow_redirects=True,
            transport=transport,
            verify=verify,
        )

    @contextmanager
    def answering(self) -> Generator[None]:
        """For requests. Raises WorldError where there is no answer, or not all of it."""
        try:
            yield
        except httpx.HTTPError as error:
            remedy = untrusted(error) or "; `kvlane serve` starts a server, --url names another"
            raise WorldError(f"no answer from {self.url}: {error}{remedy}") from error
