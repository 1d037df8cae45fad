"""The body of a request, with limits of size and time."""

import asyncio
import re

from fastapi import Request

from router.errors import ApiError
from router.http.arrivals import Arrival

SEPARATORS = b",[{"  # about one a value
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


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
    if len(raw) <= most or sum(raw.count(sign) for sign in SEPARATORS) <= most:
        return
    num = end = 0
    for text in TEXT.finditer(raw):  # what stands in texts does not count
        num += sum(raw.count(sign, end, text.start()) for sign in SEPARATORS)
        end = text.end()
        if num > most:
            break
    if num + sum(raw.count(sign, end) for sign in SEPARATORS) > most:
        message = f"the body has more than {most} values (router.max_body_bytes / 128)"
        raise ApiError("body_too_large", message)
