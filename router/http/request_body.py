"""The body of a request, with limits of size and time."""

import asyncio

from fastapi import Request

from router.errors import ApiError


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Raises an ApiError where it is encoded, too large, or does not arrive in time."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding {encoding[:40]}: send the body as it is"
        raise ApiError("unsupported", message).answered(415)
    error = ApiError("body_too_large", f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise error
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise ApiError("request_timeout", message) from None
    return bytes(body)
