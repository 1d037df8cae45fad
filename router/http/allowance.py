"""What API keys may do: whose a key is, and how much of its limits is left.

The file is read again when it has changed. Each router counts for itself, and allows its part of a
limit.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.errors import ApiError
from router.http.keys import Key, changed_at, read_keys
from worker.errors import UserError

log = logging.getLogger("kvlane.router")

REREAD_S = 1.0  # between two looks at the file
MINUTE_S = 60.0
TOLD_S = 60.0  # between two lines about a key that is at a limit, or an address without one
WORD_S = 300.0  # for which a sibling's word holds: nodes' clocks differ
BEARER, BASIC = b"bearer ", b"basic "
MAX_DIGITS = 20  # of when it was said


@dataclass(slots=True)
class _Balance:
    """What is left of a limit; it grows with time, up to a minute's worth."""

    left: float = math.inf  # below 0: an answer's length is known at its end

    def grow(self, per_minute: float, took_s: float) -> None:
        grown = self.left + per_minute * took_s / MINUTE_S
        self.left = min(max(1.0, per_minute), grown) if per_minute else math.inf


@dataclass(slots=True)
class _Use:
    """What a key has used."""

    noted_at: float
    requests: _Balance = field(default_factory=_Balance)
    tokens: _Balance = field(default_factory=_Balance)
    num_open: int = 0
    told_at: float = -math.inf  # when the log said that it is at a limit


@dataclass(slots=True)
class Keys:
    """The keys of a file, and what they have used. Loop thread only."""

    path: str
    num_routers: int = 1  # of the cluster; the router sets it
    keys: tuple[Key, ...] = field(init=False)
    _changed_at: int = field(init=False)  # of the file
    _looked_at: float = 0.0
    _uses: dict[str, _Use] = field(default_factory=dict[str, _Use])  # by name

    def __post_init__(self) -> None:
        """Read the file; raises as `read_keys`."""
        self._changed_at = changed_at(self.path)
        self.keys = read_keys(self.path)

    def key_of(self, headers: Mapping[bytes, bytes]) -> Key:
        """The key that a request brings; raises an ApiError, 401, if there is none that is valid.

        It comes as a bearer token, as `x-api-key` (Anthropic's clients), or, so that browsers can
        ask for it, as the password of Basic authentication.
        """
        self._look(time.monotonic())
        token = _token(headers).strip()
        # Every key is compared, so that the time taken does not tell which one was close.
        same = [hmac.compare_digest(token, key.secret) for key in self.keys]
        if not any(same):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError("invalid_api_key", message)
        key = self.keys[same.index(True)]
        if time.time() >= key.expires_at:
            raise ApiError("invalid_api_key", "this API key has expired")
        return key

    def admits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request brings a valid key."""
        try:
            self.key_of(headers)
        except ApiError:
            return False
        return True

    def opens_pages(self, key: Key) -> bool:
        """Whether operators' pages are for its owner."""
        return key.admin or not any(other.admin for other in self.keys)

    def sibling_word(self, path: str) -> str:
        """What a router says to another, which has the same file, to get an operators' page."""
        return self._word(path, int(time.time()))

    def is_sibling_word(self, word: str, path: str) -> bool:
        """Whether a router has said it, within the last minutes."""
        said_at, _, _ = word.partition(".")
        if not (said_at.isdecimal() and len(said_at) <= MAX_DIGITS):  # int() raises for thousands
            return False
        if abs(time.time() - int(said_at)) > WORD_S:
            return False
        return hmac.compare_digest(word.encode(), self._word(path, int(said_at)).encode())

    def _word(self, path: str, at: int) -> str:
        secret = hashlib.blake2b(b"\n".join(sorted(key.secret for key in self.keys))).digest()
        return f"{at}.{hmac.new(secret, f'{at} {path}'.encode(), hashlib.sha256).hexdigest()}"

    def enter(self, name: str) -> None:
        """The head of a request is here; raises an ApiError, 429, if a limit leaves no room."""
        self._check(name, more=1)
        self.opens(name, 1)

    def opens(self, name: str, change: int) -> None:
        """So many more of its requests are there, from the head to the answer's end."""
        if (use := self._uses.get(name)) is not None:
            use.num_open += change

    def _check(self, name: str, more: int = 0) -> None:
        """Raise an ApiError, 429, if a limit of the key leaves no room for so many more."""
        key = next((key for key in self.keys if key.name == name), None)
        if key is None:
            return  # it has left the file meanwhile
        now, part = time.monotonic(), 1 / max(1, self.num_routers)
        use = self._uses.setdefault(name, _Use(now))
        took_s, use.noted_at = now - use.noted_at, now
        limit, wait_s = "", 1.0
        if key.concurrency and use.num_open + more > max(1, round(key.concurrency * part)):
            limit = f"{key.concurrency} requests at a time"
        for balance, per_minute, least, unit in (
            (use.requests, key.requests_per_minute, 1.0, "requests"),
            (use.tokens, key.tokens_per_minute, 0.0, "tokens"),
        ):
            balance.grow(per_minute * part, took_s)  # both: the next call counts from now
            if balance.left < least and not limit:
                limit = f"{per_minute} {unit} a minute"
                wait_s = (least - balance.left) * MINUTE_S / (per_minute * part)
        if limit:
            if now - use.told_at >= TOLD_S:
                use.told_at = now
                log.info("refused API key %s: it is limited to %s", name, limit)
            message = f"this API key is limited to {limit}"
            raise ApiError("rate_limit_exceeded", message, retry_after_s=max(1.0, wait_s))

    def begin(self, name: str, num_tokens: int) -> None:
        """A request that has entered, with so long a prompt, starts; raises as `enter`."""
        self._check(name)
        if (use := self._uses.get(name)) is not None:
            use.requests.left -= 1
            use.tokens.left -= num_tokens

    def end(self, name: str, num_tokens: int) -> None:
        """A request that has started has ended, with so many tokens of output."""
        if (use := self._uses.get(name)) is not None:
            use.tokens.left -= num_tokens

    def _look(self, now: float) -> None:
        """Read the file again if it has changed; one that is unfit changes nothing."""
        if now - self._looked_at < REREAD_S:
            return
        self._looked_at, stamp = now, changed_at(self.path)
        if stamp == self._changed_at:
            return
        self._changed_at = stamp
        try:
            self.keys = read_keys(self.path)
            log.info("%s: %d API keys from now on", self.path, len(self.keys))
        except UserError as error:
            log.error("the API keys stay as they are: %s", error)


def _token(headers: Mapping[bytes, bytes]) -> bytes:
    given = headers.get(b"authorization", b"")
    if given[: len(BEARER)].lower() == BEARER:
        return given[len(BEARER) :]
    if given[: len(BASIC)].lower() == BASIC:
        try:
            return base64.b64decode(given[len(BASIC) :], validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")
