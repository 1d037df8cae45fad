"""The router: one thread with its asyncio loop, its HTTP socket and its wire."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import uvicorn

from router.config import RouterConfig
from router.connection import limited
from router.defaults import Defaults, defaults_of
from router.dispatch import Dispatcher
from router.keys import read_keys
from router.members import Members
from router.metrics import RouterMetrics
from router.origins import origins
from router.policy import policy
from router.routes import application
from router.status import Front
from router.text import Text
from worker.api import Member
from worker.config import ModelConfig, PingConfig
from worker.errors import UserError
from worker.wire import Event, Wire

log = logging.getLogger("kvlane.router")

BEAT_S = 1.0
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Sets `ready` when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


class _Arrivals:
    """Events on their way from the wire's thread to the loop.

    Frames that come while the loop is busy are taken together, so that what a stream got of several
    steps leaves in one chunk.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Event]], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._events: deque[Event] = deque()
        self._is_due = False  # a `_take` is to come

    def put(self, events: Sequence[Event]) -> None:
        """For the wire's thread."""
        self._events.extend(events)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_due = False  # before the events are taken: what comes from now on posts again
        self._deliver([self._events.popleft() for _ in range(len(self._events))])


class RouterServer:
    """One router: serves HTTP in a thread of its own until it is stopped.

    All methods may be called from any thread; what they change is changed on the router's loop.

    Args:
        config: the router's section.
        model: the model whose tokenizer, template and limits apply.
        ping: how the wire pings.
        name: stays the same when the router is started again.
        incarnation: new with every start.
        host: to listen on.
        port: to listen on, alone; 0 takes a free one.
        shown: the resolved configuration, for GET /config.

    Raises:
        UserError: the model directory or the file of API keys is unfit, or no policy has the name.
    """

    def __init__(
        self,
        config: RouterConfig,
        model: ModelConfig,
        ping: PingConfig,
        *,
        name: str,
        incarnation: str,
        host: str,
        port: int,
        shown: Mapping[str, object],
    ) -> None:
        self._config = config
        self._model = model
        self._ping = ping
        self._name = name
        self._incarnation = incarnation
        self._host = host
        self._port = port
        self._shown = shown
        self._policy = policy(config.policy)
        self._text = Text(model.directory)
        follows = config.generation_config == "auto"
        self._defaults = defaults_of(model.directory) if follows else Defaults()
        if self._defaults.repetition_penalty != 1:
            log.warning(
                "generation_config.json asks for repetition_penalty %g, so each request takes one "
                "of decode.engine.penalty_rows; more than that wait "
                "(router.generation_config=ignore serves without it)",
                self._defaults.repetition_penalty,
            )
        self._api_keys = read_keys(config.api_key_file)
        self._max_model_len = _max_model_len(model, self._text)
        self._members: tuple[Member, ...] = ()  # the last list, also from before the start
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        # Set by the router's thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._front: Front | None = None
        self._server: uvicorn.Server | None = None

    def start(self) -> Member:
        """Listen, start the thread, and return once requests are accepted.

        Returns:
            This router as a member; its address is that of its HTTP socket.

        Raises:
            UserError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:  # without SO_REUSEPORT: the kernel would divide requests between two owners of a port
            listener = socket.create_server(
                (self._host, self._port), family=family, backlog=BACKLOG
            )
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            message = f"cannot listen on {self._host}:{self._port}: {reason}"
            raise UserError(message, "cluster.port") from error
        self._port = listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="kvlane-router", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        reachable = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        reachable = f"[{reachable}]" if ":" in reachable else reachable
        return Member(
            name=self._name,
            role="router",
            incarnation=self._incarnation,
            address=f"http://{reachable}:{self._port}",
            metrics_address=f"{reachable}:{self._port}",
            model=self._model.name,
            node=socket.gethostname(),
            pid=os.getpid(),
        )

    def update_members(self, members: Sequence[Member]) -> None:
        """The controller's whole list; a worker that is no longer on it is lost at once."""
        self._members = tuple(members)
        self._post(self._apply_members)

    def drain(self) -> None:
        """Answer new requests with 503; running ones finish."""
        self._post(self._begin_drain)

    def num_inflight(self) -> int:
        """HTTP generation requests that have not ended."""
        return self._front.num_open if self._front is not None else 0

    def stop(self) -> None:
        """End open streams with an error event, close everything, and wait for the thread."""
        self._post(self._begin_stop)
        if self._thread is not None:
            self._thread.join()

    def _post(self, action: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:
            log.debug("the router has stopped")

    # Everything below runs in the router's thread.

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._main(listener))
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                raise
        finally:
            self._ready.set()

    async def _main(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        arrivals = _Arrivals(loop, self._deliver)
        wire = Wire(f"{self._name}/{self._incarnation}", self._ping, arrivals.put)
        wire.start()
        try:
            members, metrics = Members(), RouterMetrics(self._model.name)
            self._front = Front(
                config=self._config,
                text=self._text,
                model=self._model.name,
                model_max_len=self._max_model_len,
                dispatcher=Dispatcher(self._config, wire, members, self._policy, metrics),
                members=members,
                metrics=metrics,
                shown=self._shown,
                defaults=self._defaults,
                cors_origins=origins(self._config, self._host),
                api_keys=self._api_keys,
            )
            self._loop = loop
            self._apply_members()
            self._beat(loop, wire)
            await self._serve(listener)
        finally:
            self._loop = None
            wire.close()

    async def _serve(self, listener: socket.socket) -> None:
        assert self._front is not None
        config = uvicorn.Config(
            application(self._front),
            http=limited(self._config),
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing here looks at the client's address
            log_level=logging.WARNING,  # start and end are logged by the monitor
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=max(1, round(self._config.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(self._config.stop_timeout_s)),
        )
        self._server = _Server(config, self._ready)
        await self._server.serve(sockets=[listener])

    def _deliver(self, events: Sequence[Event]) -> None:
        assert self._front is not None
        self._front.dispatcher.deliver(events)

    def _beat(self, loop: asyncio.AbstractEventLoop, wire: Wire) -> None:
        wire.beat()
        loop.call_later(BEAT_S, self._beat, loop, wire)

    def _apply_members(self) -> None:
        assert self._front is not None
        self._front.dispatcher.update_members(self._members)

    def _begin_drain(self) -> None:
        assert self._front is not None
        self._front.draining = True

    def _begin_stop(self) -> None:
        assert self._front is not None
        assert self._server is not None
        self._front.draining = True
        self._front.dispatcher.close()
        self._server.should_exit = True


def _max_model_len(model: ModelConfig, text: Text) -> int:
    if model.max_model_len == "auto":
        return text.model_max_len
    if model.max_model_len > text.model_max_len:
        raise UserError(f"the model has {text.model_max_len} positions", "model.max_model_len")
    return model.max_model_len
