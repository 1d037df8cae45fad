"""Endpoints beside generation: tokens, API keys, models, probes, configuration, metrics."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http.api import is_slow
from router.http.keys import read_keys
from router.text.tokenizer import Text
from tests.fault.router_doubles import DecodeDouble, Serve, speak
from worker.errors import UserError

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


def test_slow_work_is_seen_in_the_body_however_it_is_written() -> None:
    assert not is_slow(b'{"prompt": "hello"}')
    assert is_slow(b'{"prompt": "%s"}' % (b"a" * 20_000))
    assert is_slow(b'{"prompt": "a", "guided_json": "{}"}')
    assert is_slow(b'{"prompt": "a", "guid\\u0065d_json": "{}"}')


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


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    assert read_keys("") == ()
    (tmp_path / "empty").write_text("\n \n")
    for name in ("empty", "missing"):
        with pytest.raises(UserError) as caught:
            read_keys(str(tmp_path / name))
        assert caught.value.param == "router.api_key_file"
