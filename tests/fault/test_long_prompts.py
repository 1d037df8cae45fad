"""Many long prompts, computed, while their worker dies: none is lost, and no link is closed on."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.e2e.shared import Clusters
from tests.support.pairwise import in_whole
from tests.support.patience import HANG_S

LENGTH = 4096
SETTINGS = (
    f"model.max_model_len={LENGTH + 64}",
    "router.queue_timeout_s=3000",
    "router.request_timeout_s=3000",
)


@pytest.mark.parametrize("num", in_whole((80,)))
def test_many_long_prompts_outlive_their_worker(clusters: Clusters, num: int) -> None:
    more = [word for each in SETTINGS for word in ("--set", each)]
    serve = clusters.fresh("--prefill", "1", "--decode", "2", *more)
    prompts = [[5 + (i + j) % 900 for j in range(LENGTH)] for i in range(num)]
    post = partial(httpx.post, f"{serve.url}/v1/completions", timeout=10 * HANG_S)
    with ThreadPoolExecutor(num) as threads:
        asked = [threads.submit(post, json={"prompt": p, "max_tokens": 4}) for p in prompts]
        asked[0].result()
        os.kill(serve.status()["decode-0"]["pid"], signal.SIGKILL)
        statuses = Counter(each.result().status_code for each in asked)
    assert statuses.keys() <= {200, 429}, statuses
    assert "more than a member has to say" not in serve.output
