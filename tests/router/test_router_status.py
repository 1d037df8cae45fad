"""What the router says about itself: models, readiness, configuration, metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import openai
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from router.text.tokenizer import Text
from tests.fault.router_doubles import DecodeDouble, Script, Served, make_model, serving, speak

ROUTER = {"max_body_bytes": 20_000}


def script_of(text: Text) -> Script:
    return speak([70, 71])


def test_models(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    with client:
        (model,) = client.models.list().data
        Model.model_validate(model.model_dump())
        assert model.id == client.models.retrieve("small").id == "small"
        assert "simulated_accept_len" not in model.model_dump()


def test_simulated_acceptance_is_told_wherever_the_model_is(tmp_path: Path) -> None:
    double = DecodeDouble()
    double.member = msgspec.structs.replace(double.member, simulated_accept_len=2.5)
    with serving(make_model(tmp_path), double) as (_, url):
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
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": ""}).status_code == 400
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
    outcomes = {s.labels["outcome"]: s.value for s in families["kvlane_requests"].samples}
    assert outcomes["stop"] >= 1
    assert outcomes["invalid_value"] >= 1
    alive = {s.labels["worker_role"]: s.value for s in families["kvlane_workers_alive"].samples}
    assert alive == {"decode": 1, "prefill": 0}
    assert families["kvlane_generation_tokens"].samples[0].value > 0
    assert families["kvlane_time_to_first_token_seconds"].type == "histogram"
