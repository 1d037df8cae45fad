"""The router: one thread with its asyncio loop, its HTTP socket and its wire."""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import uvicorn

from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.members import Members
from router.dispatch.policy import Fleet, policy
from router.http import garbage
from router.http.access import SIBLING, origins
from router.http.admission import Admission
from router.http.allowance import Keys
from router.http.connection import LimitedProtocol
from router.http.orders import Operator
from router.http.port import listen
from router.http.routes import application
from router.http.server import Server
from router.http.tls import certificate
from router.http.turn import new_loop
from router.observe.board import Change, Start
from router.observe.metrics import RouterMetrics
from router.openai.defaults import Defaults, defaults_of
from router.openai.served import Served
from router.show.front import Front
from router.show.siblings import Siblings
from router.text.speech import speech_of
from router.text.tokenizer import Text
from worker.api import Member, Role
from worker.config import ModelConfig, PingConfig
from worker.errors import UserError, WorldError
from worker.observe.metrics import watch_wire
from worker.wire import Event, Wire, keyring

if TYPE_CHECKING:
    from worker.observe.spans import Tracer

log = logging.getLogger("kvlane.router")

BEAT_S = 1.0
# Of the interpreter. With a worker's 0.1 ms a fifth of a request's CPU is changes of threads.
SWITCH_INTERVAL_S = 4e-4
DRAIN_TIMEOUT_S = 5.0  # for the loop to get to it
ANSWER_TIMEOUT_S = 30.0  # of a loop that turns
LAST_REQUEST_S = 1.0  # for whoever has just connected to a router that leaves its port
HEADERS = [("x-content-type-options", "nosniff")]  # of every answer
TLS_HEADERS = [("strict-transport-security", "max-age=31536000")]


class _Arrivals:
    """Events on their way from the wire's thread to the loop.

    Frames that come while the loop is busy are taken together, so a stream gets them as one chunk.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._is_due = True  # a `_take` is to come

    def begin(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Hand them to `deliver` from now on, also those that have waited for it. Loop only."""
        self._deliver = deliver
        self._take()

    def put(self, events: Sequence[Event]) -> None:
        """Called in the wire's thread."""
        self._events.extend(events)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_due = False  # before the events are taken: what comes from now on posts again
        self._deliver([self._events.popleft() for _ in range(len(self._events))])


@dataclass(frozen=True, slots=True)
class Settings:
    """The sections of the configuration that a router follows."""

    router: RouterConfig
    model: ModelConfig  # whose tokenizer, template and limits apply
    ping: PingConfig  # how the wire pings
    shown: Mapping[str, object] = field(default_factory=dict[str, object])  # for GET /config
    authentication: Literal["curve", "none"] = "curve"  # of its wire
    operator: Operator | None = None  # carries out orders


@dataclass(frozen=True, slots=True)
class Place:
    """Which router this is, and where it listens."""

    name: str  # stays the same when the router is started again
    incarnation: str  # new with every start
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    node: str = ""  # this node's address for other nodes; used where `host` is any address
    shared: bool = False  # other routers may join the port; then this one also has one of its own

    def reachable_at(self, port: int) -> str:
        """host:port, as other nodes reach it."""
        any_host = self.host in ("0.0.0.0", "::")
        host = (self.node or socket.gethostname()) if any_host else self.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def listeners(self, port: int, *, joins: bool, tls: bool) -> list[socket.socket]:
        """The port's socket, and one of the router's own port if that is shared or speaks TLS.

        Raises a UserError if the address cannot be bound.
        """
        try:
            first = listen(self.host, port, shared=self.shared, joins=joins)
            return [first, listen(self.host, 0)] if self.shared or tls else [first]
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            message = f"cannot listen on {self.host}:{port}: {reason}"
            raise UserError(message, "cluster.port") from error


class RouterServer:
    """Serves HTTP in a thread of its own until it is stopped. Methods are for any thread.

    `tracer` makes the spans of requests and is closed at the end; None: nothing is traced. Raises a
    UserError if the model directory or the file of API keys is unfit, or no policy has the name.
    """

    def __init__(self, settings: Settings, place: Place, *, tracer: "Tracer | None" = None) -> None:
        self._settings = settings
        self._place = place
        self._tracer = tracer
        self._members = Members()
        self._keyring = keyring(settings.authentication)
        self._collector = garbage.Collector()
        config, model = settings.router, settings.model
        self._policy = policy(config.policy)
        self._certificate = certificate(config.tls_cert_file, config.tls_key_file)
        self._keys = Keys(config.api_key_file) if config.api_key_file else None
        text = Text(model.directory, config.tokenizer_cache_mib << 20, config.tokenizer_backend)
        follows = config.generation_config == "auto"
        self._served = Served(
            model=model.name,
            text=text,
            config=config,
            members=self._members,
            model_max_len=_max_model_len(model, text),
            defaults=defaults_of(model.directory) if follows else Defaults(),
            speech=speech_of(text, config),
        )
        # The last that the controller has sent, also from before the start.
        self.listed: tuple[Member, ...] = ()
        self._told: tuple[Sequence[Change], Sequence[Start], Sequence[Role] | None] = ((), (), None)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        # Set by the router's thread, which alone may change what they hold.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.front: Front | None = None
        self.server: Server | None = None

    def start(self, port: int | None = None, *, joins: bool = False) -> Member:
        """Listen, start the thread, and return this router as a member once it accepts requests.

        `port` is used in place of the one it was made with; `joins`: other routers of this cluster
        listen there, else nobody may. Raises a UserError if the address cannot be bound.
        """
        place = self._place
        tls = self._certificate is not None
        listeners = place.listeners(place.port if port is None else port, joins=joins, tls=tls)
        addresses = [place.reachable_at(listener.getsockname()[1]) for listener in listeners]
        member = Member(
            name=place.name,
            role="router",
            incarnation=place.incarnation,
            address=f"{'https' if tls else 'http'}://{addresses[0]}",
            metrics_address=addresses[-1],
            model=self._served.model,
            node=socket.gethostname(),
            pid=os.getpid(),
            wire_key="" if self._keyring is None else self._keyring.key,
        )
        self._thread = threading.Thread(
            target=self._run, args=(listeners, member), name="kvlane-router", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return member

    def update_members(
        self, members: Sequence[Member], changes: Sequence[Change] = (),
        starting: Sequence[Start] = (), roles: Sequence[Role] | None = None,
    ) -> None:  # fmt: skip
        """Take the controller's whole list; for the dashboard what has happened, and who starts.

        roles: as of `Members.note_changes`.
        """
        self.listed, self._told = tuple(members), (changes, starting, roles)
        self._post(self._apply_members)

    def drain(self, *, others: bool = False) -> None:
        """Take no new work: running requests finish, and new ones are answered with 503.

        `others` go on listening on the same port: then this router instead accepts the connections
        that wait, closes its listener, and serves its clients until they connect to another router.
        """
        if self.loop is not None:
            begun = asyncio.run_coroutine_threadsafe(self._begin_drain(others), self.loop)
            begun.result(DRAIN_TIMEOUT_S)

    def num_inflight(self) -> int:
        """HTTP generation requests that have not ended; raises a WorldError if the loop hangs."""
        turned = threading.Event()
        self._post(turned.set)
        if self.loop is not None and not turned.wait(ANSWER_TIMEOUT_S):
            raise WorldError(f"its loop has hung for {ANSWER_TIMEOUT_S:g} s")
        return self.front.num_open if self.front is not None else 0

    def stop(self) -> None:
        """End open streams with an error event, close everything, and wait for the thread."""
        self._post(self._begin_stop)
        if self._thread is not None:
            self._thread.join()
        if self._tracer is not None:
            self._tracer.close()

    def _post(self, action: Callable[[], None]) -> None:
        if (loop := self.loop) is None:
            return
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:
            log.debug("the router has stopped")

    # Everything below runs in the router's thread.

    def _run(self, listeners: list[socket.socket], member: Member) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._main(listeners, member))
        except BaseException as error:  # raised by `start`
            self._failure = error
            if self._ready.is_set():
                raise
        finally:
            self._ready.set()

    async def _main(self, listeners: list[socket.socket], member: Member) -> None:
        loop = asyncio.get_running_loop()
        arrivals = _Arrivals(loop)
        place, settings = self._place, self._settings
        me = f"{place.name}/{place.incarnation}"
        wire = Wire(me, settings.ping, arrivals.put, keyring=self._keyring)
        wire.start()
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # start() has set a worker's
        garbage.postpone()
        try:
            config = settings.router
            metrics = RouterMetrics(self._served.model, place.name, vllm=config.vllm_metrics)
            metrics.watch_encoder(self._served.text.encoder)
            watch_wire(metrics.wire_refused, wire.refusals)
            dispatcher = Dispatcher(config, Fleet(wire, self._members, self._policy), metrics)
            arrivals.begin(dispatcher.deliver)
            siblings = Siblings(self._members, member, self._said)
            self.front = Front(
                served=self._served,
                dispatcher=dispatcher,
                metrics=metrics,
                siblings=siblings,
                shown=settings.shown,
                cors_origins=origins(config, place.host),
                tracer=self._tracer,
            )
            self.loop = loop
            self._apply_members()
            self._beat(loop, wire)
            self.front.period.keep(loop)
            await self._serve(listeners)
            await siblings.close()
        finally:
            self.loop = None
            wire.close()
            garbage.as_usual()

    async def _serve(self, listeners: list[socket.socket]) -> None:
        assert self.front is not None
        limits = self._settings.router
        admission = Admission(self.front, self._keys)
        config = uvicorn.Config(
            application(self.front, admission, self._settings.operator),
            http=cast("Any", partial(LimitedProtocol, limits, admission.refuses)),
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing here looks at the client's address
            log_level=logging.WARNING,  # start and end are logged by the monitor
            server_header=False,
            headers=HEADERS + TLS_HEADERS * (self._certificate is not None),
            lifespan="off",
            ws="none",
            timeout_keep_alive=max(1, round(limits.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(limits.stop_timeout_s)),
        )
        self.server = Server(config, self._ready, self._certificate and self._certificate.context)
        await self.server.serve(sockets=listeners)

    def _said(self, path: str) -> dict[str, str]:
        return {} if self._keys is None else {SIBLING: self._keys.sibling_word(path)}

    def _beat(self, loop: asyncio.AbstractEventLoop, wire: Wire) -> None:
        wire.beat()
        if self.front is not None:
            self._collector.look(self.front.num_open)
        if self._certificate is not None:
            self._certificate.look()
        loop.call_later(BEAT_S, self._beat, loop, wire)

    def _apply_members(self) -> None:
        assert self.front is not None
        for death in self._members.note_changes(*self._told):
            self.front.metrics.deaths(death.role).inc()
        self.front.dispatcher.update_members(self.listed)
        if self._keys is not None:
            self._keys.num_routers = sum(member.role == "router" for member in self.listed)

    async def _begin_drain(self, others: bool) -> None:
        front, server = self.front, self.server
        assert front is not None
        assert server is not None
        if not others:
            front.draining = True
            return
        front.num_open += 1  # or it would be idle, and whoever has just connected be cut off
        asyncio.get_running_loop().call_later(LAST_REQUEST_S, front.closed)
        await server.leave()

    def _begin_stop(self) -> None:
        assert self.front is not None
        assert self.server is not None
        self.front.draining = True
        self.front.dispatcher.close()
        self._ending = asyncio.ensure_future(_end(self.front, self.server))


async def _end(front: Front, server: Server) -> None:
    """End the server when others have what it keeps."""
    try:
        if front.hand_over is not None:
            await front.hand_over()
    finally:
        server.should_exit = True


def _max_model_len(model: ModelConfig, text: Text) -> int:
    if model.max_model_len == "auto":
        return text.model_max_len
    if model.max_model_len > text.model_max_len:
        raise UserError(f"the model has {text.model_max_len} positions", "model.max_model_len")
    return model.max_model_len
