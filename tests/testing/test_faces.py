"""The blocking face and the engine of a server pass the suite too (`--atoll-face sync` and `remote`), with the files
that show most of it for their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import atoll.testing.conformance

SUITE = Path(atoll.testing.conformance.__file__).parent
FILES = ("test_exec.py", "test_pool.py")
REMOTE_FILES = ("test_kept.py", "test_pool.py", "test_sharing.py")
"""What a server could change, for its time. `make test-remote` runs all."""


@pytest.mark.parametrize(("face", "names"), [("sync", FILES), ("remote", REMOTE_FILES)])
def test_the_suite_holds_for_the_other_faces(face: str, names: tuple[str, ...]) -> None:
    files = [str(SUITE / name) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "--atoll-face",
        face,
        "--atoll-runtime",
        "crun",
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout
