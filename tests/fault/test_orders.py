"""Orders over HTTP: a worker's role, there and back by the command, and a drain."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.shared import Clusters
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
