"""The bytes of answers that no route writes: those to a head alone."""

from collections.abc import Iterable

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

CLOSE = (b"connection", b"close")  # a header
Headers = Iterable[tuple[bytes, bytes]]


def lines(headers: Headers) -> bytes:
    """Headers as they stand in a head."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def rest_of(response: Response, more: Headers = ()) -> bytes:
    """What follows the headers that differ from one answer to the next: its own, and its body."""
    return b"%b%b\r\n%b" % (lines(more), lines(response.raw_headers), bytes(response.body))


def answer(status: int, headers: Headers, rest: bytes) -> bytes:
    """An answer with these headers before what `rest_of` has made."""
    return STATUS_LINE[status] + lines(headers) + rest
