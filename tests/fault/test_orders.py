"""Orders over HTTP: a worker's role, there and back by the command, and a drain. Scaling."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.check import MAX_TOKENS, NUM
from tests.e2e.shared import Clusters
from tests.support.kills import Steady
from tests.support.patience import HANG_S


@pytest.mark.whole
def test_roles_change_and_workers_leave_by_orders(clusters: Clusters, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user\noperator admin=yes\n")
    serve = clusters.fresh("--prefill", "1", "--decode", "2", "--api-key-file", str(keys))
    before = serve.status()["decode-1"]

    def told(path: str, key: str = "operator", **order: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{serve.url}/admin/{path}", json=order, headers=headers, timeout=HANG_S)

    assert told("role", "user", name="decode-1", role="prefill").status_code == 403
    answer = told("role", name="decode-1", role="prefill", timeout_s=1)
    assert answer.status_code == 200, answer.text
    turned = serve.status()["decode-1"]
    assert (turned["role"], turned["pid"]) == ("prefill", before["pid"])
    refused = told("role", name="decode-0", role="prefill")
    assert refused.status_code == 400, refused.text
    done = serve.command("role", "decode-1", "decode", "--timeout", "1")
    assert done.returncode == 0, done.stderr
    assert serve.status()["decode-1"]["role"] == "decode"
    assert told("drain", name="nobody").status_code == 400
    assert told("drain", name="decode-1", timeout_s=1).json() == {
        "name": "decode-1", "finished": True,
    }  # fmt: skip
    assert "decode-1" not in serve.status()


@pytest.mark.whole
def test_scaling_up_and_down_under_load_and_from_drained_to_serving_fails_nothing(
    clusters: Clusters,
) -> None:
    serve = clusters.fresh("--router", "2", "--prefill", "1", "--decode", "1")

    def told(*words: str) -> str:
        done = serve.command(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def under_load() -> None:
        load = Steady(num_problems=NUM, max_tokens=MAX_TOKENS, num_at_once=4)
        running = asyncio.create_task(load.run(serve.url))
        try:
            for words, said in (
                (["decode=3"], "decode=3: decode-1, decode-2 started\n"),
                (["decode=1", "prefill=2"],
                 "decode=1: decode-1, decode-2 drained\nprefill=2: prefill-1 started\n"),
                (["prefill=0", "--timeout", "0"], "prefill=0: prefill-0, prefill-1 drained\n"),
                (["decode=2", "prefill=1"],
                 "decode=2: decode-1 started\nprefill=1: prefill-0 started\n"),
                (["decode=1", "--timeout", "0"], "decode=1: decode-1 drained\n"),
                (["decode=1"], "decode=1: nothing to do\n"),
            ):  # fmt: skip
                await load.more(4)
                assert await asyncio.to_thread(told, "scale", *words) == said
            await load.more(4)
        finally:
            load.stopped = True
            await running
        load.check()

    asyncio.run(under_load())
    for name in ("router-0", "router-1", "decode-0", "prefill-0"):
        told("drain", name)
    assert told("status") == "nothing is left; kvlane scale router=1 prefill=1 decode=1 starts it\n"
    refused = serve.command("restart")
    assert refused.returncode == 2
    assert "there is no worker to restart" in refused.stderr
    told("scale", "router=2", "prefill=1", "decode=1")
    assert sorted(serve.status()) == ["decode-0", "prefill-0", "router-0", "router-1"]
    asyncio.run(once_more(serve.url))


async def once_more(url: str) -> None:
    load = Steady(num_problems=NUM, max_tokens=MAX_TOKENS, num_at_once=2)
    running = asyncio.create_task(load.run(url))
    await load.more(4)
    load.stopped = True
    await running
    load.check()
