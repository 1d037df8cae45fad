"""`chat`, `top` and `bench` find a server in one way: where it runs, its key, its certificate."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.clients import commands
from cluster.clients.find import DEFAULT_URL, found, key_of, trusted
from tests.fault.router_doubles import DecodeDouble, make_model, routed, speak
from tests.router.test_router_tls import make
from worker.errors import UserError

# Whoever runs the harness as a program, where another test has imported it.
pytestmark = pytest.mark.filterwarnings("ignore:'benchmarks.load.__main__' found:RuntimeWarning")

COMMANDS = {
    "chat": ["hello", "--max-tokens", "1"],
    "top": [],
    "bench": [
        "--num",
        "1",
        "--concurrency",
        "1",
        "--warmup",
        "0",
        "--processes",
        "1",
        "--quiet",
        "--extra",
        '{"max_tokens": 8}',
    ],
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL and certificate of a router that speaks TLS."""
    folder = tmp_path_factory.mktemp("secure")
    certificate, key = make(folder, "one")
    model = make_model(tmp_path_factory.mktemp("model"))
    double = DecodeDouble(script=speak([70]))
    tls = {"tls_cert_file": certificate, "tls_key_file": key}
    with routed(model, [double.member], shared=True, **tls) as (_, url):
        yield url.replace("127.0.0.1", "localhost"), certificate


@pytest.mark.parametrize("command", COMMANDS)
def test_a_certificate_is_trusted_by_a_flag_and_else_the_remedy_is_told(
    command: str, secure: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, certificate = secure
    given = [command, "--url", url, *COMMANDS[command]]
    assert main(given) == 1
    told = capsys.readouterr().err
    assert "CERTIFICATE_VERIFY_FAILED" in told
    assert "--cacert FILE" in told
    assert "SSL_CERT_FILE" in told
    assert main([*given, "--cacert", certificate]) == 0, capsys.readouterr()


def test_a_file_without_certificates_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("none\n")
    for name, why in (("none.pem", "--cacert"), ("missing.pem", "No such file")):
        with pytest.raises(UserError, match=why):
            trusted(str(tmp_path / name))
    assert trusted("") is None


def test_a_url_is_what_is_given_or_runs_here_or_the_usual_one() -> None:
    assert found("http://a", lambda: ["http://b"]) == "http://a"
    assert found("", lambda: ["http://b", "http://c"]) == "http://b"
    assert found("", list) == DEFAULT_URL


def test_bench_asks_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(commands.runpy, "run_module", lambda *_, **__: asked.append(sys.argv[1:]))
    for words in ([], ["--url", "http://a"], ["--url=http://a"], ["report", "x.json"], ["--help"]):
        commands.bench(words, lambda: ["http://b"])
    assert asked == [
        ["--url", "http://b"], ["--url", "http://a"], ["--url=http://a"], ["report", "x.json"],
        ["--help"],
    ]  # fmt: skip


def test_the_first_key_is_sent_without_what_is_said_of_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one name=alice\ntwo name=ops admin=yes\n")
    assert key_of(str(tmp_path / "keys")) == "two"
    assert key_of("") == ""
