"""Simulated acceptance, from the client to the worker: the figures fit, and nothing hides it."""

import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.fault.router_doubles import routed
from tests.support.engines import running
from tests.support.laws import sections
from tests.support.patience import HANG_S
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.config import SpecConfig
from worker.draw.simulated import SimulatedAcceptance

ACCEPT_LEN, WIDTH, NUM_REQS, MAX_TOKENS = 2.5, 4, 6, 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What a router, a prefill worker, and a decode worker that pulls from it said and logged when
    they served NUM_REQS requests."""
    place, warnings = tmp_path_factory.mktemp("steps"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("kvlane.decode")
    logger.addHandler(handler)
    config = sections("always", num_pages=400, step_log=str(place))
    config["spec"] = {"widths": [WIDTH], "simulate_accept_len": ACCEPT_LEN}
    body: dict[str, Any] = {"prompt": problem_ids(NUM_REQS), "max_tokens": MAX_TOKENS}
    body |= {"ignore_eos": True, "return_trace": True}
    with running(config) as cluster, routed(shallow(), cluster.members) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S).json()
        assert answer["usage"]["completion_tokens"] == NUM_REQS * MAX_TOKENS
        metrics = {each.role: samples(each.metrics_address) for each in cluster.members}
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        notes = httpx.get(f"{url}/config").json()["notes"]
    logger.removeHandler(handler)
    traces = [choice["kvlane_trace"] for choice in answer["choices"]]
    return SimpleNamespace(traces=traces, metrics=metrics, model=model, notes=notes,
                           warnings=warnings, step_log=place / "decode-0.jsonl")  # fmt: skip


def samples(address: str) -> dict[str, float]:
    """All of kvlane_spec_* that a worker exports; those by position have it in their names."""
    text = httpx.get(f"http://{address}/metrics").text
    return {
        sample.name.removeprefix("kvlane_spec_") + sample.labels.get("position", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvlane_spec_") and "le" not in sample.labels
    }


def test_steps_yield_as_many_tokens_as_asked_for(served: SimpleNamespace) -> None:
    """A whole number of drafts below or above the mean, but where the request ends."""
    kept = []
    for trace in served.traces:
        assert {step["width"] for step in trace} == {WIDTH}
        assert sum(step["num_accepted"] + 1 for step in trace) == MAX_TOKENS - 1, "1 of a prefill"
        assert len(trace) < MAX_TOKENS - 1
        kept += [step["num_accepted"] for step in trace[:-1]]
    assert set(kept) == {int(ACCEPT_LEN) - 1, int(ACCEPT_LEN)}
    assert sum(kept) / len(kept) + 1 == pytest.approx(ACCEPT_LEN, abs=0.2)


def test_it_is_told_everywhere(served: SimpleNamespace) -> None:
    (warning,) = served.warnings
    assert "2.5 tokens a step" in warning
    assert "SIMULATED" in warning
    assert served.metrics["decode"]["simulated"] == 1
    assert served.metrics["prefill"]["simulated"] == 0
    assert served.model["simulated_accept_len"] == ACCEPT_LEN
    assert any("SIMULATED" in note for note in served.notes)


@pytest.mark.parametrize("share", [0.5, 0.859])
def test_a_share_of_drafts_keeps_more_of_wider_windows(share: float) -> None:
    simulated = SimulatedAcceptance(torch.zeros(1, dtype=torch.int64), share)
    position, seed = torch.arange(4096), torch.full((4096,), 9 << 35)
    drafts = simulated.num_accepted(position, seed)
    for width in (2, 4, 16):
        mean = 1 + drafts.clamp(max=width - 1).double().mean().item()
        wanted = (1 - share**width) / (1 - share)
        assert abs(mean - wanted) < 0.05 * wanted
        asked = SpecConfig(widths=[1, width], simulate_accept_share=share)
        assert asked.simulated_len == pytest.approx(wanted)
    assert not torch.equal(drafts, simulated.num_accepted(position, seed + 1))
