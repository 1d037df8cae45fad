"""Every error that kvlane raises on purpose: of the user, of the world outside, of a library.

Our own mistakes are `assert`s: the worker dies, the controller makes a new one.
"""

import logging
from typing import Literal

log = logging.getLogger("kvlane.errors")


class KvlaneError(Exception):
    """Root of the tree; `code` is the stable word for metrics and for error bodies."""

    code = "internal_error"


class UserError(KvlaneError, ValueError):
    """The user's mistake, a 4xx. `param` is the path of the field that is wrong, if any."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(UserError):
    """A valid wish that this build, model or backend cannot meet; the message says which."""

    code = "unsupported"


class MissingLibrary(UserError):
    """A Python package or a system library is missing; the message says how to install it."""

    code = "missing_library"


class WorldError(KvlaneError):
    """Something outside this process failed. The one request ends or moves; the loop lives."""

    code = "world_error"


class Busy(WorldError):
    """No room at present; worth another try in `retry_after_s` seconds."""

    code = "busy"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(WorldError):
    """A request outlived its own time limit."""

    code = "timeout"


class OutOfPages(WorldError):
    """The KV pool cannot give the pages asked for."""

    code = "out_of_pages"


class PeerLost(WorldError):
    """Another process stopped answering or died."""

    code = "worker_lost"


class TransferError(WorldError):
    """KV could not be moved."""

    code = "transfer_failed"


class TransferTimeout(TransferError):
    """Bytes did not arrive in time."""

    code = "transfer_timeout"


class Unreachable(TransferError):
    """A peer cannot be dialled."""

    code = "unreachable"


class Incompatible(TransferError):
    """A peer answers, but its KV layout or its transport differs from ours."""

    code = "incompatible"


class Revoked(TransferError):
    """The lease under which bytes were read has ended, so the bytes prove nothing."""

    code = "revoked"


class Placement(WorldError):
    """Ray cannot place what was asked for; the message says what is missing."""

    code = "placement"


class LibraryError(KvlaneError):
    """A library raised what nobody expected of it, over what one request brought.

    Its cause is for the log: it may tell what no client should know.
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
