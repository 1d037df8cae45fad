"""uvicorn's server, which accepts few connections a turn and can leave its port."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import uvicorn

from router.http.port import BACKLOG, accept_all
from router.http.raw import CLOSE
from router.http.turn import MAX_TURN_EVENTS


class Server(uvicorn.Server):
    """Sets `ready` when it accepts connections."""

    def __init__(
        self, config: uvicorn.Config, ready: threading.Event, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._ready, self._tls = ready, tls
        self._listeners: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The first port speaks TLS, if there is a certificate; others never do."""
        self._listeners = sockets or []
        first, own = self._listeners[:1], self._listeners[1:]
        self.config.ssl = self._tls
        # As many connections are accepted in a turn of the loop: all may bring a request at once,
        # and who is here already waits for all of them. Further ones wait in the kernel.
        self.config.backlog = MAX_TURN_EVENTS
        await super().startup(first)
        for listener in first:
            listener.listen(BACKLOG)
        self.config.ssl = None
        loop = asyncio.get_running_loop()
        for listener in own:
            self.servers.append(await loop.create_server(self._protocol(), sock=listener))
        self._ready.set()

    async def leave(self) -> None:
        """Leave the first port. A connection that is open closes after its next answer."""
        config, state, listener = self.config, self.server_state, self._listeners[0]
        loop = asyncio.get_running_loop()
        if listener.fileno() < 0:  # it was left before
            return
        # A connection that the loop has accepted gets its transport in the loop's next turn. Until
        # then the server has to stay open.
        loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)
        state.default_headers = [*state.default_headers, CLOSE]
        config.encoded_headers.append(CLOSE)  # uvicorn remakes default_headers from it each second
        waiting = list(accept_all(listener))
        self.servers[0].close()
        for connection in waiting:
            await loop.connect_accepted_socket(self._protocol(), connection, ssl=self._tls)

    def _protocol(self) -> Callable[[], asyncio.Protocol]:
        config, state = self.config, self.server_state
        made = cast("Callable[..., asyncio.Protocol]", config.http_protocol_class)
        return partial(made, config=config, server_state=state, app_state=self.lifespan.state)
