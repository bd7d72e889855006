"""The blocking face passes the suite too: `--atoll-face sync`, with the files that show most of it for their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import atoll.testing.conformance

SUITE = Path(atoll.testing.conformance.__file__).parent
FILES = ("test_exec.py", "test_pool.py")


def test_the_suite_holds_for_the_blocking_face() -> None:
    files = [str(SUITE / name) for name in FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "--atoll-face",
        "sync",
        "--atoll-runtime",
        "crun",
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout
