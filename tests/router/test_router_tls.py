"""The API over TLS, and a certificate that changes while requests run."""

import datetime
import os
import ssl
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from router.http.app import BEAT_S, RouterServer
from router.http.tls import certificate
from tests.fault.router_doubles import DecodeDouble, routed, speak, wait_until
from tests.support.patience import HANG_S
from worker.errors import UserError

SCRIPT = speak([5, 6])


def make(folder: Path, name: str) -> tuple[str, str]:
    """Files of a self-signed certificate of this name and of its key; newer than those before."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    files = folder / "cert.pem", folder / "key.pem"
    for file, data in zip(
        files, (made.public_bytes(serialization.Encoding.PEM), private), strict=True
    ):
        written(file, data)
    return str(files[0]), str(files[1])


def written(file: Path, data: bytes) -> None:
    """With another time than before."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_bytes(data)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def secure(
    directory: Path, double: DecodeDouble, files: tuple[str, str], **more: Any
) -> AbstractContextManager[tuple[RouterServer, str]]:
    """A router of a shared port that speaks TLS."""
    tls = {"tls_cert_file": files[0], "tls_key_file": files[1]}
    return routed(directory, [double.member], shared=True, **tls, **more)


def name_of(url: str) -> str:
    """Of the certificate that a new connection gets."""
    host, port = url.removeprefix("https://").split(":")
    pem = ssl.get_server_certificate((host, int(port)), timeout=HANG_S)
    found = x509.load_pem_x509_certificate(pem.encode())
    return str(found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_the_api_speaks_tls_and_the_own_port_http(
    directory: Path, double: DecodeDouble, tmp_path: Path
) -> None:
    files = make(tmp_path, "one")
    with secure(directory, double, files) as (router, url):
        local = url.replace("127.0.0.1", "localhost")
        with (
            httpx.Client(verify=ssl.create_default_context(cafile=files[0])) as http,
            openai.OpenAI(base_url=f"{local}/v1", api_key="x", http_client=http) as client,  # type: ignore
        ):
            assert client.completions.create(model="small", prompt="a").choices[0].finish_reason
            stream = client.completions.create(model="small", prompt="a", stream=True)
            assert [part.choices[0].finish_reason for part in stream][-1] == "stop"
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"))
        with pytest.raises(httpx.ConnectError):
            httpx.get(local)  # nobody has signed it
        own = router.listed[0].metrics_address
        assert "kvlane_requests_total" in httpx.get(f"http://{own}/metrics").text


def test_a_certificate_changes_and_no_request_fails(
    directory: Path, double: DecodeDouble, tmp_path: Path
) -> None:
    files = make(tmp_path, "one")
    with (
        secure(directory, double, files) as (_, url),
        httpx.Client(verify=False, timeout=HANG_S) as http,
    ):

        def ask() -> None:
            body = {"model": "small", "prompt": "a"}
            for client in (http, httpx):  # on its connection, and on a new one
                more = {} if client is http else {"verify": False}
                answer = client.post(f"{url}/v1/completions", json=body, timeout=HANG_S, **more)  # type: ignore
                assert answer.status_code == 200

        ask()
        assert name_of(url) == "one"
        make(tmp_path, "two")
        wait_until(lambda: name_of(url) == "two", act=ask)
        unfit, seen = time.monotonic(), 0
        written(tmp_path / "key.pem", b"no key")
        while time.monotonic() < unfit + 2 * BEAT_S or not seen:
            ask()
            assert name_of(url) == "two"
            seen += 1


def test_a_router_that_leaves_its_port_serves_who_waits_there_by_tls(
    directory: Path, double: DecodeDouble, tmp_path: Path
) -> None:
    files = make(tmp_path, "one")
    with secure(directory, double, files) as (first, url):
        port = int(url.rpartition(":")[2])
        with (
            secure(directory, double, files, port=port, joins=True),
            httpx.Client(verify=False, timeout=HANG_S) as http,
        ):
            body = {"model": "small", "prompt": "a"}
            assert http.post(f"{url}/v1/completions", json=body).status_code == 200
            first.drain(others=True)
            for _ in range(20):
                answer = httpx.post(f"{url}/v1/completions", json=body, verify=False)
                assert answer.status_code == 200


@pytest.mark.parametrize("wrong", ["no key", "no file", "another's key"])
def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    cert, key = make(tmp_path, "one")
    if wrong == "another's key":
        kept = Path(cert).read_bytes()
        make(tmp_path, "two")
        Path(cert).write_bytes(kept)
    files = {"no key": (cert, ""), "no file": (cert, f"{key}.gone"), "another's key": (cert, key)}
    with pytest.raises(UserError) as caught:
        certificate(*files[wrong])
    assert caught.value.param == "router.tls_cert_file"
    assert certificate("", "") is None
