"""Endpoints beside generation: tokens, API keys, models, probes, configuration, metrics."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli import main
from router.http.api import is_slow
from router.http.keys import read_keys
from router.text.tokenizer import Text
from tests.fault.router_doubles import DecodeDouble, Serve, Served, make_model, speak, wait_until
from worker.errors import UserError

ROUTER = {"max_body_bytes": 20_000}
SCRIPT = speak([5])


def test_tokenize_and_detokenize_are_inverse(url: str, text: Text) -> None:
    body: dict[str, Any] = {"model": "small", "prompt": "hello 😀 <|im_end|>"}
    found = httpx.post(f"{url}/tokenize", json=body | {"return_token_strs": True}).json()
    assert found["tokens"] == list(text.encode(body["prompt"], add_special_tokens=True))
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    back = httpx.post(f"{url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": body["prompt"]}
    assert httpx.post(f"{url}/tokenize", json=body).json()["token_strs"] is None
    assert httpx.post(f"{url}/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_messages_are_tokenized_as_a_chat_is(url: str, text: Text) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
    assert found == list(text.encode(text.render(messages), add_special_tokens=False))
    body = {"messages": messages, "add_generation_prompt": False}
    assert len(httpx.post(f"{url}/tokenize", json=body).json()["tokens"]) < len(found)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": 3}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
    ids=str,
)
def test_wrong_values_name_the_field(
    url: str, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = httpx.post(f"{url}/{path}", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].split(".")[0] == param


@pytest.mark.parametrize(
    "path",
    ["embeddings", "audio/speech", "audio/transcriptions", "images/generations", "conversations"],
)
def test_what_is_not_served_says_so(url: str, path: str) -> None:
    response = httpx.post(f"{url}/v1/{path}", json={"model": "small", "input": "a"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported")
    assert f"/v1/{path}" in error["message"]


def test_other_methods_are_405_and_say_which_are_served(url: str) -> None:
    response = httpx.get(f"{url}/v1/chat/completions")  # test_router_door asks what has GET
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_slow_work_is_seen_in_the_body_however_it_is_written() -> None:
    assert not is_slow(b'{"prompt": "hello"}')
    assert is_slow(b'{"prompt": "%s"}' % (b"a" * 20_000))
    assert is_slow(b'{"prompt": "a", "guided_json": "{}"}')
    assert is_slow(b'{"prompt": "a", "guid\\u0065d_json": "{}"}')


def test_what_others_servers_have_at_the_root(url: str, double: DecodeDouble) -> None:
    told = httpx.get(f"{url}/").json()["version"]
    assert httpx.get(f"{url}/version").json() == {"version": told}
    for method in ("GET", "POST", "HEAD"):
        assert httpx.request(method, f"{url}/ping").status_code == 200

    def load() -> int:
        return httpx.get(f"{url}/load").json()["server_load"]

    double.script = None
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a", "max_tokens": 1}
        answers = [pool.submit(httpx.post, f"{url}/v1/completions", json=body) for _ in range(2)]
        taken = [double.take() for _ in answers]
        assert load() == 2
        for peer, generate in taken:
            speak([5])(double, peer, generate)
        assert {answer.result().status_code for answer in answers} == {200}
    wait_until(lambda: load() == 0)


def test_api_keys(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n\n  sécond  \n", encoding="utf-8")
    _, url, _ = serve(DecodeDouble(script=speak([5])), api_key_file=str(path))
    for open_path in ("/live", "/health", "/ready", "/docs", "/"):
        assert httpx.get(f"{url}{open_path}").status_code == 200
    for header in (None, "first", "Basic first", "Bearer wrong", "Bearer", "Bearer firs"):
        headers = {} if header is None else {"authorization": header}
        for guarded in ("/v1/models", "/tokenize", "/detokenize/", "/v1/nothing//"):
            response = httpx.get(f"{url}{guarded}", headers=headers)
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "x-request-id" in response.headers
            assert response.headers["www-authenticate"] == "Bearer"
    for key in (b"Bearer first", b"bearer s\xc3\xa9cond"):
        headers_ = {b"authorization": key}
        assert httpx.get(f"{url}/v1/models", headers=headers_).status_code == 200  # type: ignore[arg-type]
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    for key, status in (("no", 401), ("first", 200)):  # answered in the form of the path
        response = httpx.post(f"{url}/v1/messages", json=asked, headers={"x-api-key": key})
        assert response.status_code == status
        assert (response.json()["type"] == "error") == (status == 401)


def test_the_file_of_keys_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--api-key-file", "/etc/keys"]) == 0
    assert "  api_key_file: /etc/keys\n" in capsys.readouterr().out


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    assert read_keys("") == ()
    (tmp_path / "empty").write_text("\n \n")
    for name in ("empty", "missing"):
        with pytest.raises(UserError) as caught:
            read_keys(str(tmp_path / name))
        assert caught.value.param == "router.api_key_file"


def test_simulated_acceptance_is_told_wherever_the_model_is(serve: Serve, tmp_path: Path) -> None:
    double = DecodeDouble()
    double.member = msgspec.structs.replace(double.member, simulated_accept_len=2.5)
    _, url, _ = serve(double, directory=make_model(tmp_path))
    (row,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert row == httpx.get(f"{url}/v1/models/small").json()
    assert row["simulated_accept_len"] == 2.5
    assert "SIMULATED" in httpx.get(f"{url}/config").json()["notes"][-1]


def test_state_of_the_router(served: Served) -> None:
    double, url, _ = served
    for path, said in (
        ("health", {"status": "ok"}),
        ("ready", {"status": "ready"}),
        ("live", {"status": "live", "workers": {"decode-0": "live"}}),
    ):
        answer = httpx.get(f"{url}/{path}")
        assert (answer.status_code, answer.json()) == (200, said)
    config = httpx.get(f"{url}/config").json()
    assert config["config"]["router"]["max_body_bytes"] == 20_000
    (note,) = config["notes"]
    assert "RDMA" in note
    assert {member["role"] for member in config["members"]} == {"router", "decode"}
    targets = httpx.get(f"{url}/metrics/targets").json()
    assert [double.member.metrics_address] in [target["targets"] for target in targets]
    assert all(isinstance(value, str) for t in targets for value in t["labels"].values())


def test_metrics_parse_and_are_ours(url: str) -> None:
    page = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name, family in families.items():
        if name.startswith("vllm:"):
            continue
        assert name.startswith("kvlane_")
        assert family.documentation
        assert not name.endswith("_created"), "a twin of every counter"
        for sample in family.samples:
            assert (sample.labels["model"], sample.labels["role"]) == ("small", "router")
    alive = {s.labels["worker_role"]: s.value for s in families["kvlane_workers_alive"].samples}
    assert alive == {"decode": 1, "prefill": 0}
