"""How `chat`, `top` and `bench` find a server: its URL, a key for it, whose certificates count."""

import argparse
import ssl
from collections.abc import Callable

from worker.errors import UserError

DEFAULT_URL = "http://127.0.0.1:8000"
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # in OpenSSL's words
REMEDY = (
    "--cacert FILE names whose certificates to trust; so does SSL_CERT_FILE in the environment, "
    "for OpenAI's and most other clients, too"
)
Urls = Callable[[], list[str]]


def add_server(parser: argparse.ArgumentParser) -> None:
    """The flags that all three have."""
    parser.add_argument("--url", default="", help="default: of the serve of this machine")
    parser.add_argument("--api-key-file", default="", metavar="PATH", help="its first key is sent")
    parser.add_argument("--cacert", default="", metavar="FILE", help="certificates to trust, PEM")


def found(url: str, running: Urls) -> str:
    """A URL that was given, or of the first server that runs here, or the usual one."""
    return url or [*running(), DEFAULT_URL][0]


def key_of(path: str) -> str:
    """The first key of a file, rather one that opens operators' pages; "": there is no file.

    Raises UserError for a file that cannot be read, or a key that no request can carry.
    """
    from router.http.keys import read_keys

    known = sorted(read_keys(path), key=lambda key: not key.admin)
    try:
        return b"".join(key.secret for key in known[:1]).decode("ascii")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the first key is not ASCII") from error


def trusted(cacert: str) -> ssl.SSLContext | None:
    """For connections that trust the certificates of a file alone; None: as the machine does.

    Raises UserError for a file that has none.
    """
    if not cacert:
        return None
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:  # ssl.SSLError is one
        raise UserError(f"--cacert {cacert}: {error.strerror or error}") from error


def untrusted(error: BaseException) -> str:
    """What to do about an error, if it is that a certificate is not trusted; else ''."""
    return f"; {REMEDY}" if UNTRUSTED in str(error) else ""
