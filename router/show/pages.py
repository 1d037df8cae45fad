"""`/`, `/docs`, `/dashboard`: pages for people, and what they show. Most are files in `static/`.

Where there are keys, a browser asks for one (`router.admin_access`).
"""

import time
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from msgspec.structs import replace
from starlette.staticfiles import StaticFiles

from router.dispatch.members import WORKERS, Known
from router.errors import NO_FAULT
from router.observe import board
from router.observe.board import Board, Change, Part, RouterRow, WorkerRow
from router.show.front import Front, as_json
from router.show.period import HOUR_STEP_S, STEP_S
from router.show.status import version

STATIC = Path(__file__).parents[1] / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask again, by the ETag: an upgrade changes files, not names
}
UNSTORED = {"cache-control": "no-store"}
LINKS = ("docs", "openapi.json", "v1/models", "ready", "dashboard")


class _Files(StaticFiles):
    """The files, with our headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


class Pages:
    """The routes below `/dashboard`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._index = Template((STATIC / "index.html").read_text())
        self._files = _Files(directory=STATIC)

    async def index(self, request: Request) -> Response:
        """GET /: what this is, as a page for browsers and as JSON for everyone else."""
        model = self._front.served.model
        if "text/html" not in request.headers.get("accept", ""):
            links = {name: f"/{name}" for name in LINKS}
            return JSONResponse({"name": "kvlane", "version": version(), "model": model} | links)
        needs_key = self._front.served.config.api_key_file
        key = "\n  -H 'Authorization: Bearer KEY' \\" if needs_key else ""
        words = {"model": model, "version": version(), "url": str(request.base_url), "key": key}
        shown = {name: escape(text, quote=False) for name, text in words.items()}
        return HTMLResponse(self._index.substitute(shown), headers=HEADERS)

    async def page(self, request: Request) -> Response:
        """GET a page of ours, whose file has the name of its path."""
        path: bytes = request.scope["raw_path"].partition(b"?")[0]
        if path.endswith(b"/"):  # links in the page are relative to a path without
            return RedirectResponse("../" + path.decode("ascii", "replace").split("/")[-2])
        name = request.scope["path"].rpartition("/")[2]
        return await self._files.get_response(f"{name}.html", request.scope)

    async def data(self, request: Request) -> Response:
        """GET /dashboard/data: the whole cluster."""
        parts = dict[str, Part | None]()
        for name, text in (await self._front.siblings.ask_routers("/dashboard/own")).items():
            parts[name] = None
            with suppress(msgspec.MsgspecError):  # of a version that says other things
                parts[name] = None if text is None else msgspec.json.decode(text, type=Part)
        return as_json(self._board(parts), **UNSTORED)

    async def own(self, request: Request) -> Response:
        """GET /dashboard/own: this router's part."""
        return as_json(self._own(), **UNSTORED)

    async def file(self, request: Request) -> Response:
        """GET /dashboard/static/{name}, and for all /docs/static/{name}."""
        return await self._files.get_response(request.path_params["name"], request.scope)

    def _own(self) -> Part:
        front = self._front
        return front.period.part(front.siblings.name, draining=front.draining)

    def _board(self, other_parts: dict[str, Part | None]) -> Board:
        """Put together what the routers say, this one first; None: it did not answer."""
        front, own = self._front, self._own()
        parts = [own, *(part for part in other_parts.values() if part is not None)]
        changes = front.served.members.changes()
        routers, workers = self._rows({own.name: own, **other_parts}, changes)
        expected = front.served.members.expects_decode
        state, summary = board.verdict(workers, routers, expected=expected)
        outcomes = board.counted(part.outcomes for part in parts)
        errors = {code: num for code, num in outcomes.items() if code not in NO_FAULT}
        if errors == outcomes != {} and state != "bad":
            state, summary = "bad", f"Every request fails: {', '.join(errors)}"
        spreads = board.spreads(parts)
        return Board(
            state=state,
            summary=summary,
            model=front.served.model,
            version=version(),
            told_by=own.name,
            window_s=round(max(part.window_s for part in parts), 1),
            step_s=STEP_S,
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts),
            outcomes=outcomes,
            errors=errors,
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            prefills=board.counted(part.prefills for part in parts),
            pulled_bytes=sum(part.pulled_bytes for part in parts),
            pull_s=spreads["kv_pull"].seconds,
            rates=board.rates(parts),
            latencies=board.latencies(spreads),
            history=board.history([part.history for part in parts]),
            hour=board.history([part.hour for part in parts]),
            hour_step_s=HOUR_STEP_S,
            routers=routers,
            workers=workers,
            changes=changes,
            sessions=max(part.sessions for part in parts),
            turns=board.counted(part.turns for part in parts),
        )

    def _rows(
        self, parts: dict[str, Part | None], changes: list[Change]
    ) -> tuple[list[RouterRow], list[WorkerRow]]:
        """Every router and worker, and those that were lost and have no successor yet."""
        listed = {known.member.name: known for known in self._front.served.members.all()}
        routers = [
            _router(name, listed[name].member.node if name in listed else "", part)
            for name, part in parts.items()
        ]
        workers = [_worker(known) for known in listed.values() if known.member.role in WORKERS]
        seen = {*listed, *parts}
        for start in self._front.served.members.starting():
            if start.name not in seen and start.role in WORKERS:
                row = WorkerRow(start.name, start.role, "starting", "", start.incarnation)
                workers.append(replace(row, progress=start.text, part=start.part))
                seen.add(start.name)
        for c in changes:  # the last first
            if c.name not in seen and c.state == "lost":
                if c.role == "router":
                    routers.append(RouterRow(c.name, "lost", reason=c.text))
                else:
                    lost = WorkerRow(c.name, c.role, "lost", "", c.incarnation, reason=c.text)
                    workers.append(lost)
            seen.add(c.name)
        return sorted(routers, key=_role_and_number), sorted(workers, key=_role_and_number)


def _router(name: str, node: str, part: Part | None) -> RouterRow:
    if part is None:
        return RouterRow(name, "silent", node)
    state = "draining" if part.draining else "ready"
    return RouterRow(name, state, node, part.running, part.waiting)


def _worker(known: Known) -> WorkerRow:
    member, stats = known.member, known.stats
    if known.live:
        state = "draining" if stats.draining else "ready"
    else:
        state = "silent" if known.heard_at else "starting"
    return WorkerRow(
        name=member.name,
        role=member.role,
        state=state,
        node=member.node,
        incarnation=member.incarnation,
        pid=member.pid,
        transport=member.transport,
        heard_s=round(time.monotonic() - known.heard_at, 1) if known.heard_at else None,
        running=stats.num_running,
        waiting=stats.num_waiting,
        max_running=stats.max_num_reqs,
        free_pages=stats.num_free_pages,
        pages=stats.num_pages,
        page_size=stats.page_size,
        max_len=member.max_model_len,
        queued_tokens=stats.num_queued_tokens,
        ranks=max(1, len(member.endpoints)),
        drafter=member.drafter,
        tokens_per_row=round(stats.tokens_per_row, 2),
        card=stats.card,
    )


def _role_and_number(row: RouterRow | WorkerRow) -> tuple[str, int, str]:
    return row.name.rpartition("-")[0], len(row.name), row.name
