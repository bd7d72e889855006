"""`docs/builds.md` is true: its commands run in an empty directory, and its requests over REST."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.testing.server import running_server

PAGE = (Path(__file__).parents[2] / "docs/builds.md").read_text()
CURL = (Path(__file__).parents[2] / "docs/server.md").read_text()
_CLEAN = """
atoll_curl --request DELETE "$URL/api/v1/sandboxes/site?checkpoints=true"
atoll_curl --request DELETE $URL/api/v1/templates/site
atoll_curl --request POST $URL/api/v1/templates/gc | jq '.removed | length'
"""


def test_the_requests_of_the_page_build_its_dockerfile(make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    (dockerfile,) = re.findall(r"<<'END'\n(.*?)^END$", PAGE, flags=re.DOTALL | re.MULTILINE)
    (requests,) = re.findall(r"^```sh\n(tar .*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    curl, *_ = re.findall(r"^(atoll_curl\(\) .*)$", CURL, flags=re.MULTILINE)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "Dockerfile").write_text(dockerfile)
    (tmp_path / "site" / "index.html").write_text("hello\n")
    with running_server(make_state_dir()) as server:
        script = "\n".join(["set -euo pipefail", f"URL={server.url} KEY={server.key}", curl, requests, _CLEAN])
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines() == ['"running"', "3"]
    told = (tmp_path / "log.txt").read_text()
    assert "COPY index.html /srv/site/" in told
    assert '"status":"ready"' in told


def test_the_example_is_built_and_serves(make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    state_dir = make_state_dir()
    block, *_ = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    script = f"set -euo pipefail\n{block}\natoll exec demo -- curl --silent http://127.0.0.1:8000\n"
    script += "atoll rm demo && atoll templates rm site && atoll templates gc\n"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ATOLL_STATE_DIR": str(state_dir),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[:2] == ["template:site", "demo"]
    assert "<h1>Hello</h1>" in done.stdout
