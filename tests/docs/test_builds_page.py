"""The example of `docs/builds.md` is true: its commands run in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "builds.md"


def test_the_example_is_built_and_serves(make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    state_dir = make_state_dir()
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
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
