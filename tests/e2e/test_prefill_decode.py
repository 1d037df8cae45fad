"""OpenAI's client against a cluster: texts as of one process, prompts computed elsewhere."""

import asyncio

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import MAX_TOKENS, NUM, check_cluster
from tests.e2e.shared import USUAL, Clusters
from tests.support import pairwise
from tests.support.asking import ask_all
from tests.support.reference import reference_texts


def test_concurrent_problems_equal_one_process(clusters: Clusters) -> None:
    serve = clusters.lend(*USUAL)
    check_cluster(serve.url, NUM if pairwise.whole else 16)
    rows = serve.wait_idle()
    assert {name for name, row in rows.items() if row["counters"]} >= {"prefill-1", "decode-1"}


def test_two_routers_share_a_port_and_the_workers(clusters: Clusters) -> None:
    serve = clusters.lend(*USUAL)
    questions = [problem.question for problem in held_out_problems(4)]
    rows = serve.status()
    for name in ("router-0", "router-1"):
        assert rows[name]["address"] == serve.url
        url = f"http://{rows[name]['metrics_address']}"  # of this very router
        outcomes = asyncio.run(ask_all(url, questions, max_tokens=MAX_TOKENS))
        assert [each.text for each in outcomes] == [
            text for text, _ in reference_texts(NUM, MAX_TOKENS)[:4]
        ]
    assert serve.output.count(f"{serve.url}/v1") == 2, "once to be read, once in the curl command"


def test_a_second_cluster_on_the_port_is_refused(clusters: Clusters) -> None:
    serve = clusters.lend(*USUAL)
    done = serve.command("serve", "--router", "2", "--port", str(serve.port))
    assert done.returncode == 2
    assert f"cluster.port: 127.0.0.1:{serve.port}: Address already in use" in done.stderr
