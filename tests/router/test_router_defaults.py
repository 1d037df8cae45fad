"""generation_config.json: what applies where a request says nothing, and where that is said."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from router.openai.defaults import Defaults, defaults_of
from tests.fault.router_doubles import HANG_S, KEEP, DecodeDouble, Serve, make_model
from worker.api import Sampling
from worker.errors import UserError

QWEN = {
    "bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "min_p": 0.1, "repetition_penalty": 1.05, "transformers_version": "4.51.0",
}  # fmt: skip
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OWN = {name: QWEN[name] for name in PLAIN}


def drawn(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in PLAIN}


def asked(double: DecodeDouble, url: str, **body: Any) -> dict[str, Any]:
    """The sampling of a request, which is the same at both endpoints."""
    found = []
    for path, prompt in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = httpx.post(f"{url}/v1/{path}", json=prompt | body, timeout=HANG_S)
        assert response.status_code == 200, response.text
        found.append(drawn(double.take()[1].sampling))
    assert found[0] == found[1]
    return found[0]


def model_with(directory: Path, generation: Any) -> Path:
    make_model(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_what_a_request_leaves_open_is_as_the_model_wants(serve: Serve, tmp_path: Path) -> None:
    double, url, _ = serve(DecodeDouble(script=KEEP), directory=model_with(tmp_path, QWEN))
    assert asked(double, url) == asked(double, url, temperature=None, top_k=None) == OWN
    assert asked(double, url, temperature=0) == OWN | {"temperature": 0}
    neutral = asked(double, url, **PLAIN)
    assert neutral == asked(double, url, **(PLAIN | {"top_k": -1})) == PLAIN
    assert asked(double, url, top_p=0.5, min_p=0) == OWN | {"top_p": 0.5, "min_p": 0}
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    one = httpx.get(f"{url}/v1/models/small").json()
    config = httpx.get(f"{url}/config").json()
    assert card["default_sampling_params"] == one["default_sampling_params"] == OWN
    assert config["default_sampling_params"] == OWN


def test_the_file_can_be_ignored(serve: Serve, tmp_path: Path) -> None:
    model, double = model_with(tmp_path, QWEN), DecodeDouble(script=KEEP)
    _, url, _ = serve(double, generation_config="ignore", directory=model)
    assert asked(double, url) == PLAIN
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert card["default_sampling_params"] == PLAIN
    with pytest.raises(ValueError, match="generation_config"):
        RouterConfig.model_validate({"generation_config": "somewhere"})


@pytest.mark.parametrize(
    ("generation", "changed"),
    [
        (None, {}),
        ({}, {}),
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"do_sample": True}, {}),
        ({"temperature": 0.6, "top_k": None}, {"temperature": 0.6}),
        ({"max_new_tokens": 5, "eos_token_id": [1, 2]}, {}),
    ],
    ids=str,
)
def test_values_of_the_file(tmp_path: Path, generation: Any, changed: dict[str, Any]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert defaults_of(tmp_path) == Defaults(**(PLAIN | changed))


@pytest.mark.parametrize(
    "text", ['{"top_p": 2}', '{"temperature": "hot"}', "[]", "{", '{"top_k": 1.5}']
)
def test_a_file_that_no_request_could_follow_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json: .* = ignore") as caught:
        defaults_of(tmp_path)
    assert caught.value.param == "router.generation_config"
