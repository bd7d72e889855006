"""E2B's SDKs for JavaScript, unmodified, at the versions of `javascript/package-lock.json`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

from atoll.testing.plugin import STRICT
from atoll.testing.server import RunningServer

HERE = Path(__file__).with_name("javascript")
BOUND_S = 180


@pytest.mark.timeout(BOUND_S + 30)
def test_every_call_of_the_javascript_sdks_works(server: RunningServer) -> None:
    if shutil.which("node") is None or not (HERE / "node_modules").exists():
        reason = "Node, or the SDKs for JavaScript, are not installed (scripts/bootstrap test)"
        if STRICT:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    where = {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": server.key}
    walked = subprocess.run(
        ["node", "walk.mjs"],
        cwd=HERE,
        env={**os.environ, **where},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert walked.returncode == 0, walked.stdout
    with httpx2.Client(base_url=server.url, headers=server.headers) as client:
        client.delete("/templates/from-js").raise_for_status()
        for each in client.get("/api/v1/checkpoints").json()["items"]:
            client.delete(f"/api/v1/checkpoints/{each['id']}").raise_for_status()
