"""The certificate of the API's port, which may change while the router serves."""

import logging
import ssl
from pathlib import Path

from router.http.keys import changed_at
from worker.errors import UserError

log = logging.getLogger("kvlane.router")

PARAM = "router.tls_cert_file"


class Certificate:
    """A certificate and its key; connections that begin from now on get what `look` has found.

    Raises a UserError if a file cannot be read, or the two do not fit one another.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._files = [str(Path(name).expanduser()) for name in (cert_file, key_file)]
        self._stamps = list(map(changed_at, self._files))
        self.context = self._loaded()

    def look(self) -> None:
        """Take the files if they have changed; if they are unfit, the old ones stay."""
        stamps = list(map(changed_at, self._files))
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._loaded()  # first apart: what fails may leave a context half changed
            self.context.load_cert_chain(*self._files)
            log.info("%s: a new certificate from now on", self._files[0])
        except UserError as error:
            log.error("the certificate stays as it is: %s", error)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self._files)
        except OSError as error:  # also an SSLError
            what = " and ".join(self._files)
            raise UserError(f"{PARAM}: {what}: {error.strerror or error}", PARAM) from error
        return context


def certificate(cert_file: str, key_file: str) -> Certificate | None:
    """None where neither is named; raises as `Certificate`, or a UserError if one is missing."""
    if bool(cert_file) != bool(key_file):
        raise UserError(f"{PARAM} and router.tls_key_file need one another", PARAM)
    return Certificate(cert_file, key_file) if cert_file else None
