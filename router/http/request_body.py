"""The body of a request, with limits of size and time."""

import asyncio
import re

from fastapi import Request

from router.errors import ApiError
from router.http.arrivals import Arrival

SEPARATORS = b",[{"  # about one a value
REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # of a text, to its last quote
STRETCH = 1 << 18  # bytes that are looked at before other threads may have their turn


async def read_body(
    request: Request, max_bytes: int, timeout_s: float, arrival: Arrival | None = None
) -> bytes:
    """Raises an ApiError where it is encoded, too large, too much beside others, or late."""
    headers = dict[bytes, bytes](request.scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        message = f"Content-Encoding {encoding[:40].decode('latin-1')}: send the body as it is"
        raise ApiError("unsupported", message).answered(415)
    error = ApiError("body_too_large", f"the body is larger than {max_bytes} bytes")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > max_bytes:
        raise error
    if arrival is not None and length.isdigit():
        arrival.expects(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise error
                if arrival is not None and part:
                    arrival.takes(len(part))
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise ApiError("request_timeout", message) from None
    return bytes(body)


def check_values(raw: bytes, most: int) -> None:
    """Raise an ApiError, 413, if JSON has more values: one takes 100 bytes, and 1 µs without
    a turn for other threads.
    """
    num, length = 0, len(raw) if len(raw) > most else 0
    for at in range(0, length, STRETCH):
        num += _separators(raw, at, at + STRETCH)
        if num > most:
            break
    if num > most and _outside_texts(raw, most) > most:
        message = f"the body has more than {most} values (router.max_body_bytes / 128)"
        raise ApiError("body_too_large", message)


def _separators(raw: bytes, start: int, end: int) -> int:
    return sum(raw.count(sign, start, end) for sign in SEPARATORS)


def _outside_texts(raw: bytes, most: int) -> int:
    """Separators that do not stand in texts; no more are counted than it takes to exceed `most`."""
    num, at, in_text = 0, 0, False
    while at < len(raw) and num <= most:
        end = at + STRETCH
        if in_text:
            rest = REST.match(raw, at, end)
            assert rest is not None
            in_text = raw[rest.end() : rest.end() + 1] != b'"'
            at = max(at + 1, rest.end() + (not in_text))  # JSON may end with half an escape
        else:
            quote = raw.find(b'"', at, end)
            stop = min(end, len(raw)) if quote < 0 else quote
            num += _separators(raw, at, stop)
            in_text = quote >= 0
            at = stop + in_text
    return num
