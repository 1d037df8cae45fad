"""HTTP/1.1 by hand: keep-alive connections that can be dropped at any byte."""

import asyncio
import json
from dataclasses import dataclass, field


@dataclass(slots=True)
class Connection:
    """One connection to a router, opened again when the last one is gone."""

    port: int
    source: str = ""  # the address that it comes from
    status: int = field(default=0, init=False)
    headers: dict[str, str] = field(default_factory=dict, init=False)
    _reader: asyncio.StreamReader | None = field(default=None, init=False)
    _writer: asyncio.StreamWriter | None = field(default=None, init=False)

    async def send(self, path: str, body: bytes, *, num_bytes: int | None = None) -> None:
        """A POST, or only the first `num_bytes` of what it is made of."""
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        await self.send_raw(whole[:num_bytes])

    async def send_raw(self, raw: bytes) -> None:
        """Bytes of whatever kind."""
        if self._writer is None:
            own = (self.source, 0) if self.source else None
            opened = await asyncio.open_connection("127.0.0.1", self.port, local_addr=own)
            self._reader, self._writer = opened
        self._writer.write(raw)
        await self._writer.drain()

    async def send_json(self, path: str, body: object) -> None:
        await self.send(path, json.dumps(body).encode())

    async def head(self) -> int:
        assert self._reader is not None
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.headers = {}
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        self.status = int(first.split()[1])
        return self.status

    async def piece(self) -> bytes:
        assert self._reader is not None
        if "content-length" in self.headers:
            length, self.headers["content-length"] = self.headers["content-length"], "0"
            piece = await self._reader.readexactly(int(length))
        else:
            length = (await self._reader.readuntil(b"\r\n")).decode()
            piece = (await self._reader.readexactly(int(length, 16) + 2))[:-2]
        if not piece and self.headers.get("connection") == "close":
            self.drop()
        return piece

    async def body(self) -> bytes:
        whole = bytearray()
        while piece := await self.piece():
            whole += piece
        return bytes(whole)

    def drop(self, *, reset: bool = False) -> None:
        """Close it now, with whatever is under way; `reset` tells the router so at once."""
        if self._writer is not None:
            self._writer.transport.abort() if reset else self._writer.close()
        self._reader = self._writer = None
