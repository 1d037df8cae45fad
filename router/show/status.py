"""The routes for probes, Prometheus and operators."""

from importlib import metadata

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from router.dispatch.members import NONE_EXPECTED, WORKERS, Known
from router.observe.exposition import form_of
from router.show.front import Front

RDMA_NOTE = "RDMA is configured but has not been run on hardware yet"
SIMULATED_NOTE = "ACCEPTANCE IS SIMULATED (spec.simulate_accept_*): answers are junk"

OF_MEMBER = (
    "name", "role", "incarnation", "address", "node", "transport", "layout_hash", "digest",
)  # fmt: skip
WHERE = ("address", "node")


class StatusRoutes:
    """Endpoints for probes, Prometheus and operators. guarded: operators' need a key."""

    def __init__(self, front: Front, *, guarded: bool) -> None:
        self._front = front
        # Where nobody needs a key, nobody learns where the processes are.
        self._shown = [name for name in OF_MEMBER if guarded or name not in WHERE]
        self._served = front.served

    async def health(self, request: Request) -> Response:
        """GET /health: some decode worker answers, so this server generates; it may be draining."""
        if not self._served.members.live("decode"):
            reason = self._why_none()
            return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """GET /live: this router's loop turns, as it answers; and which workers make progress.

        200 even if none does: the controller replaces them, and to restart a router helps nobody.
        """
        workers = {
            known.member.name: "live" if known.live else "not live"
            for known in self._by_name()
            if known.member.role in WORKERS
        }
        return JSONResponse({"status": "live", "workers": workers})

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests can be served now."""
        decodes = self._served.members.live("decode")
        if self._front.draining:
            reason = "draining"
        elif all(known.stats.draining for known in decodes):
            reason = "every decode worker is draining" if decodes else self._why_none()
        else:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: of all routers of this port; on a router's own port, those of that one."""
        form = form_of(request.headers.get("accept", ""))  # exemplars are in OpenMetrics' only
        page, siblings = self._front.metrics.render(form), self._front.siblings
        if siblings.shares(request.scope["server"][1]):
            page = await siblings.page(page, form)
        return Response(page, media_type=form)

    async def targets(self, request: Request) -> Response:
        """GET /metrics/targets: every member's /metrics, for Prometheus' service discovery."""
        members = [known.member for known in self._by_name()]
        targets = [
            {"targets": [m.metrics_address],
             "labels": {"worker": m.name, "role": m.role, "node": m.node}}
            for m in members if m.metrics_address
        ]  # fmt: skip
        return JSONResponse(targets)

    async def version(self, request: Request) -> Response:
        """GET /version: in vLLM's form."""
        return JSONResponse({"version": version()})

    async def load(self, request: Request) -> Response:
        """GET /load: in vLLM's form; the generation requests that this router has open."""
        return JSONResponse({"server_load": self._front.num_open})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: in vLLM's form; workers have done it before the next request"""
        self._front.dispatcher.forget_prefixes()
        return Response()

    async def config(self, request: Request) -> Response:
        """GET /config: the resolved configuration, the members, and notes on this build."""
        members = [
            {name: getattr(known.member, name) for name in self._shown}
            | {"live": known.live, "num_requests": known.num_requests}
            for known in self._by_name()
        ]
        notes = [RDMA_NOTE]
        if self._served.simulated_accept_len:
            notes.append(SIMULATED_NOTE)
        body = {
            "config": dict(self._front.shown),
            "default_sampling_params": self._served.defaults.model_dump(),
            **self._served.speech.shown(),
            "members": members,
            "version": version(),
            "notes": notes,
        }
        return JSONResponse(body)

    def _why_none(self) -> str:
        """Why no decode worker is there."""
        if not self._served.members.expects_decode:
            return NONE_EXPECTED
        starting = self._served.members.starting()
        starts = [f"{start.name} is {start.text}" for start in starting if start.role == "decode"]
        return ", ".join(starts) or "no decode worker answers"

    def _by_name(self) -> list[Known]:
        """All members, in the same order at every router."""
        return sorted(self._served.members.all(), key=lambda known: known.member.name)


def version() -> str:
    """The installed version; the package also runs from a checkout."""
    try:
        return metadata.version("kvlane")
    except metadata.PackageNotFoundError:
        return "source"
