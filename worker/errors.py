"""Every error that kvlane raises on purpose: of the user, of the world outside, of a library.

Our own mistakes are `assert`s: the worker dies, the controller makes a new one.
"""

import logging
from typing import Literal

log = logging.getLogger("kvlane.errors")


class KvlaneError(Exception):
    """Root of the tree; `code` is the stable word for metrics and for error bodies."""

    code = "internal_error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.code = code or cls.code


class UserError(KvlaneError, ValueError, code="invalid_value"):
    """The user's mistake, a 4xx. `param` is the path of the field that is wrong, if any."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(UserError, code="unsupported"):
    """A valid wish that this build, model or backend cannot meet; the message says which."""


class MissingLibrary(UserError, code="missing_library"):
    """A Python package or a system library is missing; the message says how to install it."""


class WorldError(KvlaneError, code="world_error"):
    """Something outside this process failed. The one request ends or moves; the loop lives."""


class Busy(WorldError, code="busy"):
    """No room at present; worth another try in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(WorldError, code="timeout"):
    """A request outlived its own time limit."""


class OutOfPages(WorldError, code="out_of_pages"):
    """The KV pool cannot give the pages asked for."""


class PeerLost(WorldError, code="worker_lost"):
    """Another process stopped answering or died."""


class TransferError(WorldError, code="transfer_failed"):
    """KV could not be moved."""


class TransferTimeout(TransferError, code="transfer_timeout"):
    """Bytes did not arrive in time."""


class Unreachable(TransferError, code="unreachable"):
    """A peer cannot be dialled."""


class Incompatible(TransferError, code="incompatible"):
    """A peer answers, but its KV layout or its transport differs from ours."""


class Revoked(TransferError, code="revoked"):
    """The lease under which bytes were read has ended, so the bytes prove nothing."""


class NoPlacement(WorldError, code="placement"):
    """Ray cannot place what was asked for; the message says what is missing."""


class LibraryError(KvlaneError):
    """A library raised an unexpected error over one request's content.

    Its cause is for the log: it may hold secrets from clients.
    """

    _is_told = False

    def log(self, req_id: str) -> None:
        """Write it down, the first time with its cause; `req_id`: of the request that ends."""
        cause = None if self._is_told else self.__cause__
        self._is_told = True
        log.error("req_id=%s: %s; the request ends", req_id, self, exc_info=cause)


class contained:
    """Make whatever `library` raises a LibraryError, which ends one request and nothing else.

    Errors of ours pass. A panic of a library in Rust is no `Exception`, but is caught as well.
    A class, as every chunk of a stream passes it: a generator would take three times as long.
    """

    __slots__ = ("_library",)

    def __init__(self, library: str) -> None:
        self._library = library

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        if error is None or isinstance(error, KvlaneError | KeyboardInterrupt | SystemExit):
            return False
        raise LibraryError(f"{self._library} failed: {type(error).__name__}") from error
